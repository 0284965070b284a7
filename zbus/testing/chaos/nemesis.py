"""The faults of the soak: planned from a seed before the run, each written down when it was injected."""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from zbus.errors import RegistryError
from zbus.protocol.messages import Kind
from zbus.registry.records import Records
from zbus.runtime.processes import ProcessHandle
from zbus.testing.chaos.truth import running_on
from zbus.testing.proxy import FaultProxy, Rule
from zbus.trace.export import sidecar_record
from zbus.trace.launch import Sidecar

__all__ = ["Fault", "Nemesis", "plan"]

log = logging.getLogger("zbus.soak")

_WEIGHTS: Final = {
    "kill": 3,
    "stop": 3,
    "stop_and_kill": 1,
    "drop_request": 3,
    "drop_reply": 3,
    "duplicate": 2,
    "delay": 2,
    "cut": 3,
    "cut_in_message": 2,
    "freeze": 2,
    "refuse": 1,
    "replay": 2,
    "sick_disk": 1,
}
_TRACED: Final = {"sidecar_kill": 1, "sidecar_stop": 1}


_MOMENT_S: Final = 0.5


class Fault(NamedTuple):
    """One planned fault.

    Attributes:
        at: Seconds from the begin of the run.
        kind: What is done.
        rank: To whom.
        seconds: How long it lasts.
        amount: How much of it: a count, or a chance in percent.
    """

    at: float
    kind: str
    rank: int
    seconds: float
    amount: int


def plan(
    seed: int, seconds: float, ranks: int, *, gap_s: tuple[float, float] = (0.2, 0.8), traced: bool = False
) -> list[Fault]:
    """Return the faults of a run: a pure function of its arguments.

    Args:
        seed: Of all choices.
        seconds: Length of the run; the last second stays free of faults.
        ranks: Number of workers.
        gap_s: Shortest and longest pause between two faults.
        traced: Harm the trace sidecar too.
    """
    weights = {**_WEIGHTS, **_TRACED} if traced else _WEIGHTS
    chance = random.Random(f"nemesis.{seed}")  # noqa: S311  # faults, not secrets
    faults = []
    at = chance.uniform(*gap_s)
    while at < seconds - 1.0:
        kind = chance.choices(list(weights), list(weights.values()))[0]
        faults.append(Fault(at, kind, chance.randrange(ranks), chance.uniform(0.05, 1.0), chance.randrange(1, 40)))
        at += chance.uniform(*gap_s)
    return faults


class Nemesis:
    """Injects planned faults on a thread of its own.

    Args:
        faults: The plan.
        role: Role of the workers.
        records: Registry of the trial, to find the living.
        proxy: Between the callers and the workers.
        truth: The ground-truth file, to see what runs.
        log_file: Where each injected fault is written.
        trial: The trial's directory, to restart its trace sidecar.

    Attributes:
        injected: How many were injected, by kind.
        kills: Workers that lived when they were killed.
        errors: What went wrong in injecting, which must be nothing.
    """

    def __init__(
        self,
        faults: list[Fault],
        role: str,
        records: Records,
        proxy: FaultProxy,
        *,
        truth: Path,
        log_file: Path,
        trial: Path,
    ) -> None:
        self.injected: Counter[str] = Counter()
        self.kills = 0
        self.errors: list[str] = []
        self._faults = faults
        self._role = role
        self._records = records
        self._proxy = proxy
        self._truth = truth
        self._trial = trial
        self._sidecars: list[Sidecar] = []
        self._killed: set[int] = set()
        self._log = log_file.open("w", encoding="utf-8")
        self._began = 0.0
        self._heals: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-nemesis", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._began = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End all faults that are in force."""
        self._over.set()
        self._thread.join(30.0)
        if self._thread.is_alive():
            self.errors.append("the nemesis did not end")
        while self._heals:
            heapq.heappop(self._heals)[2]()
        self._proxy.heal()
        self._log.close()

    def end_sidecars(self) -> list[str]:
        """End the sidecars that were started here, once the traced processes are gone; return what went wrong."""
        ended = [(one, one.stop()) for one in self._sidecars]
        return [
            f"a restarted sidecar ended with code {one.process.returncode}"
            for one, well in ended
            if not well and one.process.pid not in self._killed
        ]

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        for fault in self._faults:
            while (now := time.monotonic() - self._began) < fault.at:
                due = min(fault.at, self._heals[0][0]) if self._heals else fault.at
                if self._over.wait(max(0.0, due - now)):
                    return
                self._heal_due()
            try:
                told = self._inject(fault)
            except Exception as error:  # a nemesis that dies must not pass for a calm run
                log.exception("could not inject %s", fault)
                self.errors.append(f"{fault.kind}: {type(error).__name__}: {error}")
                continue
            self.injected[fault.kind] += 1
            self._write(fault, told)
        while self._heals and not self._over.wait(max(0.0, self._heals[0][0] - (time.monotonic() - self._began))):
            self._heal_due()

    def _heal_due(self) -> None:
        while self._heals and self._heals[0][0] <= time.monotonic() - self._began:
            heapq.heappop(self._heals)[2]()

    def _later(self, seconds: float, heal: Callable[[], None]) -> None:
        heapq.heappush(self._heals, (time.monotonic() - self._began + seconds, next(self._numbers), heal))

    def _write(self, fault: Fault, told: str) -> None:
        line = {"t": round(time.monotonic() - self._began, 3), **fault._asdict(), "what": told}
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()

    # -- the faults --------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> str:
        return str(getattr(self, f"_{fault.kind}")(fault, f"{self._role}/{fault.rank}"))

    def _living(self, rank: int) -> ProcessHandle | None:
        newest = max(
            (record for record in self._records.workers(self._role) if record.rank == rank),
            key=lambda record: record.start,
            default=None,
        )
        return None if newest is None else ProcessHandle.open(newest.pid, newest.pid_start)

    def _await_living(self, rank: int) -> ProcessHandle:
        """Return the process of a rank, waiting for its restart if it was just killed."""
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            with suppress(RegistryError):
                handle = self._living(rank)
                if handle is not None:
                    return handle
            time.sleep(0.02)
        msg = f"rank {rank} was not there for 10 s"
        raise RuntimeError(msg)

    def _kill(self, fault: Fault, _worker: str) -> str:
        handle = self._await_living(fault.rank)
        running = self._await_running(fault.rank) if fault.amount % 4 else ""  # the others hit whatever there is
        self._end(handle)
        return f"pid {handle.pid} {running}"

    def _end(self, handle: ProcessHandle) -> None:
        """Kill a process, and count it if it lived."""
        self.kills += not handle.ended()
        handle.signal(signal.SIGKILL)
        handle.close()

    def _await_running(self, rank: int) -> str:
        """Wait a moment for a call that runs on a rank, as the ground truth tells, and return its id."""
        until = time.monotonic() + _MOMENT_S
        while time.monotonic() < until:
            running = running_on(self._truth, rank)
            if running:
                return running
            time.sleep(0.0005)
        return ""

    def _stop_and_kill(self, fault: Fault, _worker: str) -> str:
        handle = self._await_living(fault.rank)
        handle.signal(signal.SIGSTOP)
        self._later(fault.seconds / 2, lambda: self._end(handle))
        return f"pid {handle.pid}"

    def _stop(self, fault: Fault, _worker: str) -> str:
        handle = self._await_living(fault.rank)
        handle.signal(signal.SIGSTOP)

        def go_on() -> None:
            handle.signal(signal.SIGCONT)
            handle.close()

        self._later(fault.seconds, go_on)
        return f"pid {handle.pid}"

    def _drop_request(self, fault: Fault, worker: str) -> str:
        return self._rule(fault, self._proxy.drop("request", **self._which(fault, worker)))

    def _drop_reply(self, fault: Fault, worker: str) -> str:
        return self._rule(fault, self._proxy.drop("reply", **self._which(fault, worker)))

    def _duplicate(self, fault: Fault, worker: str) -> str:
        return self._rule(fault, self._proxy.duplicate("both", **self._which(fault, worker)))

    def _delay(self, fault: Fault, worker: str) -> str:
        which = self._which(fault, worker)
        return self._rule(fault, self._proxy.delay(0.05, "both", overtake=fault.amount % 2 == 0, **which))

    def _cut_in_message(self, fault: Fault, worker: str) -> str:
        kinds = {Kind.REQ, Kind.RESULT}
        rule = self._proxy.cut_at(10 * fault.amount, "both", worker=worker, kinds=kinds, skip=fault.amount % 7)
        return self._rule(fault, rule)

    def _which(self, fault: Fault, worker: str) -> dict[str, Any]:
        return {"worker": worker, "probability": 0.5, "count": fault.amount}

    def _rule(self, fault: Fault, rule: Rule) -> str:
        self._later(fault.seconds, rule.stop)
        return repr(rule)

    def _cut(self, _fault: Fault, worker: str) -> str:
        return f"{self._proxy.cut(worker)} connections"

    def _freeze(self, fault: Fault, worker: str) -> str:
        self._proxy.freeze(worker)
        self._later(fault.seconds, self._proxy.thaw)
        return "both ways"

    def _refuse(self, fault: Fault, worker: str) -> str:
        self._proxy.refuse(worker)
        self._later(fault.seconds / 2, self._proxy.accept)
        return "connections"

    def _replay(self, fault: Fault, worker: str) -> str:
        sent = self._proxy.replay(worker, last=fault.amount)
        back = self._proxy.replay(worker, direction="reply", last=fault.amount)
        return f"{sent} requests, {back} replies"

    def _sidecar_kill(self, fault: Fault, _worker: str) -> str:
        """Kill the trace sidecar; another one is started a little later."""
        pid = self._await_sidecar()
        os.kill(pid, signal.SIGKILL)
        self._killed.add(pid)
        self._later(fault.seconds, self._restart_sidecar)
        return f"pid {pid}"

    def _sidecar_stop(self, fault: Fault, _worker: str) -> str:
        pid = self._await_sidecar()
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._later(fault.seconds, go_on)
        return f"pid {pid}"

    def _restart_sidecar(self) -> None:
        if self._sidecar() is None:
            self._sidecars.append(Sidecar.start(self._trial))

    def _sidecar(self) -> int | None:
        """Return the process id of the sidecar, or None while there is none."""
        record = sidecar_record(self._trial / "registry")
        if record is not None and record.pid not in self._killed:
            return record.pid
        begun = [one.process.pid for one in self._sidecars if one.process.poll() is None]
        return next((pid for pid in begun if pid not in self._killed), None)

    def _await_sidecar(self) -> int:
        """Return the process id of a sidecar that can be found, starting one if it was just killed."""
        self._restart_sidecar()
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            record = sidecar_record(self._trial / "registry")
            if record is not None and record.pid not in self._killed:
                return record.pid
            time.sleep(0.02)
        msg = "no trace sidecar for 10 s"
        raise RuntimeError(msg)

    def _sick_disk(self, fault: Fault, _worker: str) -> str:
        """No file of the agent can grow: what it writes to the registry fails, as on a full disk."""
        (agent,) = self._records.agents(self._role)
        _, hard = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (0, hard))

        def heal() -> None:
            for pid in (agent.pid, *_descendants(agent.pid)):
                with suppress(OSError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

        self._later(fault.seconds, heal)
        return f"agent pid {agent.pid}"


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text(encoding="ascii").split()):
                if child != os.getpid():
                    yield child
                    yield from _descendants(child)
