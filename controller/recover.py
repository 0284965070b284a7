"""Going on after a kill: the whole state of a training job in numbered dumps, whole or not there.

::

    recover = Recover.of(run, engines={"actor": actor}, generators={"order": rng})
    state = recover.start(run.resume, RecoverState())
    for step in range(state.step, steps):
        actor.train_batch(words.batch(step, size, seed), "sft")
        recover.step(RecoverState(step=step + 1))

A run that is resumed goes on from the newest dump, taking the steps after it again, so that the resulting model has
taken every step once. See ``docs/explanation/recovery.md``. Used by the thread that runs the user's loop.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from controller.dumps import Dumps, Name
from zbus import codec, trace
from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.errors import CodecError, RecoverError

if TYPE_CHECKING:
    import numpy as np

    from controller.run import Run
    from zbus.config import TrialDir

__all__ = ["STATE_SCHEMA", "Dump", "Part", "Recover", "RecoverState", "Saves"]

_log = logging.getLogger("zbus.controller.recover")

STATE_SCHEMA: Final = "zbus.recover/1"
_STATE: Final = "state.json"
_VALUES: Final = "values.bin"
_MAGIC: Final = b"zbus values 1\n"


class Saves(Protocol):
    """What is asked of a training role: a ``TrainController``, or a group with these endpoints."""

    def save(self, path: str, /) -> Any:
        """Write everything of this role to ``path``, which does not exist yet."""
        ...

    def load(self, path: str, /) -> Any:
        """Take over what ``save`` wrote."""
        ...


class Part(Protocol):
    """Anything of the driver's process that has a state of its own, such as a data loader."""

    def state_dict(self) -> Any:
        """Return the state as a value that the bus could carry."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Take it over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverState:
    """Where the driver's loop stands, between two steps.

    Attributes:
        step: Optimizer steps taken; the next one is number ``step``.
        epoch: Passes over the data that are complete.
        position: Where the data goes on: a number, or plain data that the driver understands.
        version: Of the weights, as ``set_version`` was told last.
        staleness: Counters that capacity is computed from, by name.
        metrics_step: The step logged last, for ``Metrics.resume``; None before any.
        pending: Prompts that were handed out and not used yet, as values that the bus could carry.
        extras: Whatever else the driver wants back, likewise.
    """

    step: int = 0
    epoch: int = 0
    position: Any = 0
    version: int = 0
    staleness: Mapping[str, int] = field(default_factory=dict)
    metrics_step: int | None = None
    pending: Any = ()
    extras: Mapping[str, Any] = field(default_factory=dict)


_PLAIN: Final = tuple(one.name for one in fields(RecoverState) if one.name not in ("pending", "extras"))
"""What stands in ``state.json``, to be read by people too; the rest may be anything that the bus carries."""


@dataclass(frozen=True, slots=True)
class Dump:
    """One dump that can be gone on from.

    Attributes:
        path: Its directory.
        state: Where the driver's loop stood.
        engines: Directory of each role's part, by role.
        parts: State of each part of the driver, by name.
        rng: States of random generators, by name; ``random`` is Python's own.
    """

    path: Path
    state: RecoverState
    engines: Mapping[str, Path]
    parts: Mapping[str, Any]
    rng: Mapping[str, Any]


class Recover:
    """Dumps of one trial, in ``checkpoints/recover/``, and the way back.

    Args:
        trial: The trial directory.
        engines: What saves and loads each training role, by role.
        parts: What else of the driver has a state, by name.
        generators: The driver's random generators, by name; Python's ``random`` is always kept.
        keep: How many dumps stay.
        every_steps: Dump after so many steps; 0: not by steps.
        every_s: Dump once so many seconds have passed since the last; 0: not by time.
        fallback: Where the newest dump is broken, go on from the newest whole one.
        clock: For ``every_s``.
    """

    def __init__(
        self,
        trial: TrialDir,
        *,
        engines: Mapping[str, Saves] | None = None,
        parts: Mapping[str, Part] | None = None,
        generators: Mapping[str, np.random.Generator] | None = None,
        keep: int = 2,
        every_steps: int = 0,
        every_s: float = 300.0,
        fallback: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._trial = trial
        self._engines = dict(engines or {})
        self._parts = dict(parts or {})
        self._generators = dict(generators or {})
        self._keep = keep
        self._every_steps = every_steps
        self._every_ns = round(every_s * 1e9)
        self._fallback = fallback
        self._clock = clock
        self._dumps = Dumps(trial.checkpoints / "recover", trial.recover_note)
        self._last_step: int | None = None
        self._last_ns = clock.monotonic_ns()

    @classmethod
    def of(cls, run: Run, **named: Any) -> Self:
        """Return one as the section ``recover`` of a run's config says.

        Args:
            run: The run.
            named: Arguments of the class; they come before the config.
        """
        config = run.recover
        given = {
            "keep": config.keep, "every_steps": config.every_steps, "every_s": config.every, "fallback": config.fallback
        }  # fmt: skip
        return cls(run.trial_dir, **{**given, **named})

    # -- the loop --------------------------------------------------------------------------------------------------

    def start(self, resume: bool, first: RecoverState | None = None) -> RecoverState:  # noqa: FBT001  # run.resume, as it is
        """Begin: with a dump of the first state, or from the newest dump with everything put back.

        Call it once, when engines are initialised and before any step.

        Args:
            resume: Whether an earlier run shall be continued. Where that one was killed before its first dump was
                complete, no step of it counts, and this begins anew; the log says so.
            first: The state of a run that begins.

        Returns:
            Where to go on.

        Raises:
            RecoverError: The newest dump is missing or broken, or the trial has dumps and is not to be resumed.
        """
        with trace.span("find dump", "io"):
            dump = self._newest(fallback=self._fallback) if resume else None
        if dump is not None:
            with trace.span("restore", "io", step=dump.state.step):
                self.restore(dump)
            _log.info("step %d: going on from %s", dump.state.step, dump.path)
            return dump.state
        if self._dumps.listing() or self._dumps.noted():
            msg = f"trial {self._trial.name} has dumps already"
            raise RecoverError(msg, hint="go on from the newest with --resume, or begin anew with --overwrite")
        if resume:
            _log.warning("trial %s ended before its first dump: it begins anew, at its first step", self._trial.name)
        state = first or RecoverState()
        self.dump(state)
        return state

    def step(self, state: RecoverState, *, now: bool = False) -> bool:
        """Dump if it is due; tell whether it did.

        Args:
            state: Where the loop stands, after a step and after its metrics were logged.
            now: It is due in any case, such as after the last step; still, no step is dumped twice.

        Raises:
            RecoverError: The dump could not be written, or ``start`` was not called.
            Exception: What an engine's ``save`` raises.
        """
        if self._last_step is None:
            msg = "Recover.start was not called, so steps are taken that no dump is the beginning of"
            raise RecoverError(msg, hint="call recover.start(run.resume) before the first step")
        if state.step == self._last_step:
            return False
        by_steps = self._every_steps and state.step - self._last_step >= self._every_steps
        by_time = self._every_ns and self._clock.monotonic_ns() - self._last_ns >= self._every_ns
        if not (now or by_steps or by_time):
            return False
        self.dump(state)
        return True

    def dump(self, state: RecoverState) -> Path:
        """Write a dump now, and remove those beyond ``keep``; return its directory.

        Raises:
            RecoverError: It could not be written; the earlier dumps are as they were.
            CodecError: Something in the state cannot be kept; it is named.
            Exception: What an engine's ``save`` raises, likewise.
        """
        with trace.span("dump", "io", step=state.step):
            name = self._dumps.write(state.step, lambda path: self._fill(path, state))
            self._dumps.prune(self._keep)
        self._last_step, self._last_ns = state.step, self._clock.monotonic_ns()
        path = self._dumps.path(name)
        _log.info("step %d is dumped in %s", state.step, path)
        return path

    def _fill(self, path: Path, state: RecoverState) -> None:
        rng: dict[str, Any] = {"random": random.getstate()}
        rng |= {f"generator {name}": one.bit_generator.state for name, one in self._generators.items()}
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        values = {"pending": state.pending, "extras": dict(state.extras), "parts": parts, "rng": rng}
        text = _state_text(state, sorted(self._engines))
        with self._dumps.writing(state.step):
            (path / _STATE).write_text(text, encoding="utf-8")
            _write_values(path / _VALUES, values)
            (path / "engines").mkdir(mode=0o700)
        for role, engine in self._engines.items():
            engine.save(str(path / "engines" / role))

    # -- the way back ----------------------------------------------------------------------------------------------

    def latest(self, *, check: bool = True) -> Dump | None:
        """Return the newest dump; nothing is changed, on disk or elsewhere. None: none was ever finished.

        Args:
            check: Read all of it and compare with its digests, not only names and sizes.

        Raises:
            RecoverError: It is missing or broken: what is wrong with it, and which older one is whole.
        """
        newest = max([*self._dumps.listing()[-1:], *filter(None, [self._dumps.noted()])], default=None)
        return None if newest is None else self._open(newest, check=check)

    def restore(self, dump: Dump) -> None:
        """Put everything back: engines, parts, random generators.

        Raises:
            RecoverError: The dump has other roles, parts or generators than this run.
            Exception: What an engine's ``load`` or a part raises.
        """
        generators = {f"generator {name}" for name in self._generators}
        self._match("roles", set(dump.engines), set(self._engines), dump)
        self._match("parts", set(dump.parts), set(self._parts), dump)
        self._match("random generators", set(dump.rng) - {"random"}, generators, dump)
        for role, engine in self._engines.items():
            engine.load(str(dump.engines[role]))
        for name, part in self._parts.items():
            part.load_state_dict(dump.parts[name])
        random.setstate(dump.rng["random"])
        for name, generator in self._generators.items():
            generator.bit_generator.state = dump.rng[f"generator {name}"]
        self._last_step, self._last_ns = dump.state.step, self._clock.monotonic_ns()

    def _newest(self, *, fallback: bool) -> Dump | None:
        try:
            return self.latest()
        except RecoverError as error:
            whole = self._whole() if fallback else None
            if whole is None:
                raise
            for path in self._dumps.set_aside(whole):
                _log.warning("a broken dump was set aside as %s", path)
            _log.warning("%s; recover.fallback is set, so the run goes on from step %d", error, whole.step)
            return self._open(whole, check=False)

    def _open(self, name: Name, *, check: bool) -> Dump:
        path = self._dumps.path(name)
        if complaint := self._dumps.complaint(name, contents=check):
            raise self._broken(name, complaint)
        try:
            plain, roles = _read_state(path / _STATE)
            values = _read_values(path / _VALUES)
            state = RecoverState(**plain, pending=values["pending"], extras=values["extras"])
            engines = {role: path / "engines" / role for role in roles}
            return Dump(path, state, engines, values["parts"], values["rng"])
        except (OSError, ValueError, TypeError, KeyError, CodecError) as error:
            raise self._broken(name, f"it cannot be read: {error}") from error

    def _broken(self, name: Name, complaint: str) -> RecoverError:
        whole = self._whole()
        missing = complaint if self._dumps.path(name).is_dir() else "it is missing"
        facts = {"dump": str(self._dumps.path(name)), "wrong": missing}
        if whole is None:
            hint = "no older dump is whole; put the files back, or begin anew with --overwrite"
        else:
            facts["whole"] = f"{self._dumps.path(whole)}, {name.step - whole.step} steps before"
            hint = "put the files back, or go on from the older one: --resume recover.fallback=true"
        return RecoverError(f"the newest dump, of step {name.step}, cannot be used: {missing}", hint=hint, facts=facts)

    def _whole(self) -> Name | None:
        """Return the newest dump that is whole."""
        return next((name for name in reversed(self._dumps.listing()) if not self._dumps.complaint(name)), None)

    def _match(self, what: str, there: set[str], here: set[str], dump: Dump) -> None:
        if there != here:
            shown = {
                "the dump has": ", ".join(sorted(there)) or "none",
                "this run has": ", ".join(sorted(here)) or "none",
            }
            msg = f"{dump.path} is of a run with other {what}"
            raise RecoverError(msg, facts=shown, hint="resume with the config and driver that wrote it: config.yaml")


# -- files -------------------------------------------------------------------------------------------------------------


def _state_text(state: RecoverState, roles: list[str]) -> str:
    """Return ``state.json``.

    Raises:
        RecoverError: Something in it would not come back as it is.
    """
    plain = {name: getattr(state, name) for name in _PLAIN}
    for name, value in plain.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            msg = f"{name}={value!r} of a state is not plain data: numbers, texts, lists, dicts with texts as keys"
            raise RecoverError(msg, hint="put it into `extras`, which keeps whatever the bus carries")
    return json.dumps({"schema": STATE_SCHEMA, **plain, "engines": roles}, indent=1) + "\n"


def _read_state(path: Path) -> tuple[dict[str, Any], list[str]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["schema"] != STATE_SCHEMA:
        msg = f"{path.name} is written as {found['schema']}, this version reads {STATE_SCHEMA}"
        raise ValueError(msg)
    return {name: found[name] for name in _PLAIN}, list(found["engines"])


def _write_values(path: Path, value: Any) -> None:
    """Write a value as the bus encodes it: a line, the number of frames and their lengths, then the frames."""
    frames = codec.encode(value)
    with path.open("wb") as file:
        file.write(_MAGIC)
        lengths = [len(frames), *(memoryview(frame).nbytes for frame in frames)]
        file.write(b"".join(length.to_bytes(8, "little") for length in lengths))
        for frame in frames:
            file.write(frame)


def _read_values(path: Path) -> Any:
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        if file.read(len(_MAGIC)) != _MAGIC:
            msg = f"{path.name} does not begin as such a file does"
            raise ValueError(msg)
        count = int.from_bytes(file.read(8), "little")
        lengths = [int.from_bytes(file.read(8), "little") for _ in range(min(count, left // 8))]
        if sum(lengths) + file.tell() != left:
            msg = f"{path.name} has another length than it says"
            raise ValueError(msg)
        return codec.decode([bytearray(file.read(length)) for length in lengths], owned=True)
