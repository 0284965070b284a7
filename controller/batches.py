"""Several ordered calls placed as one, by ``with group.batch() as b``."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

from controller.calls import Method, View, encode_alike, encode_calls
from controller.dispatch import Arguments, Plan
from controller.futures import BatchFuture
from controller.order import Order
from controller.placement import Placement
from zbus.codec import Ref
from zbus.engine import AnyOne, EndpointSpec, RankZero, Start, Whole
from zbus.errors import ConfigError
from zbus.retry import deadline_seconds

if TYPE_CHECKING:
    from controller.refs import Claim

__all__ = ["BatchBuilder"]

_NAME: Final = operator.attrgetter("name")


class BatchBuilder:
    """Ordered calls that are placed as one when the ``with`` block ends; each call gives a future of its answer.

    The block waits at its end and raises the first error, so that none is lost; ``async with`` waits on the loop.
    Leaving the block by an exception places nothing.
    """

    def __init__(
        self,
        view: View,
        method: Callable[[str], Method[..., Any]],
        *,
        strict: bool,
        deadline: float | str | None,
        start: Start = "each",
    ) -> None:
        self._view = view
        self._method = method
        self._strict = strict
        self._together = start == "together"
        self._deadline_s = None if deadline is None else deadline_seconds(deadline)
        # Of each call: its endpoint, what each member is called with (a bare tuple: every member gets these values),
        # what holds its results, if they stay with the ranks; and its future.
        self._calls: list[tuple[EndpointSpec, Plan | tuple[Any, ...], Claim | None]] = []
        self._futures: list[BatchFuture[Any]] = []
        self._closed: list[bool] = []  # not empty once it is
        self._placement: Placement | None = None

    def __getattr__(self, name: str) -> Callable[..., BatchFuture[Any]]:
        """Return the recorder of one endpoint."""
        if name.startswith("_"):
            raise AttributeError(name)
        method = self._method(name)

        self._admit(method.spec)
        spec, merge, plan = method.spec, method.merge, method.plan
        calls, futures, closed = self._calls, self._futures, self._closed
        claim, keeps = method.claim, method.keeps
        everyone = None if method.keeps else method.alike
        least, most = spec.arity if everyone is not None else (1, 0)
        plain_merge = None if everyone is None else merge(everyone)
        fits = False  # in the lane of the others

        def record(*args: Any, **kwargs: Any) -> BatchFuture[Any]:
            nonlocal fits
            if closed:
                msg = "this batch was placed already"
                raise ConfigError(msg, hint="start another: with group.batch() as b")
            if not fits:
                if calls and spec.lane != calls[0][0].lane:
                    raise self._other_lane(spec)
                fits = True
            future: BatchFuture[Any]
            if plain_merge is not None and not kwargs and least <= len(args) <= most and Whole not in map(type, args):
                future = BatchFuture(_UNPLACED, len(futures), plain_merge)
                calls.append((spec, args, None))
            else:
                spread = plan(args, kwargs)
                future = BatchFuture(_UNPLACED, len(futures), merge(spread))
                calls.append((spec, spread, claim() if keeps else None))
            futures.append(future)
            return future

        self.__dict__[name] = record  # looked up once for all calls of this batch
        return record

    def _admit(self, spec: EndpointSpec) -> None:
        """Refuse an endpoint whose calls cannot be part of a batch."""
        if isinstance(spec.dispatch, AnyOne | RankZero) and len(self._view.ranks) > 1:
            msg = f"endpoint `{spec.name}` goes to one rank, a batch takes its places on all of them"
            raise ConfigError(
                msg, hint=f"call it outside the batch, or batch on one rank: {self._view.role}[0].batch()"
            )
        if spec.streams:
            msg = f"endpoint `{spec.name}` streams, which a batch cannot"
            raise ConfigError(msg, hint="call it outside the batch")

    def _other_lane(self, spec: EndpointSpec) -> ConfigError:
        first = self._calls[0][0]
        msg = f"`{first.name}` is on lane `{first.lane}` and `{spec.name}` on `{spec.lane}`; a batch has one lane"
        return ConfigError(msg, hint="use one batch for each lane")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self._place():
            placement = self._placement
            if placement is not None and self._view.single:
                # One rank's answers need no merging: what has come well is decoded when it is asked for.
                placement.wait(placement.decided, None)
                if placement.went_well():
                    return
            for future in self._futures:
                future.exception()
            self._raise_first()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        placement = None if kind is not None else self._prepare()
        if placement is not None:
            await placement.start_async()
            self._attach(placement)
            for future in self._futures:
                await future.wait_async()
            self._raise_first()

    def submit(self) -> list[BatchFuture[Any]]:
        """Place the batch without waiting; for use in place of ``with``. Returns each call's future, in order."""
        self._place()
        return list(self._futures)

    def _place(self) -> bool:
        placement = self._prepare()
        if placement is None:
            return False
        placement.start()
        self._attach(placement)
        return True

    def _attach(self, placement: Placement) -> None:
        BatchFuture.attach(self._futures, placement)

    def _prepare(self) -> Placement | None:
        if self._closed or not self._calls:
            return None
        self._closed.append(True)
        specs, arguments, claims = zip(*self._calls, strict=True)
        for name in [name for name in self.__dict__ if not name.startswith("_")]:
            del self.__dict__[name]  # recorders point back here, and what is dropped shall go at once
        core, ranks = self._view.core, self._view.ranks
        submitted_ns = time.monotonic_ns()
        peers = core.roster.peers()
        keep = core.placer.keeper([peers[rank] for rank in ranks], snapshot=True)
        names = tuple(map(_NAME, specs))
        refs: list[Ref] = []
        if Plan in map(type, arguments):
            calls = [
                [(name, _share(one, member)) for name, one in zip(names, arguments, strict=True)]
                for member in range(len(ranks))
            ]
            payloads = encode_calls(calls, snapshot=True, keep=keep, claims=claims, refs=refs)
        else:
            payloads = [encode_alike(names, arguments, keep=keep, refs=refs)] * len(ranks)
        kinds = dict(zip(map(id, specs), specs, strict=True)).values()
        deadlines = [spec.deadline_s for spec in kinds if spec.deadline_s is not None]
        if deadlines:
            deadlines = [spec.deadline_s for spec in specs if spec.deadline_s is not None]
        self._placement = placement = Placement(
            Order(
                placer=core.placer,
                roster=core.roster,
                ranks=list(ranks),
                lane=specs[0].lane,
                submitted_ns=submitted_ns,
                payloads=payloads,
                encoded_ns=time.monotonic_ns(),
                number=next(core.numbers),
                line=core.line,
                methods=names,
                deadline_s=self._deadline_s or self._view.deadline_s or sum(deadlines) or core.deadline_s,
                strict=self._strict or any(spec.strict for spec in kinds),
                together=self._together or any(spec.start == "together" for spec in kinds),
                claims=claims if any(claims) else (),
                refs=core.refs,
                pins=core.refs.pinned(refs) if refs and core.refs is not None else None,
            )
        )
        return placement

    def _raise_first(self) -> None:
        for future in self._futures:
            future.result()


def _share(one: Plan | tuple[Any, ...], member: int) -> Arguments:
    """Return what a member is called with."""
    return one.arguments[member] if type(one) is Plan else Arguments(one, {})


class _Unplaced:
    """Stands in for the placement of a batch that is still being collected."""

    def __getattr__(self, name: str) -> Any:
        msg = "this call's batch was not placed yet"
        raise ConfigError(msg, hint="ask after the `with` block has ended")


_UNPLACED: Final[Any] = _Unplaced()
