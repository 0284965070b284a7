"""``zbus-controller status``: what each rank of a trial does, from its files and from the ranks themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from controller.console import Console, Style, clean
from controller.trials import Snapshot, find_trial, is_here, snapshot
from zbus.config import format_duration, format_size
from zbus.runtime.processes import describe_exit, is_alive

if TYPE_CHECKING:
    from zbus.registry.records import WorkerRecord

__all__ = ["describe", "show_status", "table"]

_COLUMNS: Final = ("role", "rank", "host", "pid", "start", "state", "call", "age", "rss", "lent", "refs", "note")
_PROBE_S: Final = 2.0


def show_status(console: Console, root: str | None, name: str | None) -> int:
    """Show one trial and return the exit code.

    Raises:
        TrialError: The trial is not found or ambiguous.
        RegistryError: Its registry cannot be read.
    """
    trial = find_trial(root, name)
    data = describe(snapshot(trial))
    console.object(data)
    console.result(_text(data, console.out_style()))
    if data["state"] == "running":
        console.next(f"zbus-controller stop {data['trial']}")
    return 0


def describe(found: Snapshot, probe_s: float = _PROBE_S) -> dict[str, Any]:
    """Return the status as data (``zbus.status/1``).

    Args:
        found: What the files say.
        probe_s: Seconds to wait for answers of running ranks; 0 asks nobody.
    """
    answers: Mapping[int, Mapping[str, Any]] = {}
    running = [worker for worker in found.workers if worker.incarnation not in found.exits]
    if found.state in ("running", "unknown") and running and probe_s > 0:
        from controller.probe import ask_status

        answers = ask_status(running, probe_s)
    workers = [_worker(worker, found, answers.get(worker.incarnation)) for worker in found.workers]
    epoch = found.epoch
    return {
        "schema": "zbus.status/1",
        "experiment": found.trial.experiment,
        "trial": found.trial.trial,
        "trial_dir": str(found.trial.path),
        "state": found.state,
        "running_s": _running_s(found),
        "controller": None
        if epoch is None
        else {"host": epoch.host, "pid": epoch.pid, "epoch": epoch.epoch, "version": epoch.version},
        "roles": [_role(role, size, workers) for role, size in sorted(found.expected.items())],
        "workers": workers,
        "summary": dict(found.summary) or None,
    }


def _running_s(found: Snapshot) -> float | None:
    if found.state != "running" or found.epoch is None or not found.epoch.run_epoch_wall_ns:
        return None
    return round(max(0.0, time.time() - found.epoch.run_epoch_wall_ns / 1e9), 1)


def _role(role: str, size: int, workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    states = [worker["state"] for worker in workers if worker["role"] == role]
    return {
        "role": role,
        "world_size": size,
        "ready": sum(state in ("idle", "busy", "running") for state in states),
        "exited": sum(state == "exited" for state in states),
        "missing": max(0, size - len(states)),
    }


def _worker(worker: WorkerRecord, found: Snapshot, answer: Mapping[str, Any] | None) -> dict[str, Any]:
    exit_record = found.exits.get(worker.incarnation)
    data: dict[str, Any] = {
        "role": worker.role,
        "rank": worker.rank,
        "host": worker.host,
        "pid": worker.pid,
        "start": worker.start,
        "state": "unknown",
        "call": None,
        "rss_bytes": None,
        "log": worker.log or None,
        "exit": None,
        "refused": {},
        "slow_handlers": 0,
        "memory": None,
        "note": None,
    }
    if exit_record is not None:
        data["state"] = "exited"
        data["exit"] = {"code": exit_record.exit_code, "signal": exit_record.signal, "oom": exit_record.oom}
        reason = describe_exit(exit_record.exit_code, exit_record.signal)
        data["note"] = f"{reason} (out of memory)" if exit_record.oom else exit_record.reason or reason
    elif answer is not None:
        call = answer.get("call") or None
        data["state"] = "busy" if call else "idle"
        data["call"] = dict(call) if isinstance(call, Mapping) else None
        data["rss_bytes"] = answer.get("rss_bytes")
        data["refused"] = dict(answer.get("refused") or {})
        data["memory"] = _memory(answer)
        data["slow_handlers"] = int((answer.get("slow_handlers") or {}).get("count", 0))
        if data["slow_handlers"]:
            data["note"] = f"{data['slow_handlers']} slow handlers, see its log"
    elif is_here(worker.host, worker.pid_space):
        alive = is_alive(worker.pid, worker.pid_start)
        data["state"] = "running" if alive else "lost"
        if alive and found.state == "running":
            data["note"] = "did not answer"
    return data


def _memory(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank lends and keeps, and for whom, as its answer says."""
    return {
        "shared_bytes": answer.get("shared_bytes", 0),
        "lent_bytes": answer.get("shared_lent_bytes", 0),
        "refs": answer.get("refs", 0),
        "refs_bytes": answer.get("refs_bytes", 0),
        "refs_limit": answer.get("refs_limit", 0),
        "oldest_s": answer.get("refs_oldest_s", 0.0),
        "holders": [dict(holder) for holder in answer.get("refs_holders") or ()],
    }


# -- text --------------------------------------------------------------------------------------------------------------


def _text(data: Mapping[str, Any], style: Style) -> str:
    running = data["running_s"]
    state = data["state"] if running is None else f"{data['state']} for {format_duration(running)}"
    head = [f"{data['experiment']}/{data['trial']}", state]
    if data["controller"] is not None:
        head.append(f"controller pid {data['controller']['pid']} on {data['controller']['host']}")
    lines = [style("  ".join(clean(part) for part in head), "bold")]
    if data["workers"]:
        lines += table(_COLUMNS, [_row(worker) for worker in data["workers"]], style)
    lines += [
        f"role {role['role']}: {role['missing']} of {role['world_size']} ranks have not started"
        for role in data["roles"]
        if role["missing"]
    ]
    lines.append(f"directory {data['trial_dir']}")
    return "\n".join(lines)


def _row(worker: Mapping[str, Any]) -> list[str]:
    call = worker["call"] or {}
    age = call.get("age_s")
    rss = worker["rss_bytes"]
    return [
        worker["role"],
        str(worker["rank"]),
        worker["host"],
        str(worker["pid"]),
        str(worker["start"]),
        worker["state"],
        str(call.get("method", "-")),
        format_duration(age) if isinstance(age, (int, float)) else "-",
        format_size(rss) if isinstance(rss, int) else "-",
        *_held(worker["memory"]),
        worker["note"] or "-",
    ]


def _held(memory: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return what a rank lends, and what it keeps: how many bytes, in how many values, for how long at most."""
    if memory is None:
        return "-", "-"
    lent = format_size(memory["lent_bytes"]) if memory["lent_bytes"] else "-"
    if not memory["refs"]:
        return lent, "-"
    return lent, f"{format_size(memory['refs_bytes'])} in {memory['refs']}, {format_duration(memory['oldest_s'])}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], style: Style) -> list[str]:
    """Return aligned lines; numbers stand right only where the whole column is numbers."""
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(columns)]
    numeric = [all(row[i].isdigit() for row in cells) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)]
        return "  ".join(parts).rstrip()

    return [style(line(columns), "dim"), *(line(row) for row in cells)]
