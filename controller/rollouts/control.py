"""Control calls to every rank of a rollout role: each answers for itself, and who does not is named and left behind."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

from controller.group import Group
from controller.rollouts.driver import Driver
from controller.rollouts.routing import Presence, Rank
from zbus.errors import ConfigError, NotExecuted, ZbusError
from zbus.retry import NO_RETRY

__all__ = ["Answers", "Control"]

log = logging.getLogger("zbus.rollout")


class Answers(NamedTuple):
    """What the ranks answered.

    Attributes:
        values: By rank.
        missing: Why a rank did not answer, by rank.
    """

    values: dict[int, Any]
    missing: dict[int, str]


class Control:
    """Pauses, resumes and names versions. On the driver's loop; no lock is held across a call."""

    def __init__(self, group: Group, driver: Driver) -> None:
        self._group = group
        self._driver = driver

    async def pause(self, mode: str, timeout_s: float) -> dict[int, int]:
        """Pause generation on every rank that is here; one that does not answer is STALE.

        Returns:
            How many requests were running, by rank.
        """
        answers = await self._ask(self._here(), "pause", (mode,), timeout_s)
        self._leave_behind(answers.missing, "it did not pause")
        return answers.values

    async def go_on(self, timeout_s: float) -> dict[int, bool]:
        """Resume generation on every rank that is here; one that does not answer or whose weights are torn is STALE."""
        answers = await self._ask(self._here(), "resume", (), timeout_s)
        self._leave_behind(answers.missing, "it did not resume")
        torn = {rank: "its weights are torn" for rank, resumed in answers.values.items() if not resumed}
        self._leave_behind(torn, "it refused to resume")
        return {rank: bool(resumed) for rank, resumed in answers.values.items()}

    async def set_version(self, version: int, timeout_s: float) -> dict[int, str]:
        """Name the weights on every rank that is here and not STALE; the version counts once they have answered.

        Returns:
            Why a rank was left behind, by rank: it is STALE now.

        Raises:
            ConfigError: A version below the one that counts.
            NotExecuted: No rank acknowledged; the version does not count.
        """
        driver = self._driver
        if version < driver.tasks.staleness.version:
            driver.advance(version)  # which says why not
        if "set_version" not in self._group.endpoints:
            driver.advance(version)
            return {}
        targets = [one for one in self._here() if not one.stale]
        answers = await self._ask(targets, "set_version", (version,), timeout_s)
        behind = {one.rank: str(one) for one in driver.routes.ranks if one.rank not in answers.values}
        behind |= answers.missing
        self._leave_behind(
            {rank: why for rank, why in behind.items() if not driver.routes.ranks[rank].stale},
            f"it missed version {version}",
        )
        if not answers.values:
            told = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(behind.items()))
            msg = f"no rank of {self._group.role} acknowledged version {version}, so it does not count: {told}"
            raise NotExecuted(msg, role=self._group.role, method="set_version", hint="see which ranks live: bus.group")
        driver.advance(version)
        driver.look()  # one that was restarted meanwhile has answered for a start that is gone
        return behind

    async def stats(self, timeout_s: float) -> Answers:
        """Have every rank that is here hand over what it counted."""
        if "export_stats" not in self._group.endpoints:
            return Answers({}, {})
        return await self._ask(self._here(), "export_stats", (), timeout_s)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _here(self) -> list[Rank]:
        self._driver.look()
        return [one for one in self._driver.routes.ranks if one.presence is Presence.HERE]

    async def _ask(self, ranks: list[Rank], method: str, args: tuple[Any, ...], timeout_s: float) -> Answers:
        if method not in self._group.endpoints:
            msg = f"the engine of role {self._group.role!r} has no endpoint `{method}`"
            raise ConfigError(msg, hint="subclass zbus.rl.RolloutEngine")
        calls = [self._one(one.rank, method, args, timeout_s) for one in ranks]
        found = await asyncio.gather(*calls, return_exceptions=True)
        answers = Answers({}, {})
        for one, value in zip(ranks, found, strict=True):
            if isinstance(value, ZbusError):
                answers.missing[one.rank] = f"{type(value).__name__}: {value}"
            elif isinstance(value, BaseException):
                raise value
            else:
                answers.values[one.rank] = value
        return answers

    async def _one(self, rank: int, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        endpoint = getattr(self._group[rank].options(deadline=timeout_s, retries=NO_RETRY), method)
        return await endpoint.aio(*args)

    def _leave_behind(self, ranks: dict[int, str], what: str) -> None:
        for rank, why in sorted(ranks.items()):
            log.warning("%s/%d is STALE: %s (%s); it gets no work until refreshed", self._group.role, rank, what, why)
            self._driver.mark_stale(rank, f"{what} ({why})")
