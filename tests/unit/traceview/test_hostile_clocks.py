from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from traceview.merge import merge
from traceview.problems import Problems
from traceview.stragglers import critical_paths, stragglers
from traceview.survey import survey

TIMES = [0, 1, -1, 1e3, -1e6, 3.9e15, -3.9e15, 1.8e15, 9e12, 1e14, 5e14, -5e14, 1e-3]
CLOCKS = [0, 1, -1, 10**9, 4 * 10**18, -4 * 10**18, 10**15, -(10**17), 1_796_000_000_000_000_000]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("rpc.client", {}),
    ("rpc.server", {}),
    ("wire", {"kind": "wire"}),
    ("call m", {"kind": "client", "outcome": "OK", "worker": "actor/0", "batch": 1}),
    ("queue m", {"kind": "queue"}),
    ("reply", {"kind": "reply"}),
    ("run m", {"kind": "run"}),
]


def hostile(rng: random.Random, role: str, rank: int) -> list[dict]:
    """Return the lines of a file whose clocks, calls and measured offsets make no sense."""
    lines: list[dict] = []
    if rng.random() < 0.7:
        args = {"format": 1, "run": "e", "role": role, "rank": rank, "pid": 7, "boot_id": rng.choice("abc")}
        args |= {name: rng.choice(CLOCKS) for name in ("mono_ns", "wall_ns", "epoch_mono_ns")}
        args["time_ns"] = rng.choice([0, 1, 2])
        lines.append({"name": "zbus_meta", "ph": "M", "ts": rng.choice(TIMES), "pid": 7, "args": args})
    for _ in range(rng.randint(1, 40)):
        name, more = rng.choice(KINDS)
        call = f"{rng.randrange(6):x}" if rng.random() < 0.9 else rng.choice(["", "é", "x" * 500, "-1"])
        span = {"name": name, "ph": "X", "ts": rng.choice(TIMES) * rng.uniform(0.5, 1), "dur": rng.choice(TIMES)}
        args = {"call": call, "method": "m", "attempt": rng.choice([1, 2, -5]), **more}
        lines.append({**span, "pid": 7, "tid": 1, "args": args})
    for _ in range(rng.choice([0, 0, 1, 5])):
        args = {name: rng.choice(CLOCKS) for name in ("at_ns", "offset_ns", "bound_ns")}
        args |= {"ref_boot_id": rng.choice(["a", "b", "zz", ""]), "ref_time_ns": rng.choice([0, 1, 2])}
        lines.append({"name": "zbus_clock", "ph": "M", "pid": 7, "args": args})
    return lines


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 150), marks=pytest.mark.ci)])
def test_times_and_offsets_that_make_no_sense_end_no_command(tmp_path: Path, seeds: range):
    """Clocks centuries off, calls that end before they begin, offsets of any size: never an error or an overflow."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in seeds:
            rng, root = random.Random(seed), tmp_path / str(seed)
            for role, rank in (("controller", 0), ("actor", 0), ("actor", 1)):
                path = root / role / f"traces_{rank}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(json.dumps(line) + "\n" for line in hostile(rng, role, rank)))
            for clocks in ("clock", "rpc", "none"):
                merge([str(root)], root / "o.json", jobs=1, clocks=clocks)
            found = survey([str(root)], Problems())
            stragglers(found)
            critical_paths(found)
