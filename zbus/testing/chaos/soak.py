"""One soak run: trial, callers and nemesis together; then the checker, and a look at what was left behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from controller import Controller, Role
from controller.background import shared
from zbus.config import Config
from zbus.data.presence import lives, shared_root
from zbus.errors import ZbusError
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records
from zbus.testing.chaos.checker import Findings, check
from zbus.testing.chaos.history import History, read_history
from zbus.testing.chaos.keeping import held
from zbus.testing.chaos.load import GRACE_S, Load
from zbus.testing.chaos.memory import Memory
from zbus.testing.chaos.nemesis import Nemesis, plan
from zbus.testing.chaos.subject import GEN_CONCURRENCY
from zbus.testing.chaos.traces import TraceFindings, check_traces
from zbus.testing.chaos.truth import runs_of
from zbus.testing.proxy import FaultProxy, between, quick
from zbus.transport.multipart import COPY_LIMIT, send
from zbus.transport.sockets import SocketFactory

__all__ = ["Report", "run_soak"]

log = logging.getLogger("zbus.soak")

_ROLE: Final = "subject"
_ENGINE: Final = "zbus.testing.chaos.subject:Subject"
_AT_ONCE: Final = 1 + GEN_CONCURRENCY  # calls that run at once in a worker: one on ``main``, the others on ``gen``
_PROBE_MS: Final = 100.0
_RECOVERY_S: Final = 20.0
_GONE_S: Final = 5.0
_SETTLE_S: Final = 20.0 + GRACE_S + 5.0


@dataclass
class Report:
    """What a soak run found. ``failures`` is empty if every promise was kept and every planned fault was injected."""

    seed: int
    seconds: float
    planned: int
    calls: int = 0
    kills: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    orphans: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    restarts: int = 0
    rss_mb: tuple[float, float] = (0.0, 0.0)
    rss_slopes: dict[str, float] = field(default_factory=dict)
    traces: TraceFindings | None = None
    messages: dict[str, int] = field(default_factory=dict)
    directory: str = ""

    @property
    def faults(self) -> int:
        """How many faults were injected."""
        return sum(self.injected.values())

    @property
    def failures(self) -> list[str]:
        """All that is wrong, in words."""
        found = [*self.problems, *self.findings.examples]
        if self.traces is not None:
            found += [f"trace: {text}" for text in self.traces.broken]
        found += [f"orphan: {text}" for text in self.orphans] + [f"leak: {text}" for text in self.leaks]
        if self.faults < self.planned:
            found.append(f"only {self.faults} of {self.planned} planned faults were injected")
        if self.findings.began > self.kills * _AT_ONCE:
            found.append(
                f"{self.findings.began} calls began and did not end, by {self.kills} kills of {_AT_ONCE} at once"
            )
        if not self.findings.outcomes["OK"]:
            found.append("no call was answered OK")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        findings = self.findings
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "calls": self.calls,
            "faults": self.faults,
            "duplicates": findings.duplicates,
            "lost": findings.lost,
            "hangs": findings.hangs,
            "orphans": len(self.orphans),
            "leaks": len(self.leaks),
            "unknown": findings.outcomes["UNKNOWN"],
            "kills": self.kills,
            "untrue": findings.untrue,
            "disorder": findings.disorder,
            "restarts": self.restarts,
            "planned": self.planned,
            "injected": dict(self.injected),
            "outcomes": dict(findings.outcomes),
            "unknown_causes": dict(findings.unknown.most_common(12)),
            "began_no_end": findings.began,
            "messages": self.messages,
            "rss_mb": list(self.rss_mb),
            "rss_mb_per_minute": self.rss_slopes,
            "trace": None if self.traces is None else self.traces.as_json(),
            "failures": self.failures,
            "directory": self.directory,
        }


def run_soak(
    seconds: float, seed: int = 0, *, workers: int = 4, far: bool = False, directory: Path | None = None
) -> Report:
    """Run the soak and check it. Call on the main thread of a process of its own.

    Args:
        seconds: How long the callers call; starting, settling and checking come on top, some 10 s.
        seed: Of faults and workload. When a fault meets which call differs from run to run.
        workers: Ranks of the trial.
        far: No process shares memory with another, and all speak tcp, as on hosts of their own.
        directory: Where trial, history, ground truth and fault log go; a temporary one, removed if all is well.
    """
    made = Path(tempfile.mkdtemp(prefix="zbus-soak-")) if directory is None else directory
    made.mkdir(parents=True, exist_ok=True)
    _warm_up(made / "warm-up")
    faults = plan(seed, seconds, workers, traced=_traced(seed))
    report = Report(seed=seed, seconds=seconds, planned=len(faults), directory=str(made))
    before = _Belongings.now()
    with _logged(made / "controller.log"), History(made / "history.jsonl") as history:
        _run(report, made, history, faults, seconds, _config(seed, far=far), seed, workers)
        report.calls = history.calls
    report.leaks += before.missing_now()
    report.orphans += _orphans(made)
    truth = runs_of(made / "truth.log")
    report.findings = check(read_history(made / "history.jsonl"), truth)
    if _traced(seed):
        report.traces = check_traces(made / "soak" / "run", truth, _ROLE)
    if directory is None and not report.failures:
        _remove(made)
    return report


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Write what this process's bus logs to a file."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("zbus")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


def _run(
    report: Report,
    made: Path,
    history: History,
    faults: list[Any],
    seconds: float,
    config: Config,
    seed: int,
    workers: int,
) -> None:
    role = Role(
        _ENGINE,
        replicas=workers,
        args=[str(made / "truth.log")],
        restart="one",
        max_restarts=10_000,
        restart_window_s=1.0,
    )
    with FaultProxy(seed) as proxy, between(proxy, timing=quick(_PROBE_MS)):
        bus = Controller.launch("soak", {_ROLE: role}, root=made, trial="run", startup_timeout=60.0, config=config)
        runtime, nemesis = "", None
        try:
            records = Records(FileRegistry(bus.trial.registry, create=False))
            epoch = records.current_epoch()
            runtime = "" if epoch is None else epoch.runtime_dir
            group = bus.group(_ROLE)
            nemesis = Nemesis(
                faults,
                _ROLE,
                records,
                proxy,
                truth=made / "truth.log",
                log_file=made / "faults.jsonl",
                trial=Path(bus.trial.path),
            )
            agents = [(f"agent {agent.role}", agent.pid) for agent in records.agents(_ROLE)]
            memory = Memory(max(1.0, seconds / 60), lambda: agents)
            load = Load(bus, group, history, seed)
            load.start()
            nemesis.start()
            time.sleep(seconds / 3)
            memory.start()
            time.sleep(seconds * 2 / 3)
            memory.stop()
            nemesis.stop()
            report.problems += [f"caller {name} hangs" for name in load.stop(_SETTLE_S)] + load.errors
            report.rss_mb, report.rss_slopes = memory.lows(), memory.slopes()
            report.problems += nemesis.errors
            report.injected, report.kills = nemesis.injected, nemesis.kills
            report.messages = dict(proxy.counters)
            report.problems += _recovered(group)
            del load  # and with it what its callers hold
            report.leaks += _still_held(bus)
            ends = records.exits(_ROLE)
            report.restarts = len(ends)
            report.problems += [
                f"{end.role}/{end.rank} start {end.start} ended by itself: {end.reason}; log {end.log}"
                for end in ends
                if end.signal != signal.SIGKILL
            ]
            records.close()
        finally:
            bus.close()
            if nemesis is not None:
                report.problems += nemesis.end_sidecars()
    if runtime and Path(runtime).exists():
        report.leaks.append(f"socket directory {runtime}: {sorted(p.name for p in Path(runtime).iterdir())}")


def _config(seed: int, *, far: bool) -> Config:
    """Return the config of a run: every second one is traced, through a sidecar."""
    config = Config()
    traced = _traced(seed)
    if far:
        scheduler = replace(config.scheduler, transport="tcp")
        config = replace(config, scheduler=scheduler, data=replace(config.data, shared_memory=0))
    return replace(config, trace=replace(config.trace, level="rpc" if traced else "off", sidecar=traced))


def _traced(seed: int) -> bool:
    """Return whether a run is traced; plain calls of the others take a shorter way."""
    return seed % 2 == 0


def _recovered(group: Any) -> list[str]:
    """After the last fault every rank must take calls again soon."""
    until = time.monotonic() + _RECOVERY_S
    told = ""
    while time.monotonic() < until:
        try:
            if group.ready:
                group.where.options(deadline=5.0, retries=3)()
                return []
            peers = group._view.core.roster.peers()  # noqa: SLF001  # what it knows, when it does not recover
            told = f"{group!r}: " + "; ".join(f"{peer.name} {peer.state.value} {peer.evidence}" for peer in peers)
        except ZbusError as error:
            told = str(error)
        time.sleep(0.05)
    return [f"not recovered {_RECOVERY_S:g} s after the last fault: {told}"]


def _still_held(bus: Controller) -> list[str]:
    """Return who keeps values though nobody holds any, after the time that takes."""
    until = time.monotonic() + _SETTLE_S
    while (told := held(bus)) and time.monotonic() < until:
        time.sleep(0.05)
    return told


def _warm_up(root: Path) -> None:
    """Launch once, so that what is made once per process (modules, helper threads) is there before the count."""
    role = Role(_ENGINE, replicas=1, args=[str(root / "truth.log")])
    root.mkdir(parents=True, exist_ok=True)
    with FaultProxy() as proxy, between(proxy), Controller.launch("soak", {_ROLE: role}, root=root) as bus:
        bus.group(_ROLE).once.submit("w", 0.0, bytes(1 << 20)).result(30.0)
    _send_uncopied()
    done = threading.Event()
    shared().call(done.set)
    done.wait(10.0)


def _send_uncopied() -> None:
    """Send a frame without a copy: from the first one on pyzmq has a thread for what was sent so."""
    factory = SocketFactory(max_sockets=8)
    router, dealer = factory.router("main"), factory.dealer("main")
    factory.connect(dealer, factory.bind(router, "tcp://127.0.0.1:0"))
    until = time.monotonic() + _GONE_S
    while not send(dealer, [bytes(COPY_LIMIT)]) and time.monotonic() < until:
        time.sleep(0.01)
    dealer.close()
    router.close()
    factory.close()


# -- what is left behind ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Belongings:
    """What this process holds, and shared memory of this user, at one moment."""

    descriptors: Counter[str]
    threads: int
    shm: frozenset[str]

    @classmethod
    def now(cls) -> _Belongings:
        gc.collect()
        root = shared_root()
        names = (entry.name for entry in root.iterdir()) if root.is_dir() else ()
        return cls(_descriptors(), threading.active_count(), frozenset(names))

    def missing_now(self) -> list[str]:
        """Return what has come and not gone, after a moment for what is just going."""
        until = time.monotonic() + _GONE_S
        while (told := self._more()) and time.monotonic() < until:
            time.sleep(0.05)
        return told

    def _more(self) -> list[str]:
        now = _Belongings.now()
        told = [f"descriptors {dict(more)}"] if (more := now.descriptors - self.descriptors) else []
        if now.threads > self.threads:
            told.append(f"threads {[thread.name for thread in threading.enumerate()]}")
        return told + [f"shared memory {name}" for name in sorted(now.shm - self.shm) if _mine(name)]


def _descriptors() -> Counter[str]:
    """Return the open descriptors of this process, by kind."""
    found: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            found[target if target.startswith("anon_inode") else target.partition(":[")[0]] += 1
    return +Counter({kind: number for kind, number in found.items() if not kind.startswith("/proc/")})


def _mine(name: str) -> bool:
    with contextlib.suppress(OSError):
        return not lives(shared_root(), name)  # another run's processes may come and go meanwhile
    return False


def _orphans(made: Path) -> list[str]:
    """Return living processes of the trial, after the time they are allowed."""
    until = time.monotonic() + _GONE_S
    while (left := list(_processes_of(made))) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _processes_of(made: Path) -> Iterator[str]:
    mark = os.fsencode(made)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), os.getppid()):
            continue
        with contextlib.suppress(OSError, IndexError):
            command = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if state not in "ZX" and (mark in command or mark in (entry / "environ").read_bytes()):
                yield f"{entry.name} {command[:80]!r}"


def _remove(made: Path) -> None:
    import shutil

    shutil.rmtree(made, ignore_errors=True)
