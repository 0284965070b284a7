"""The job of ``rl.py`` in the controller's process: the example, and the books of its GRPO steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "g2p"
COMPUTING = ("zbus-decode", "pt_", "gloo")
"""How the threads of a rank that compute are called, by their beginnings."""


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    left = [pid]
    while left:
        own = children.get(left.pop(), [])
        found += own
        left += own
    return found


def threads_of(pid: int) -> dict[int, tuple[str, float]]:
    """Return name and CPU seconds of each thread of a process, by its number."""
    found = {}
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(") ")
        except OSError:
            continue
        fields = tail.split()
        ticks = int(fields[11]) + int(fields[12])
        found[int(stat.parent.name)] = head.partition("(")[2], ticks / os.sysconf("SC_CLK_TCK")
    return found


def books(bus: Any) -> dict[str, float]:
    """Return CPU seconds of the job so far: ``all`` of them, those of the ``bus``, and of these each part's."""
    ranks = {pid: (role, own) for role in ("actor", "rollout") for pid, own in bus.group(role).cpu()}
    found = dict.fromkeys(("all", "bus", "controller", "actor", "rollout", "agents"), 0.0)
    for pid in (os.getpid(), *descendants(os.getpid())):
        parents = set(descendants(pid)) & set(ranks)  # an agent or a template has ranks below it
        threads = threads_of(pid)
        used = sum(seconds for _, seconds in threads.values())
        found["all"] += used
        if pid in ranks:
            part, own = ranks[pid]
            used -= own + sum(s for name, s in threads.values() if name.startswith(COMPUTING))
        elif pid == os.getpid() or parents:
            part = "agents" if parents and pid != os.getpid() else "controller"
        else:  # a reward
            continue
        found[part] += used
        found["bus"] += used
    return found


def drive(run: Any) -> dict[str, Any]:
    """Run the example, and keep the books of its GRPO steps. ``zbus-controller run`` calls this."""
    sys.path.insert(0, str(EXAMPLE))
    import grpo

    taken: list[dict[str, float]] = []

    class Job(grpo.Job):
        def examine(self) -> float:
            """Examine before the first and after the last step; the books are of what is between."""
            before = [] if taken else [super().examine()]
            taken.append(books(run.bus))
            return before[0] if before else super().examine()

        def keep(self, *, anew: bool = False) -> None:
            """Write no dumps, which are none of a step."""

    grpo.Job = Job
    metrics = grpo.main(run)
    first, last = taken
    return {**metrics, **{f"cpu_{name}": seconds - first[name] for name, seconds in last.items()}}
