"""What the two sides of RL post-training agree on: the contracts of engines, and what travels between them.

Needs numpy only. ``TrainEngine`` and ``RolloutEngine`` declare the endpoints once; an engine fills in their hooks, and
the controllers in ``controller.train`` and ``controller.rollout`` call the endpoints. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zbus.lazy import loaders

if TYPE_CHECKING:
    from zbus.rl.generation import Completion as Completion
    from zbus.rl.generation import Episode as Episode
    from zbus.rl.generation import Sampling as Sampling
    from zbus.rl.generation import VersionSpan as VersionSpan
    from zbus.rl.rollout_engine import RolloutEngine as RolloutEngine
    from zbus.rl.stats import Stats as Stats
    from zbus.rl.steps import Report as Report
    from zbus.rl.steps import part as part
    from zbus.rl.train_engine import TrainEngine as TrainEngine
    from zbus.rl.weights import TensorInfo as TensorInfo
    from zbus.rl.workflow import EpisodeEngine as EpisodeEngine
    from zbus.rl.workflow import Workflow as Workflow

_HOMES: Final = {
    "zbus.rl.generation": ("Completion", "Episode", "Sampling", "VersionSpan"),
    "zbus.rl.rollout_engine": ("RolloutEngine",),
    "zbus.rl.stats": ("Stats",),
    "zbus.rl.steps": ("Report", "part"),
    "zbus.rl.train_engine": ("TrainEngine",),
    "zbus.rl.weights": ("TensorInfo",),
    "zbus.rl.workflow": ("EpisodeEngine", "Workflow"),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]  # noqa: PLE0604  # computed from the one table; a test checks each name against its home

__getattr__, __dir__ = loaders(__name__, _HOME_OF)
