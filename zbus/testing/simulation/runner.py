"""Runs seeds: one at a time, many for a while, and what to print when one fails."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from zbus.protocol.messages import Kind, Status
from zbus.testing.simulation.keeping import keeping
from zbus.testing.simulation.leases import leases
from zbus.testing.simulation.ledger import Violation
from zbus.testing.simulation.lending import lending
from zbus.testing.simulation.registry import claims
from zbus.testing.simulation.world import World

__all__ = ["Failure", "Report", "replay", "run_for", "run_seed", "run_seeds", "tell_failure"]

STORY_LINES: Final = 60
_CLAIMS_EVERY: Final = 256
"""Seeds between two plays of claims, leases, shared memory and kept values, which take some ten times as long."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke a rule: which, how, and the last events before it."""

    seed: int
    size: str
    rule: str
    text: str
    story: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that plays it again."""
        begin = "python -m zbus.testing.simulation"
        if self.size.startswith("exhaustive"):
            return f"{begin} --exhaustive"
        if self.size.startswith("shrunk"):
            _, _, seed, size = self.size.split()
            return f"{begin} --shrink {seed} --size {size}"
        return f"{begin} --replay {self.seed} --size {self.size}"

    def __str__(self) -> str:
        lines = "\n".join(f"  {line}" for line in self.story)
        return f"seed {self.seed} ({self.size}) broke {self.rule}: {self.text}\n{lines}\nreplay: {self.command}"


@dataclass(slots=True)
class Report:
    """What a series of runs did.

    Attributes:
        runs: Number of runs.
        events: Events in all of them.
        seconds: Wall time spent.
        cpu_seconds: Processor time spent; the rate is judged by it, since the machine may be shared.
        failures: Broken rules; the series stops at the first ones.
        covered: How often each fault, message and outcome happened.
    """

    runs: int = 0
    events: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    covered: dict[object, int] = field(default_factory=lambda: defaultdict(int))

    def coverage(self) -> dict[str, int]:
        """Return the counters by readable names, sorted."""
        return dict(sorted((_name(key), number) for key, number in self.covered.items()))

    def as_json(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "runs": self.runs,
            "events": self.events,
            "events_per_run": round(self.events / max(1, self.runs), 1),
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "runs_per_s": round(self.runs / max(1e-9, self.seconds), 1),
            "runs_per_cpu_s": round(self.runs / max(1e-9, self.cpu_seconds), 1),
            "violations": [
                {"seed": failure.seed, "size": failure.size, "rule": failure.rule, "text": failure.text,
                 "replay": failure.command}
                for failure in self.failures
            ],
            "coverage": self.coverage(),
        }  # fmt: skip


def run_seed(seed: int, size: str = "small", *, report: Report | None = None) -> Failure | None:
    """Play one run; None if every rule held. A failing run is played again to tell its story."""
    report = Report() if report is None else report
    report.runs += 1
    if size in _APART:
        return _run_apart(seed, size, report)
    world = World(seed, size, report.covered)
    try:
        world.run()
    except Exception:  # noqa: BLE001  # whatever a machine raises is a failure of that seed
        failure = replay(seed, size)
        report.failures.append(failure)
        return failure
    report.events += world.events
    return None


def _run_apart(seed: int, size: str, report: Report) -> Failure | None:
    try:
        _APART[size](seed, report.covered)
    except Exception as error:  # noqa: BLE001  # as above
        failure = Failure(seed, size, *_told(error), ())
        report.failures.append(failure)
        return failure
    return None


def _claims(seed: int, covered: dict[object, int]) -> None:
    claims(seed, covered)
    for part in range(2):
        leases(seed * 2 + part, covered)
        lending(seed * 2 + part, covered)


_APART: Final[dict[str, Callable[[int, dict[object, int]], None]]] = {"registry": _claims, "keeping": keeping}
"""What is played by itself, by size."""


def replay(seed: int, size: str = "small", *, lines: int = STORY_LINES) -> Failure:
    """Play a failing run again and return it with its story; a run that holds has the rule ``none``."""
    if size in _APART:
        return _run_apart(seed, size, Report()) or Failure(seed, size, "none", "nothing was broken", ())
    return tell_failure(seed, size, lambda story: World(seed, size, defaultdict(int), story), lines=lines)


def tell_failure(seed: int, size: str, make: Callable[[deque[str]], World], *, lines: int = STORY_LINES) -> Failure:
    """Play a run that ``make`` builds around a story, and return it with that story."""
    story: deque[str] = deque(maxlen=lines)
    world = make(story)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001  # as above
        return Failure(seed, size, *_told(error), tuple(story))
    return Failure(seed, size, "none", f"nothing was broken; {world.knobs}", tuple(story))


def _told(error: Exception) -> tuple[str, str]:
    """Return which rule was broken, and how."""
    if isinstance(error, Violation):
        return error.rule, str(error)
    rule = "validate" if isinstance(error, AssertionError) else type(error).__name__
    return rule, f"{rule}: {error}{_where(error)}"


def run_seeds(seeds: Iterable[int], size: str = "small", *, stop_after: int = 1) -> Report:
    """Play the given seeds; stop after some failures."""
    report = Report()
    began, cpu_began = time.perf_counter(), time.process_time()
    for seed in seeds:
        if run_seed(seed, size, report=report) is not None and len(report.failures) >= stop_after:
            break
    report.seconds = time.perf_counter() - began
    report.cpu_seconds = time.process_time() - cpu_began
    return report


def run_for(seconds: float, first_seed: int = 0, size: str = "small", *, stop_after: int = 1) -> Report:
    """Play seeds from ``first_seed`` on for a while.

    When ``size`` is ``mixed`` every 16th run is large, and another one is about traces.
    """
    report = Report()
    began, cpu_began = time.perf_counter(), time.process_time()
    seed = first_seed
    while time.perf_counter() - began < seconds:
        this = {0: "large", 8: "trace"}.get(seed % 16, "small") if size == "mixed" else size
        if run_seed(seed, this, report=report) is not None and len(report.failures) >= stop_after:
            break
        if seed % _CLAIMS_EVERY == 0:
            for apart in _APART:
                run_seed(seed, apart, report=report)
            if len(report.failures) >= stop_after:
                break
        seed += 1
    report.seconds = time.perf_counter() - began
    report.cpu_seconds = time.process_time() - cpu_began
    return report


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" (in {trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno})"


def _name(key: object) -> str:
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], int):
        status = f" {Status(key[1]).name}" if key[1] else ""
        return f"message: {Kind(key[0]).name}{status}"
    if isinstance(key, tuple):
        first, *rest = (Status(part).name if isinstance(part, int) else str(part) for part in key)
        return f"{first}: {' '.join(rest)}".rstrip()
    return str(key)
