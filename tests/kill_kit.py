"""A job under SIGKILL at random moments, resumed until it is done, and what its ledger says of the model then."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from controller.recover import Dump, Recover
from ledger import VARIABLE, descent, step_count
from run_kit import Done, RunKit, Running
from waiting import wait_until
from zbus.config import TrialDir
from zbus.errors import RegistryError
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records
from zbus.runtime.processes import is_alive

__all__ = ["Kill", "KilledJob"]


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        victim: ``controller``, ``agent:<role>`` or a role, one of whose ranks is killed.
        after: Steps that this start has taken by then; None: while it starts.
        delay_s: And so much later.
    """

    victim: str
    after: int | None
    delay_s: float


class KilledJob:
    """One trial of a job, from its first start to its end.

    Args:
        kit: Starts the command, and knows its processes.
        command: What stands behind ``run`` each time.
        seed: Of all choices.
        limit_s: How long one start may take; longer is a hang.

    Attributes:
        ended: How its starts ended.
    """

    def __init__(self, kit: RunKit, command: Sequence[str], seed: int, *, limit_s: float = 60.0) -> None:
        self.kit = kit
        self.command = list(command)
        self.ledger = kit.directory / f"ledger-{seed}"
        self.random = random.Random(seed)
        self.limit_s = limit_s
        self.story: list[str] = []
        self.ended: list[Done] = []
        self.name = f"t{seed}"
        os.environ[VARIABLE] = str(self.ledger)

    @property
    def trial(self) -> TrialDir | None:
        """The trial, once it is there."""
        found = list((self.kit.directory / "zbus-runs").glob(f"*/{self.name}/registry"))
        return TrialDir.open(found[0].parent) if found else None

    def chosen(self, victims: Sequence[str], steps: int, starting_s: float) -> Kill:
        """Choose a kill: mostly between steps, at times while the job starts or resumes."""
        victim = self.random.choice(victims)
        if self.random.random() < 0.25:
            return Kill(victim, None, self.random.uniform(0, starting_s))
        return Kill(victim, self.random.randrange(steps), self.random.uniform(0, 0.15))

    def play(self, kills: Sequence[Kill]) -> Done:
        """Start the job and resume it after each kill, until it is done; return the last end."""
        for kill in kills:
            running = self.start()
            self.strike(running, kill)
            if self._end(running).code == 0:
                return self.ended[-1]
        done = self._end(self.start())
        assert done.code == 0, f"{self.told()}\n{done.err}"
        return done

    def _end(self, running: Running) -> Done:
        done = running.end(self.limit_s)
        self.ended.append(done)
        self.story.append(f"exit {done.code}")
        return done

    def start(self) -> Running:
        """Start it, with ``--resume`` as soon as there is a trial."""
        again = ["--resume"] if self.trial is not None else []
        self.story.append("resume" if again else "start")
        return self.kit.start("-t", self.name, *self.command[1:], *again, target=self.command[0])

    def strike(self, running: Running, kill: Kill) -> None:
        """Kill at the chosen moment, or once the victim is there; nothing, where the job is over by then."""
        before = step_count(self.ledger)

        def over() -> bool:
            return running.process.poll() is not None

        def there() -> bool:
            return over() or kill.after is None or step_count(self.ledger) >= before + kill.after

        wait_until(there, self.limit_s, f"step {kill.after}; {self.told()} {running.err[-2000:]}")
        threading.Event().wait(kill.delay_s)  # the moment is what is chosen; nothing is waited for
        pid = wait_until(lambda: -1 if over() else self._pid(kill.victim, running), self.limit_s, kill.victim)
        if pid < 0:
            self.story.append(f"over before {kill.victim} was killed")
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.story.append(f"kill {kill.victim} at step {step_count(self.ledger)} (this start: {before})")

    def _pid(self, victim: str, running: Running) -> int:
        """Return the process to kill; 0 while there is none."""
        if victim == "controller":
            return running.process.pid
        if self.trial is None:
            return 0
        try:
            records = Records(FileRegistry(self.trial.registry, create=False))
            kind, _, role = victim.partition(":")
            known: list[Any] = records.agents(role) if kind == "agent" else records.workers(kind)
        except RegistryError:
            return 0
        alive = [one.pid for one in known if is_alive(one.pid, one.pid_start)]
        return self.random.choice(alive) if alive else 0

    # -- judging -------------------------------------------------------------------------------------------------------

    def told(self) -> str:
        """Return what was done to it."""
        return "; ".join(self.story)

    def newest(self) -> Dump:
        """Return the newest dump."""
        assert self.trial is not None
        found = Recover(self.trial).latest()
        assert found is not None
        return found

    def check(
        self,
        *,
        ranks: int,
        steps: int,
        warm: int,
        given: Callable[[int], Sequence[Sequence[int]]],
        asked: Sequence[Sequence[int]],
        per_prompt: int = 1,
        prompt_of: Callable[[Any], Sequence[int]] = tuple,
    ) -> None:
        """Check that every step counts once and no batch is lost or doubled.

        Args:
            ranks: Of the training role.
            steps: In all.
            warm: Those on given rows.
            given: Returns the prompts of a step on given rows.
            asked: Prompts of the other steps, in the order in which they are asked.
            per_prompt: Rows of one prompt.
            prompt_of: Tells the tokens of an item of the driver's data.
        """
        found = descent(self.ledger, ranks)
        story = self.told()
        assert len(found) == steps, f"{len(found)} steps made the model, not {steps}: {story}"
        for step in found[:warm]:
            expected = Counter(map(tuple, given(step.number - 1)))
            assert step.prompts == expected, f"step {step.number}: other rows than its own: {story}"
        used: Counter[tuple[int, ...]] = Counter()
        for step in found[warm:]:
            used += step.prompts
        doubled = {prompt: count for prompt, count in used.items() if count != per_prompt}
        assert not doubled, f"prompts were used more or less than {per_prompt} times: {doubled}: {story}"
        if steps > warm:
            rollout = self.newest().state.extras["rollout"]
            standing = rollout["epoch"] * len(asked) + rollout["position"]
            open_ones = Counter(tuple(prompt_of(item)) for item in rollout["pending"])
            taken = Counter(map(tuple, asked[:standing]))
            assert Counter(used.keys()) + open_ones == taken, f"prompts are lost: {taken - used - open_ones}: {story}"

    def steps_logged(self) -> list[int]:
        """Return the steps of ``metrics.jsonl``, as they stand there."""
        import json

        assert self.trial is not None
        return [json.loads(line)["step"] for line in (self.trial.path / "metrics.jsonl").read_text().splitlines()]
