"""What a tracer is told: where to write, how much to record, which clock the run counts from."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zbus.errors import ConfigError

__all__ = ["TraceConfig"]

_LEVELS = ("off", "rpc", "full")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Settings of one tracer.

    Attributes:
        root: Trace root (``<trial>/traces``); files go to ``{root}/{role}/``. Empty: keep the tracer's root.
        level: ``off``, ``rpc`` (the bus's own spans) or ``full`` (also user spans, instants, counters, flows).
        run: Name of the run, ``experiment/trial``; files of different runs are not mixed by a merge.
        save_interval: ``save_perf_tracer(step)`` writes at every n-th step; values below 1 mean 1.
        flush_period_s: Seconds between background writes; a SIGKILL loses at most this much. 0.05 to 10.
        ring_size: Records a thread may hold between two writes; beyond it the newest are dropped and counted.
        run_epoch_wall_ns: Wall clock at the run epoch; 0: the epoch is the moment of ``configure``.
        run_epoch_mono_ns: The controller's CLOCK_MONOTONIC at the run epoch.
        clock_boot_id: Boot id of the machine ``run_epoch_mono_ns`` was read on.
        clock_time_ns: Inode of the time namespace it was read in; 0: not known, taken as ours if the boot id is.
        sessions: Whether tasks and sessions are recorded; None: unless the level is ``off``.
        session_flush: Finished sessions that are written at once, without waiting for the flush period.
        capture_steps: Steps recorded at ``level``; the others at the level below it. Empty: all steps are.
        profile_steps: Steps whose scopes with ``enable_profiler`` run torch's profiler.
        sidecar: ``auto``: hand records to the trial's sidecar as soon as there is one; ``off``: own files only.
        gauge_period_s: Seconds between samples of the process's gauges (memory, and those added); 0: none.
    """

    root: str = ""
    level: str = "full"
    run: str = ""
    save_interval: int = 1
    flush_period_s: float = 0.25
    ring_size: int = 1 << 17
    run_epoch_wall_ns: int = 0
    run_epoch_mono_ns: int = 0
    clock_boot_id: str = ""
    clock_time_ns: int = 0
    sessions: bool | None = None
    session_flush: int = 256
    capture_steps: tuple[int, ...] = ()
    profile_steps: tuple[int, ...] = ()
    sidecar: str = "auto"
    gauge_period_s: float = 1.0

    def __post_init__(self) -> None:
        if self.level not in _LEVELS:
            msg = f"trace level {self.level!r} is not one of {', '.join(_LEVELS)}"
            raise ConfigError(msg)
        object.__setattr__(self, "root", str(self.root))
        object.__setattr__(self, "save_interval", max(1, self.save_interval))
        object.__setattr__(self, "flush_period_s", min(10.0, max(0.05, self.flush_period_s)))
        object.__setattr__(self, "ring_size", max(16, self.ring_size))
        object.__setattr__(self, "session_flush", max(1, self.session_flush))
        object.__setattr__(self, "capture_steps", _steps("capture_steps", self.capture_steps))
        object.__setattr__(self, "profile_steps", _steps("profile_steps", self.profile_steps))
        if self.sidecar not in ("auto", "off"):
            msg = f"trace sidecar {self.sidecar!r} is neither auto nor off"
            raise ConfigError(msg)

    def level_at(self, step: int) -> str:
        """Return the level of one step."""
        if not self.capture_steps or step in self.capture_steps:
            return self.level
        return _LEVELS[max(0, _LEVELS.index(self.level) - 1)]

    @property
    def wants_sessions(self) -> bool:
        """Whether sessions are recorded."""
        return self.level != "off" if self.sessions is None else self.sessions

    @classmethod
    def of(cls, config: TraceConfig | Mapping[str, Any]) -> TraceConfig:
        """Return ``config`` as a ``TraceConfig``.

        A mapping may also say ``enabled`` (true: ``full``, false: ``off``) and, as the founding config does,
        ``session_tracer`` (``{"enabled": …, "flush_threshold": …}``).

        Raises:
            ConfigError: Not a config, an unknown key, or a value of the wrong type.
        """
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            msg = f"a trace config is a TraceConfig, a mapping or None, not {type(config).__name__}"
            raise ConfigError(msg)
        values = dict(config)
        if "enabled" in values and not values.pop("enabled"):
            values["level"] = "off"
        sessions = values.pop("session_tracer", None)
        if isinstance(sessions, Mapping):
            values.setdefault("sessions", bool(sessions.get("enabled", False)))
            values.setdefault("session_flush", sessions.get("flush_threshold", 256))
        kinds: dict[str, type] = {f.name: type(f.default) for f in fields(cls)}
        kinds["sessions"] = bool
        for key, value in values.items():
            if key not in kinds:
                near = difflib.get_close_matches(str(key), kinds, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(kinds)}"
                msg = f"unknown trace config key `{key}`"
                raise ConfigError(msg, hint=hint)
            if key not in ("root", "capture_steps", "profile_steps") and not _fits(value, kinds[key]):
                msg = f"trace config key `{key}` wants {kinds[key].__name__}, got {type(value).__name__}"
                raise ConfigError(msg)
        return cls(**values)


def _steps(key: str, value: Any) -> tuple[int, ...]:
    steps = tuple(value) if isinstance(value, list | tuple | range | set | frozenset) else (value,) if value else ()
    if not all(isinstance(step, int) and not isinstance(step, bool) for step in steps):
        msg = f"trace config key `{key}` wants a list of step numbers, got {value!r}"
        raise ConfigError(msg)
    return steps


def _fits(value: object, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and (value is None or isinstance(value, bool))
    return isinstance(value, (int, float) if kind is float else kind)
