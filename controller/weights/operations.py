"""The phases of an update, each with its deadline. One caller at a time.

Before a rank is told to write it counts as stale, and as current again when its digest has come: whatever ends an
update early, an interrupt of the caller too, no rank goes on with weights that nobody vouches for.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from controller.group import Group
from controller.weights.broadcast import Broadcast
from controller.weights.chain import Chain, Piece
from controller.weights.fan import NOW, Answers, ask, here, ranks_of, reason, tell
from controller.weights.options import Limits, Listener, Way
from controller.weights.standing import Standings
from zbus.errors import BatchError, ConfigError, Fenced, WeightsError, ZbusError
from zbus.trace import span

__all__ = ["Operations"]

log = logging.getLogger("zbus.weights")


class Operations:
    """What ``WeightSync`` puts together.

    Args:
        train: Ranks that train.
        rollout: Ranks that generate.
        way: How weights go.
        dtype: What they are cast to.
        changed_only: Publish what has changed.
        pause: Mode of pausing.
        backend: Of the group.
        directory: Where files go.
        limits: Deadlines.
        listener: Told of each rank.
    """

    def __init__(
        self,
        train: Group,
        rollout: Group,
        *,
        way: Way,
        dtype: str | None,
        changed_only: bool,
        pause: str,
        backend: str,
        directory: Path | None,
        limits: Limits,
        listener: Listener | None,
    ) -> None:
        self.train = train
        self.rollout = rollout
        self.way = way
        self.limits = limits
        self.standings = Standings(len(rollout))
        self.version: int | None = None
        self.chain: Chain | None = None
        self.seconds: dict[str, float] = {}
        self._dtype = dtype
        self._changed_only = changed_only
        self._pause = pause
        self._directory = directory
        self._listener = listener
        self._broadcast = Broadcast(train, rollout, backend)
        self._numbers = itertools.count(1)

    # -- standing still ------------------------------------------------------------------------------------------------

    def look(self) -> dict[int, int]:
        """Return the ranks that are there, with their incarnations; one that was started anew is stale."""
        there = here(self.rollout)
        for rank, incarnation in there.items():
            self.standings.seen(rank, incarnation)
        return there

    @contextmanager
    def still(self, ranks: Iterable[int]) -> Iterator[list[int]]:
        """Have ranks stand still inside, and those whose weights are known go on at the end.

        Raises:
            WeightsError: None of them does.
        """
        ranks = list(ranks)
        with self._phase("pause"):
            answers = ask(self.rollout, ranks, "pause", (self._pause,), self.limits.pause)
        self._left(answers.missing, "it did not pause")
        try:
            if not answers.values:
                self._fail("pause", answers.missing, "no rank stands still" if ranks else "no rank is there")
            yield sorted(answers.values)
        finally:
            self._go_on(sorted(answers.values))

    def _go_on(self, ranks: Sequence[int]) -> None:
        """Resume ranks whose weights are known; requests of the others end with what they have."""
        known = self.standings.not_stale(ranks)
        with self._phase("resume"):
            answers = ask(self.rollout, known, "resume", (), self.limits.resume)
            torn = [rank for rank, resumed in answers.values.items() if not resumed]
            self._left(answers.missing, "it did not resume")
            self._left(dict.fromkeys(torn, ""), "it refused to resume, its weights are torn")
            unknown = [rank for rank in ranks if rank not in known or rank in torn]
            there = here(self.rollout)
            tell(self.rollout, [rank for rank in unknown if rank in there], "abort", (), self.limits.resume)

    # -- publishing ----------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> Sequence[Any]:
        """Have the trainer publish its weights, and keep what makes them out of nothing; return the manifest.

        Raises:
            WeightsError: It could not; nothing has changed.
        """
        before, on_disk = self.chain, self.way == "disk"
        since = None
        if self._changed_only and before is not None and before.on_disk == on_disk and not before.is_long:
            since = before.digest if before.version == self.version else None  # ranks have what it changes
        trainer = self.train.options(deadline=self.limits.publish, retries=NOW)
        with self._phase("publish"):
            made = self._trainer("publish", lambda: trainer.publish_weights(self._dtype, since, not on_disk))
            source = made["ref"]
            if on_disk:
                source = str(self._fresh_directory(version))
                self._trainer("publish", lambda: trainer.save_weights(source))
        names = frozenset(name for name, *_ in made["manifest"])
        piece = Piece(source, names, made["nbytes"], made["full"])
        self.keep(Chain.after(before, version, made["digest"], piece, on_disk=on_disk))
        manifest: Sequence[Any] = made["manifest"]
        return manifest

    def _fresh_directory(self, version: int) -> Path:
        assert self._directory is not None  # noqa: S101  # checked where it is given
        directory = self._directory.absolute()
        for left in directory.glob(".v*.part-*"):  # by a trainer that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)
        return next(path for number in self._numbers
                    if not (path := directory / f"v{version}-{number}").exists())  # fmt: skip

    def keep(self, chain: Chain | None) -> None:
        """Have another chain, or none; directories that only the old one has are removed."""
        before, self.chain = self.chain, chain
        used = {str(piece.source) for piece in chain.pieces} if chain is not None else set()
        for piece in before.pieces if before is not None and before.on_disk else ():
            if str(piece.source) not in used:
                shutil.rmtree(piece.source, ignore_errors=True)

    def _trainer(self, phase: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Fenced:
            raise
        except (ZbusError, BatchError) as error:
            msg = f"{phase} of the weights of {self.train.role} failed: {reason(error)}"
            raise WeightsError(msg, phase=phase, hint=_hint_of(error)) from error

    # -- transfer ------------------------------------------------------------------------------------------------------

    def hand_over(self, ranks: Iterable[int]) -> None:
        """Have ranks take over what was published: its last piece where they hold the version before, else all."""
        chain = self._published()
        ranks = list(ranks)
        method = "load_weights" if chain.on_disk else "update_weights"
        args = {rank: ([piece.source for piece in self._missing(chain, rank)], chain.version, chain.digest)
                for rank in ranks}  # fmt: skip
        with self._phase("transfer"):
            self._unsure(ranks, chain.version)
            self._took_over(chain, ask(self.rollout, ranks, method, args, self.limits.transfer))

    def _missing(self, chain: Chain, rank: int) -> Sequence[Piece]:
        has_before = self.standings.has(rank, self.version)
        return [chain.last] if has_before and chain.version != self.version else chain.pieces

    def broadcast(self, ranks: Mapping[int, int], manifest: Sequence[Any]) -> None:
        """Broadcast what was published to those of some ranks that can use it, and hand it over to the others.

        Args:
            ranks: Ranks that stand still, with their incarnations.
            manifest: What was published.

        Raises:
            WeightsError: There is no group, and it is not the fault of single ranks.
        """
        chain = self._published()
        full = chain.last.full
        able = {rank: incarnation for rank, incarnation in ranks.items()
                if full or self.standings.has(rank, self.version)}  # fmt: skip
        if able:
            with self._phase("join"):
                try:
                    absent = self._broadcast.join(able, self.limits.join)
                except Fenced:
                    raise
                except (ZbusError, BatchError) as failed:
                    msg = f"no weights group of {self.train.role} and {self.rollout.role}: {reason(failed)}"
                    raise WeightsError(msg, phase="join", hint=_hint_of(failed)) from failed
            self._left(absent, "it did not join the weights group")
            able = {rank: incarnation for rank, incarnation in able.items() if rank not in absent}
            with self._phase("transfer"):
                self._unsure(able, chain.version)
                answers, error = self._broadcast.send(
                    manifest, chain.version, chain.digest, full=full, limit_s=self.limits.transfer
                )
                self._took_over(chain, answers, quiet=True)
            if error is not None:
                log.warning("the broadcast of version %d failed: %s", chain.version, reason(error))
        there = self.look()
        same = [rank for rank, incarnation in ranks.items() if there.get(rank) == incarnation]
        rest = [rank for rank in same if not self.standings.has(rank, chain.version)]
        gone = {rank: "" for rank in ranks if rank not in same}
        self._left(gone, "it went during the update")
        if rest:
            self.hand_over(rest)

    def _published(self) -> Chain:
        if self.chain is None:
            msg = f"no weights were published for {self.rollout.role} yet"
            raise ConfigError(msg, hint="call update() first")
        return self.chain

    def _unsure(self, ranks: Iterable[int], version: int) -> None:
        for rank in ranks:
            self.standings.missed(rank, f"it has not confirmed version {version}")

    def _took_over(self, chain: Chain, answers: Answers, *, quiet: bool = False) -> None:
        there = here(self.rollout)
        left = answers.missing
        for rank, digest in sorted(answers.values.items()):
            incarnation = self.standings.incarnation(rank)
            if digest != chain.digest:
                left[rank] = f"its weights hash to {digest}, the trainer's to {chain.digest}"
            elif there.get(rank) != incarnation:
                left[rank] = "it ended meanwhile"
            else:
                self.standings.updated(rank, incarnation, chain.version)
                if self._listener is not None:
                    self._listener.mark_current(rank, chain.version, incarnation)
        if not quiet:
            self._left(left, f"it did not take over version {chain.version}")

    # -- naming --------------------------------------------------------------------------------------------------------

    def name(self) -> None:
        """Have the version count, since ranks have confirmed it, and tell the trainer.

        Raises:
            WeightsError: No rank has; or a training rank was not told.
        """
        chain = self._published()
        if not any(self.standings.has(rank, chain.version) for rank in self.rollout.ranks):
            self._restore()
            self._fail("transfer", self.standings.stale(), f"no rank has version {chain.version}")
        self.version = chain.version
        if self._listener is not None:
            self._listener.advance(chain.version)
        with self._phase("version"):
            answers = ask(self.train, self.train.ranks, "set_version", (chain.version,), self.limits.version)
        if answers.errors:
            told = ranks_of(self.train.role, answers.missing)
            msg = f"{self.rollout.role} has version {chain.version}, and the trainer was not told: {told}"
            raise WeightsError(msg, phase="version", version=chain.version, missing=answers.missing,
                               hint=_hint_of(*answers.errors.values()))  # fmt: skip

    def _restore(self) -> None:
        """Nobody took the new version: ranks that say they still have the old one, whole, may go on with it."""
        there = self.look()
        suspects = [rank for rank in self.standings.stale() if rank in there]
        answers = ask(self.rollout, suspects, "state", (), self.limits.resume)
        for rank, told in answers.values.items():
            version = self.standings.version(rank)
            if told["torn"] or version != self.version or version not in {None, told["version"]}:
                continue
            self.standings.restored(rank, version)
            if self._listener is not None:
                self._listener.mark_current(rank, told["version"], there[rank])

    # -- inside --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the group, let go of what was published."""
        self._broadcast.leave()
        self.keep(None)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            with span(f"weights.{name}", "comm", path=self.way):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def _left(self, missing: Mapping[int, str], what: str) -> None:
        """Leave ranks behind."""
        for rank, why in sorted(missing.items()):
            told = f"{what}: {why}" if why else what
            log.warning("%s/%d is STALE: %s; it gets no work until refreshed", self.rollout.role, rank, told)
            self.standings.missed(rank, told)
            if self._listener is not None:
                self._listener.mark_stale(rank, told)

    def _fail(self, phase: str, missing: Mapping[int, str], what: str) -> NoReturn:
        told = ranks_of(self.rollout.role, missing)
        msg = f"weights did not get to {self.rollout.role}: {what}" + (f" ({told})" if told else "")
        raise WeightsError(msg, phase=phase, version=self.version, missing=missing,
                           hint="see the ranks with `zbus-controller status`; update() brings all that are there up to "
                           "date")  # fmt: skip


def _hint_of(*errors: Exception) -> str:
    hints = [getattr(error.root if isinstance(error, BatchError) else error, "hint", None) for error in errors]
    return next((hint for hint in hints if hint), "see the ranks with `zbus-controller status`")
