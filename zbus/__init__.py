"""zbus: a message bus for single-controller distributed training.

Engine authors import only this package::

    import zbus
    from zbus import Everywhere, PerRank, Split

    class Actor(zbus.Engine):
        @zbus.endpoint(Split("dp"), collect=PerRank(), effect="once")
        def train(self, batch): ...

Every public name is loaded on first use, so ``import zbus`` costs next to nothing and never imports numpy or torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zbus.lazy import loaders

if TYPE_CHECKING:
    from zbus.codec import JoinedRef as JoinedRef
    from zbus.codec import Ref as Ref
    from zbus.codec import register as register
    from zbus.engine import AnyOne as AnyOne
    from zbus.engine import Concat as Concat
    from zbus.engine import Engine as Engine
    from zbus.engine import Everywhere as Everywhere
    from zbus.engine import First as First
    from zbus.engine import Mesh as Mesh
    from zbus.engine import PerRank as PerRank
    from zbus.engine import RankZero as RankZero
    from zbus.engine import Reduce as Reduce
    from zbus.engine import Same as Same
    from zbus.engine import Scatter as Scatter
    from zbus.engine import Split as Split
    from zbus.engine import Whole as Whole
    from zbus.engine import endpoint as endpoint
    from zbus.errors import BatchError as BatchError
    from zbus.errors import CallCancelled as CallCancelled
    from zbus.errors import CallError as CallError
    from zbus.errors import CallStopped as CallStopped
    from zbus.errors import CallTimeout as CallTimeout
    from zbus.errors import CodecError as CodecError
    from zbus.errors import ConfigError as ConfigError
    from zbus.errors import EngineLoadError as EngineLoadError
    from zbus.errors import Fenced as Fenced
    from zbus.errors import NotExecuted as NotExecuted
    from zbus.errors import OutcomeUnknown as OutcomeUnknown
    from zbus.errors import ProtocolMismatch as ProtocolMismatch
    from zbus.errors import RankClaimed as RankClaimed
    from zbus.errors import RecoverError as RecoverError
    from zbus.errors import RefLimitError as RefLimitError
    from zbus.errors import RefLostError as RefLostError
    from zbus.errors import RegistryError as RegistryError
    from zbus.errors import RemoteError as RemoteError
    from zbus.errors import RolloutError as RolloutError
    from zbus.errors import StartupError as StartupError
    from zbus.errors import TransportError as TransportError
    from zbus.errors import TrialError as TrialError
    from zbus.errors import Unavailable as Unavailable
    from zbus.errors import WorkerLost as WorkerLost
    from zbus.errors import ZbusError as ZbusError
    from zbus.ragged import Ragged as Ragged
    from zbus.runtime.context import Context as Context
    from zbus.runtime.stopping import checkpoint as checkpoint
    from zbus.trace import counter as counter
    from zbus.trace import flow as flow
    from zbus.trace import instant as instant
    from zbus.trace import span as span
    from zbus.trace import traced as traced

_HOMES: Final = {
    "zbus.codec": ("JoinedRef", "Ref", "register"),
    "zbus.engine": (
        "AnyOne",
        "Concat",
        "Engine",
        "Everywhere",
        "First",
        "Mesh",
        "PerRank",
        "RankZero",
        "Reduce",
        "Same",
        "Scatter",
        "Split",
        "Whole",
        "endpoint",
    ),
    "zbus.errors": (
        "BatchError",
        "CallCancelled",
        "CallError",
        "CallStopped",
        "CallTimeout",
        "CodecError",
        "ConfigError",
        "EngineLoadError",
        "Fenced",
        "NotExecuted",
        "OutcomeUnknown",
        "ProtocolMismatch",
        "RankClaimed",
        "RecoverError",
        "RefLimitError",
        "RefLostError",
        "RegistryError",
        "RemoteError",
        "RolloutError",
        "StartupError",
        "TransportError",
        "TrialError",
        "Unavailable",
        "WorkerLost",
        "ZbusError",
    ),
    "zbus.ragged": ("Ragged",),
    "zbus.runtime.context": ("Context",),
    "zbus.runtime.stopping": ("checkpoint",),
    "zbus.trace": ("counter", "flow", "instant", "span", "traced"),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

__version__: Final = "0.1.0"

__all__ = [  # noqa: PLE0604  # computed from the one table; a test checks each name against its home
    "__version__",
    *_HOME_OF,
]

__getattr__, __dir__ = loaders(__name__, _HOME_OF)
