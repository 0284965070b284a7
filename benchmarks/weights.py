"""An update of weights, trainer to generators on one host, by each of the three paths, beside what it is made of.

    python benchmarks/weights.py --json
    python benchmarks/weights.py --rounds 3 --megabytes 100 --readers 4

One update of all tensors (float32) of a model: pause, publish, transfer, name, resume, with the digest of every rank
checked against the trainer's. Unit: seconds. ``ratio`` is to one ``memcpy`` of the model of that round, for ``disk``
to one plain write of its bytes with fsync. ``limit`` is to the copies and hashes alone that any path needs: one of both
at the trainer and at each reader, divided by the cores. ``lent`` is what the trainer lends of shared memory after an
update by ``memory``, in models: 1 where it was written once for all readers.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from rounds import Figures, parser, printer, wanted

from controller import Controller, Role
from controller.weights import WeightSync
from controller.weights.options import Way
from zbus.rl.weights import TensorInfo, digests

HERE = Path(__file__).resolve().parent
PATHS: Final[tuple[Way, ...]] = ("memory", "disk", "group")


def seconds(work: Any) -> float:
    """Return how long something takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def write(path: Path, data: np.ndarray[Any, Any]) -> None:
    """Write bytes, and have them on the disk."""
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
    path.unlink()


def lent(bus: Controller) -> int:
    """Return the bytes that the trainer lends."""
    return sum(one["shared_lent_bytes"] for name, one in bus.statuses().items() if name.role == "train")


def measure(figures: Figures, sync: WeightSync, path: str, folder: Path, readers: int) -> int:
    """Take one update and what it is made of; return the bytes of the model."""
    begin = time.perf_counter()
    report = sync.update()
    took = time.perf_counter() - begin
    assert len(report.ranks) == readers, report.stale
    source = np.ones(report.nbytes, np.uint8)
    target = np.zeros_like(source)
    copy = seconds(lambda: np.copyto(target, source))
    hashed = seconds(lambda: digests([(TensorInfo("all", "uint8", source.shape), source)]))
    base = copy if path != "disk" else seconds(lambda: write(folder / "plain", source))
    cores = min(readers + 1, len(os.sched_getaffinity(0)))
    figures.add(path, "update", "s", took, base, (1 + readers) * (copy + hashed) / cores)
    for phase in ("publish", "transfer"):
        figures.add(path, phase, "s", report.seconds[phase], base)
    return report.nbytes


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--megabytes", type=int, default=100, help="size of the model [100]")
    made.add_argument("--readers", type=int, default=4, help="ranks that generate [4]")
    options = made.parse_args()
    figures = Figures(options.rounds, printer(as_json=options.json))
    chosen = wanted(options.only)
    common: dict[str, Any] = {
        "kwargs": {"megabytes": options.megabytes},
        "preload": ["torch"],
        "sys_path": [str(HERE)],
    }
    roles = {
        "train": Role("weight_engines:Trainer", ports=1, **common),
        "rollout": Role("weight_engines:Generator", replicas=options.readers, **common),
    }
    with tempfile.TemporaryDirectory() as name, Controller.launch("weights", roles, root=name) as bus:
        train, rollout = bus.group("train"), bus.group("rollout")
        for path in filter(chosen, PATHS):
            sync = WeightSync(train, rollout, path=path, directory=Path(name) / "weights")
            sync.update(1)  # connections, groups and fresh pages
            sync.update()
            for _ in range(options.rounds):
                train.step()
                nbytes = measure(figures, sync, path, Path(name), options.readers)
                if path == "memory":
                    time.sleep(0.1)  # what was let go is told behind the update
                    figures.add("memory", "lent", "models", lent(bus) / nbytes)
            sync.close()
    figures.finish()


if __name__ == "__main__":
    main()
