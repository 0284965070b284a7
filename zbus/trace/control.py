"""Switching tracers on and off: ``configure``, ``config_perf_tracer``, ``save_perf_tracer`` and the exit hook.

One process holds one tracer per role and rank, each with its own file; roles that share a process keep apart. All
functions may be called from any thread; they write files, so not from a signal handler.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.errors import ConfigError
from zbus.trace.config import TraceConfig
from zbus.trace.tracer import Tracer, get_tracer, set_default_tracer
from zbus.trace.writer import TraceWriter

__all__ = ["config_perf_tracer", "configure", "reset", "save_perf_tracer", "shutdown", "tracers", "writer_of"]

_lock = threading.RLock()
_writers: dict[tuple[str, int], TraceWriter] = {}


def configure(
    config: TraceConfig | Mapping[str, Any],
    *,
    role: str,
    rank: int,
    incarnation: int = 0,
    start: int = 0,
    default: bool = True,
    clock: Clock = SYSTEM_CLOCK,
) -> Tracer:
    """Begin tracing for ``role/rank`` and return its tracer; called again it only applies level and intervals.

    With the level ``off`` no file is made; a later ``config_perf_tracer`` makes it.

    Args:
        config: Where and how much.
        role: Whose spans; with the rank it names the file.
        rank: Of the role.
        incarnation: Of this start of the rank.
        start: Start counter of the rank.
        default: Make it the process's default tracer.
        clock: Injected in tests.

    Raises:
        ConfigError: No root, a bad role, a different root than before, or the file cannot be made.
    """
    config = TraceConfig.of(config)
    with _lock:
        writer = _writers.get((role, rank))
        if writer is None:
            writer = _new_writer(config, role, rank, incarnation, start, clock)
            _writers[role, rank] = writer
            if default:
                set_default_tracer(writer.tracer)
        _apply(writer, config)
        return writer.tracer


def config_perf_tracer(
    config: TraceConfig | Mapping[str, Any] | None, role: str | None = None, rank: int | None = None
) -> None:
    """Apply ``config`` to a live process: switch the level, the save interval, the period.

    Args:
        config: New settings; an empty ``root`` keeps the tracer's. None switches tracing off (and is no error where
            nothing was traced).
        role: Whose tracer; None: the current one.
        rank: Of the role; None: all ranks of it in this process, or 0 where there is none yet.

    Raises:
        ConfigError: Wrong type or key, or tracing was never configured here and ``root`` or ``role`` is missing.
    """
    with _lock:
        chosen = _chosen(role, rank)
        if config is None:
            for writer in chosen:
                writer.tracer.set_level("off")
                writer.flush()
            return
        config = TraceConfig.of(config)
        for writer in chosen:
            _apply(writer, config)
        if chosen or config.level == "off":
            return
        if role is None:
            msg = "tracing is not configured in this process"
            raise ConfigError(msg, hint="pass role= and a config with root=")
        configure(config, role=role, rank=rank or 0)


def save_perf_tracer(step: int | None = None, force: bool = False) -> None:  # noqa: FBT001, FBT002  # founding spelling
    """Write what was recorded so far, if this step is due; a no-op where nothing is traced.

    Due: ``force``, no step, or every ``save_interval``-th step (the last of each interval, counted from step 0).
    The background writer goes on writing in between whatever the interval.
    """
    with _lock:
        due = [w for w in _writers.values() if force or step is None or (step + 1) % w.config.save_interval == 0]
    for writer in due:
        writer.flush()


def tracers() -> list[Tracer]:
    """Return all tracers configured in this process."""
    with _lock:
        return [writer.tracer for writer in _writers.values()]


def writer_of(tracer: Tracer) -> TraceWriter | None:
    """Return the writer behind a configured tracer, for its counts and path."""
    with _lock:
        writer = _writers.get((tracer.role, tracer.rank))
        return writer if writer is not None and writer.tracer is tracer else None


def reset(role: str | None = None, rank: int | None = None) -> None:
    """Write what is pending, close the files with their end events and forget the tracers (all by default)."""
    with _lock:
        for key, writer in list(_writers.items()):
            if role in (None, key[0]) and rank in (None, key[1]):
                del _writers[key]
                writer.close()
        if not _writers:
            set_default_tracer(None)


def shutdown() -> None:
    """Close every tracer's file with its end event; also runs at interpreter exit."""
    reset()


def _new_writer(  # private, one caller
    config: TraceConfig, role: str, rank: int, incarnation: int, start: int, clock: Clock
) -> TraceWriter:
    if not config.root:
        msg = f"trace root for {role}/{rank} is missing"
        raise ConfigError(msg, hint="set trace.root, usually <trial>/traces")
    tracer = Tracer(role, rank, ring_size=config.ring_size, clock=clock)
    try:
        return TraceWriter(tracer, config, incarnation=incarnation, start=start, clock=clock)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _apply(writer: TraceWriter, config: TraceConfig) -> None:
    if config.root and config.root != writer.config.root:
        msg = f"{writer.tracer.role}/{writer.tracer.rank} already traces into {writer.config.root}"
        raise ConfigError(msg, hint="call zbus.trace.reset() first")
    writer.config = dataclasses.replace(
        writer.config,
        level=config.level,
        save_interval=config.save_interval,
        flush_period_s=config.flush_period_s,
    )
    if config.level != "off" and not writer.opened:
        try:
            writer.open()
        except OSError as error:
            msg = f"trace file {writer.path} cannot be made: {error.strerror}"
            raise ConfigError(msg) from error
    writer.tracer.set_level(config.level)


def _chosen(role: str | None, rank: int | None) -> list[TraceWriter]:
    if role is None:
        writer = writer_of(get_tracer())
        return [writer] if writer is not None else []
    return [w for key, w in _writers.items() if key[0] == role and rank in (None, key[1])]


atexit.register(shutdown)
