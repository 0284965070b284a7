"""Switching tracers on and off: ``configure``, ``config_perf_tracer``, ``save_perf_tracer`` and the exit hook.

One process holds one tracer per role and rank, each with its own file; roles that share a process keep apart. All
functions may be called from any thread; they write files, so not from a signal handler.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import resource
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.errors import ConfigError
from zbus.trace.blocks import ClockLine
from zbus.trace.config import TraceConfig
from zbus.trace.session_file import SessionWriter
from zbus.trace.tracer import INSTANT, Tracer, get_tracer, set_default_tracer
from zbus.trace.writer import LOOK_S, Outlet, TraceWriter

__all__ = [
    "config_perf_tracer",
    "configure",
    "is_configured",
    "mark_step",
    "note_clock",
    "reset",
    "save",
    "save_perf_tracer",
    "shutdown",
    "tracers",
    "writer_of",
]

_LONGEST_LOOK_S: Final = 30.0

_lock = threading.RLock()
_writers: dict[tuple[str, int], TraceWriter] = {}
_sessions: dict[tuple[str, int], SessionWriter] = {}


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
                writer.config = dataclasses.replace(writer.config, level="off")
                writer.tracer.set_level("off")
                writer.tracer.sessions = None
                writer.flush()
                _flush_sessions(writer)
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
    The background writer goes on writing in between whatever the interval. A step is also marked in the trace as ended
    here (see ``mark_step``).
    """
    if step is not None:
        mark_step(step)
    with _lock:
        due = [w for w in _writers.values() if force or step is None or (step + 1) % w.config.save_interval == 0]
    for writer in due:
        writer.flush()
        _flush_sessions(writer)


save = save_perf_tracer
"""The founding spelling in a program of one's own."""


def is_configured() -> bool:
    """Return whether this process has a tracer."""
    return bool(_writers)


def mark_step(step: int) -> None:
    """Note that a step of the run ended here: an instant ``zbus_step`` in the current tracer, at level ``rpc`` up.

    Reports and ``traceview tail`` divide time into steps by these marks.
    """
    tracer = get_tracer()
    with _lock:
        captures = [writer for writer in _writers.values() if writer.config.capture_steps]
    if tracer.rpc or any(writer.tracer is tracer for writer in captures):
        tracer.append((INSTANT, "zbus_step", "instr", tracer.now(), "g", {"step": int(step)}, None))
    for writer in captures:
        if writer.opened:
            writer.tracer.set_level(writer.config.level_at(int(step) + 1))


def tracers() -> list[Tracer]:
    """Return all tracers configured in this process."""
    with _lock:
        return [writer.tracer for writer in _writers.values()]


def writer_of(tracer: Tracer) -> TraceWriter | None:
    """Return the writer behind a configured tracer, for its counts and path."""
    with _lock:
        writer = _writers.get((tracer.role, tracer.rank))
        return writer if writer is not None and writer.tracer is tracer else None


def note_clock(told: bytes) -> None:
    """Have all traces of this process say what somebody found out about its clock; anything else is ignored.

    Args:
        told: A ``zbus.trace.blocks.ClockLine`` as msgpack.
    """
    try:
        line = msgspec.msgpack.decode(told, type=ClockLine)
    except msgspec.DecodeError:
        return
    for writer in list(_writers.values()):
        if writer.opened:
            writer.note_clock(line)


def reset(role: str | None = None, rank: int | None = None) -> None:
    """Write what is pending, close the files with their end events and forget the tracers (all by default)."""
    with _lock:
        for key, writer in list(_writers.items()):
            if role in (None, key[0]) and rank in (None, key[1]):
                del _writers[key]
                writer.close()
                sessions = _sessions.pop(key, None)
                if sessions is not None:
                    writer.tracer.sessions = None
                    sessions.close()
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
        writer = TraceWriter(tracer, config, incarnation=incarnation, start=start, clock=clock)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.sidecar == "auto":
        writer.find_outlet = _find_outlet
    tracer.add_gauge("memory", _memory)
    return writer


def _find_outlet(writer: TraceWriter) -> Outlet | None:
    """Return a way to the trial's sidecar if its record stands in the registry beside the trace root."""
    registry = Path(writer.config.root).parent / "registry"
    if not (registry / "trace" / "sidecar").exists():
        writer.look_every_s = LOOK_S
        return None
    # By name: export stands above the transport, which the recording side must not load where there is no sidecar.
    outlet: Outlet | None = import_module("zbus.trace.export").connect(writer, registry)
    # Nobody answers: perhaps the record of one that was killed long ago, which must not cost every second of a run.
    writer.look_every_s = LOOK_S if outlet is not None else min(_LONGEST_LOOK_S, 2 * writer.look_every_s)
    return outlet


def _memory() -> dict[str, float]:
    """Return the memory of this process in MiB, and of its GPU where torch has begun to use one."""
    with Path("/proc/self/statm").open("rb") as file:
        pages = int(file.read().split()[1])
    memory = {"rss_mib": round(pages * resource.getpagesize() / (1 << 20), 1)}
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        memory["cuda_mib"] = round(cuda.memory_allocated() / (1 << 20), 1)
    return memory


def _flush_sessions(writer: TraceWriter) -> None:
    sessions = _sessions.get((writer.tracer.role, writer.tracer.rank))
    if sessions is not None:
        sessions.flush()


def _apply_sessions(writer: TraceWriter) -> None:
    """Switch the recording of sessions as the config says; its file is made with the first finished session."""
    tracer, config = writer.tracer, writer.config
    key = tracer.role, tracer.rank
    if not config.wants_sessions:
        tracer.sessions = None
        return
    sessions = _sessions.get(key)
    if sessions is None:
        sessions = _sessions[key] = SessionWriter(
            *key,
            config,
            incarnation=writer.incarnation,
            start=writer.start,
            source=writer.source,
            epoch=writer.epoch,
            clock=writer.clock,
        )
    sessions.config = config
    tracer.sessions = sessions.recorder


def _after_fork() -> None:
    global _lock  # noqa: PLW0603  # the thread that may hold it is not here
    _lock = threading.RLock()
    for sessions in _sessions.values():
        sessions.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _apply(writer: TraceWriter, config: TraceConfig) -> None:
    if config.root and config.root != writer.config.root:
        msg = f"{writer.tracer.role}/{writer.tracer.rank} already traces into {writer.config.root}"
        raise ConfigError(msg, hint="call zbus.trace.reset() first")
    writer.config = dataclasses.replace(
        writer.config,
        level=config.level,
        save_interval=config.save_interval,
        flush_period_s=config.flush_period_s,
        sessions=config.sessions,
        session_flush=config.session_flush,
        profile_steps=config.profile_steps,
        capture_steps=config.capture_steps,
        gauge_period_s=config.gauge_period_s,
    )
    if config.level != "off" and not writer.opened:
        try:
            writer.open()
        except OSError as error:
            msg = f"trace file {writer.path} cannot be made: {error.strerror}"
            raise ConfigError(msg) from error
    writer.tracer.set_level(config.level_at(0) if config.level != "off" else "off")
    writer.tracer.profile_steps = frozenset(config.profile_steps)
    _apply_sessions(writer)


def _chosen(role: str | None, rank: int | None) -> list[TraceWriter]:
    if role is None:
        writer = writer_of(get_tracer())
        return [writer] if writer is not None else []
    return [w for key, w in _writers.items() if key[0] == role and rank in (None, key[1])]


atexit.register(shutdown)
