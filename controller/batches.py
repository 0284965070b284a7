"""Several ordered calls placed as one, by ``with group.batch() as b``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Self

from controller.calls import Method, View, encode_calls
from controller.dispatch import Plan
from controller.futures import BatchFuture
from controller.order import Order
from controller.placement import Placement
from zbus.engine import AnyOne, EndpointSpec, RankZero, Start
from zbus.errors import ConfigError
from zbus.retry import deadline_seconds

__all__ = ["BatchBuilder"]


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
        self._calls: list[tuple[EndpointSpec, Plan, BatchFuture[Any]]] = []
        self._closed = False
        self._placement: Placement | None = None

    def __getattr__(self, name: str) -> Callable[..., BatchFuture[Any]]:
        """Return the recorder of one endpoint."""
        if name.startswith("_"):
            raise AttributeError(name)
        method = self._method(name)

        self._admit(method.spec)
        spec, calls, merge = method.spec, self._calls, method.merge

        def record(*args: Any, **kwargs: Any) -> BatchFuture[Any]:
            if self._closed:
                msg = "this batch was placed already"
                raise ConfigError(msg, hint="start another: with group.batch() as b")
            if calls and spec.lane != calls[0][0].lane:
                raise self._other_lane(spec)
            spread = method.plan(args, kwargs)
            future: BatchFuture[Any] = BatchFuture(_UNPLACED, len(calls), merge(spread))
            calls.append((spec, spread, future))
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
            for _, _, future in self._calls:
                future.exception()
            self._raise_first()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        placement = None if kind is not None else self._prepare()
        if placement is not None:
            await placement.start_async()
            self._attach(placement)
            for _, _, future in self._calls:
                await future.wait_async()
            self._raise_first()

    def submit(self) -> list[BatchFuture[Any]]:
        """Place the batch without waiting; for use in place of ``with``. Returns each call's future, in order."""
        self._place()
        return [future for _, _, future in self._calls]

    def _place(self) -> bool:
        placement = self._prepare()
        if placement is None:
            return False
        placement.start()
        self._attach(placement)
        return True

    def _attach(self, placement: Placement) -> None:
        for _, _, future in self._calls:
            future.attach(placement)

    def _prepare(self) -> Placement | None:
        if self._closed or not self._calls:
            return None
        self._closed = True
        core, ranks = self._view.core, self._view.ranks
        calls = [
            [(spec.name, spread.arguments[member]) for spec, spread, _ in self._calls] for member in range(len(ranks))
        ]
        deadlines = [spec.deadline_s for spec, _, _ in self._calls if spec.deadline_s is not None]
        submitted_ns = time.monotonic_ns()
        peers = core.roster.peers()
        keep = core.placer.keeper([peers[rank] for rank in ranks], snapshot=True)
        self._placement = placement = Placement(
            Order(
                placer=core.placer,
                roster=core.roster,
                ranks=list(ranks),
                lane=self._calls[0][0].lane,
                submitted_ns=submitted_ns,
                payloads=encode_calls(calls, snapshot=True, keep=keep),
                encoded_ns=time.monotonic_ns(),
                number=next(core.numbers),
                line=core.line,
                methods=tuple(spec.name for spec, _, _ in self._calls),
                deadline_s=self._deadline_s or self._view.deadline_s or sum(deadlines) or core.deadline_s,
                strict=self._strict or any(spec.strict for spec, _, _ in self._calls),
                together=self._together or any(spec.start == "together" for spec, _, _ in self._calls),
            )
        )
        return placement

    def _raise_first(self) -> None:
        for _, _, future in self._calls:
            future.result()


class _Unplaced:
    """Stands in for the placement of a batch that is still being collected."""

    def __getattr__(self, name: str) -> Any:
        msg = "this call's batch was not placed yet"
        raise ConfigError(msg, hint="ask after the `with` block has ended")


_UNPLACED: Final[Any] = _Unplaced()
