"""``python -m zbus.testing.chaos``: one soak run; prints its figures. Exit code 1 if a promise was broken."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from zbus.testing.chaos.soak import Report, run_soak

__all__ = ["main"]

_FIGURES = ("calls", "faults", "duplicates", "lost", "hangs", "orphans", "leaks", "unknown", "kills")


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m zbus.testing.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to call and harm (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of faults and workload (default 0)")
    parser.add_argument("--workers", type=int, default=4, help="ranks of the trial (default 4)")
    parser.add_argument("--far", action="store_true", help="no shared memory, and tcp: as on hosts of their own")
    parser.add_argument("--directory", type=Path, help="keep trial, history and logs there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(name)s %(message)s")
    report = run_soak(
        options.seconds, options.seed, workers=options.workers, far=options.far, directory=options.directory
    )
    print(json.dumps(report.as_json(), indent=1) if options.json else _text(report))  # noqa: T201
    return int(bool(report.failures))


def _text(report: Report) -> str:
    figures = report.as_json()
    lines = [f"broken: {failure}" for failure in report.failures]
    lines += [f"unknown {number}: {cause}" for cause, number in report.findings.unknown.most_common(12)]
    lines.append(", ".join(f"{figures[name]} {name}" for name in _FIGURES) + f" in {report.seconds:g} s")
    if report.failures:
        lines.append(f"seed {report.seed}; look into {report.directory}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
