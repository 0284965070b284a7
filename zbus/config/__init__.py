"""Configuration: a strict schema, values with their origins, and the trial directory.

``TrialDir`` and the parsers cost nothing; the schema (msgspec, YAML) loads when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from zbus.config.trialdir import DEFAULT_ROOT, TrialDir, new_trial_name, sync_to_disk, write_atomically
from zbus.config.values import format_duration, format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from zbus.config.load import Resolved, load_config
    from zbus.config.schema import (
        Config,
        LogConfig,
        RoleConfig,
        RpcConfig,
        SchedulerConfig,
        TraceConfig,
    )

__all__ = [
    "DEFAULT_ROOT",
    "Config",
    "LogConfig",
    "Resolved",
    "RoleConfig",
    "RpcConfig",
    "SchedulerConfig",
    "TraceConfig",
    "TrialDir",
    "format_duration",
    "format_size",
    "load_config",
    "new_trial_name",
    "parse_duration",
    "parse_size",
    "sync_to_disk",
    "write_atomically",
]

_LAZY = {
    **dict.fromkeys(("Resolved", "load_config"), "zbus.config.load"),
    **dict.fromkeys(
        ("Config", "LogConfig", "RoleConfig", "RpcConfig", "SchedulerConfig", "TraceConfig"), "zbus.config.schema"
    ),
}


def __getattr__(name: str) -> object:
    """Load the schema or the loader when first asked for."""
    module = _LAZY.get(name)
    if module is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(module), name)
