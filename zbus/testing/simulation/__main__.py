"""``python -m zbus.testing.simulation``: runs seeds and prints what happened."""

from __future__ import annotations

import argparse
import json
import sys

from zbus.testing.simulation import joining_mutants, keeping_mutants, lending_mutants, trace_mutants  # noqa: F401  # they join the list
from zbus.testing.simulation.exhaustive import explore
from zbus.testing.simulation.mutants import MUTANTS, run_mutants
from zbus.testing.simulation.runner import Report, replay, run_for
from zbus.testing.simulation.shrink import shrink

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if every rule held, 1 if one was broken."""
    parser = argparse.ArgumentParser(prog="python -m zbus.testing.simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to run seeds (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default 0)")
    parser.add_argument(
        "--size",
        choices=("small", "large", "mixed", "registry", "trace", "keeping"),
        default="small",
        help="size of the runs",
    )
    parser.add_argument("--failures", type=int, default=1, help="stop after so many failing seeds (default 1)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="play one seed and tell its story")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="make a failing seed small and tell its story")
    parser.add_argument("--exhaustive", action="store_true", help="play every schedule of the small scopes")
    parser.add_argument("--mutants", action="store_true", help="break the machines by hand, each must be noticed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.mutants:
        return _mutants(as_json=options.json)
    if options.exhaustive:
        report = explore()
        print(json.dumps(report.as_json(), indent=1) if options.json else _text(report))  # noqa: T201
        return int(bool(report.failures))
    if options.shrink is not None:
        shrunk = shrink(options.shrink, options.size if options.size in ("large", "trace") else "small", lines=1000)
        print(shrunk or f"seed {options.shrink} breaks nothing")  # noqa: T201
        return int(shrunk is not None)
    if options.replay is not None:
        size = "small" if options.size == "mixed" else options.size
        print(failure := replay(options.replay, size, lines=1000))  # noqa: T201
        return int(failure.rule != "none")
    report = run_for(options.seconds, options.seed, options.size, stop_after=options.failures)
    print(json.dumps(report.as_json(), indent=1) if options.json else _text(report))  # noqa: T201
    return int(bool(report.failures))


def _mutants(*, as_json: bool) -> int:
    verdicts = run_mutants()
    killed = sum(verdict.killed for verdict in verdicts)
    if as_json:
        told = {
            "mutants": {"killed": killed, "total": len(verdicts)},
            "alive": [verdict.name for verdict in verdicts if not verdict.killed],
            "runs": {verdict.name: verdict.runs for verdict in verdicts},
        }
        print(json.dumps(told, indent=1))  # noqa: T201
    else:
        for verdict in verdicts:
            rule = "nothing" if verdict.failure is None else verdict.failure.rule
            word = "killed by" if verdict.killed else "ALIVE:   "
            print(f"{word} {rule:10} after {verdict.runs:6d} runs  {verdict.name}: {MUTANTS[verdict.name].doc}")  # noqa: T201
        print(f"{killed} of {len(verdicts)} mutants killed")  # noqa: T201
    return int(killed < len(verdicts))


def _text(report: Report) -> str:
    lines = [f"{failure}\n" for failure in report.failures]
    lines += [f"{number:10d}  {name}" for name, number in report.coverage().items()]
    lines.append(
        f"{report.runs} runs, {report.events} events, {len(report.failures)} violations in {report.seconds:.1f} s "
        f"({report.runs / max(1e-9, report.cpu_seconds):.0f} runs per second of one core)"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
