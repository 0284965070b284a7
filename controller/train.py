"""``TrainController``: the ranks of a training role behind the founding method names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from controller.group import Group

if TYPE_CHECKING:
    from controller.controller import Controller

__all__ = ["DistributedTrainController", "TrainController"]


class TrainController:
    """The group of a training role; its endpoints are methods here as on the group.

    Args:
        bus: A launched controller.
        role: Name of the training role.
    """

    def __init__(self, bus: Controller, role: str = "actor") -> None:
        self.bus = bus
        self.role = role
        self.group: Group = bus.group(role)

    def __getattr__(self, name: str) -> Any:
        """Return an endpoint of the engine, such as ``train_batch``."""
        if name.startswith("_") or name == "group":
            raise AttributeError(name)
        return getattr(self.group, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.group!r}>"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.group)

    def config_perf_tracer(self, config: Mapping[str, Any] | None, role: str | None = None) -> None:
        """Configure tracing of this role's ranks; None switches it off without a call where it is off already."""
        self.bus.config_perf_tracer(config, role or self.role)

    def save_perf_tracer(self, step: int | None = None, force: bool = False) -> None:  # noqa: FBT001, FBT002  # founding spelling
        """Write traces now if ``step`` is due, or in any case with ``force``."""
        self.bus.save_perf_tracer(step, force)


DistributedTrainController = TrainController
"""The founding name."""
