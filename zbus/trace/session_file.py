"""Where finished sessions go: ``{root}/{role}/sessions_{rank}.jsonl``, written on its own, whatever the trace level."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Final

import msgspec

from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.trace.config import TraceConfig
from zbus.trace.events import plain_json
from zbus.trace.sessions import SessionRecorder
from zbus.trace.tracefile import LineFile, RunEpoch, new_source, opening_facts, run_epoch, sessions_path

__all__ = ["SessionWriter"]

_LOG = logging.getLogger("zbus.trace")
_STOP_S: Final = 2.0
_encoder: Final = msgspec.json.Encoder()


class SessionWriter:
    """Writes one recorder's sessions. Made with the tracer, it makes its file at the first finished session.

    Safe from any thread. A background thread (begun at the first finished session) writes every flush period, or as
    soon as ``session_flush`` sessions wait.

    Args:
        role, rank: Whose sessions.
        config: Root, run, run epoch, period, threshold.
        incarnation: Of this start of the rank.
        start: Start counter of the rank.
        source: Id of the process's stream of records; a fresh one by default.
        epoch: Where time 0 is; by default as ``config`` says now.
        clock: For times.

    Raises:
        ValueError: The role or the rank cannot name a file.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        config: TraceConfig,
        *,
        incarnation: int = 0,
        start: int = 0,
        source: str = "",
        epoch: RunEpoch | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.config = config
        self.source = source or new_source()
        self.written = 0
        self._base = sessions_path(config.root, role, rank, start)
        self.path = self._base
        self._who: dict[str, Any] = {"role": role, "rank": rank, "start": start, "incarnation": incarnation}
        self._clock = clock
        self._epoch = epoch or run_epoch(config, clock)
        now = clock.monotonic_ns
        self.recorder = SessionRecorder(
            role, rank, start=start, now=now, epoch_ns=self._epoch.mono_ns, on_ready=self._on_ready
        )
        self._file: LineFile | None = None
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closed = False

    def flush(self, *, unfinished: bool = False) -> None:
        """Write the finished sessions; with ``unfinished`` all others too. Never raises."""
        try:
            with self._lock:
                self._write(self.recorder.take(unfinished=unfinished))
        except Exception:  # noqa: BLE001  # the run matters more than its trace
            _LOG.exception("sessions %s: flush failed", self.path)

    def close(self) -> None:
        """Write everything, unfinished sessions as ``pending``, and the end line. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        thread = self._thread
        if self._pid == os.getpid() and thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_S)
        self.flush(unfinished=True)
        with self._lock:
            if self._file is not None:
                self._file.append(_line({"zbus_sessions_end": self.counts()}))
                self._file.close()

    def counts(self) -> dict[str, Any]:
        """Return ``recorded``, ``written``, ``pending`` and ``lost`` (by reason), in sessions."""
        _, open_sessions, ready = self.recorder.sizes()
        counts = {"recorded": self.recorder.recorded, "written": self.written, "pending": open_sessions + ready}
        return {**counts, "lost": dict(self.recorder.lost)}

    def after_fork(self) -> None:
        """In a forked child: forget what belongs to the parent; write into a file of the child's own."""
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._thread, self.written = None, 0
        if self._file is not None:
            self._file.close()
            self._file = None
        self._pid = os.getpid()
        self.source = new_source()
        self.path = self._base.with_name(f"{self._base.name.removesuffix('.jsonl')}.fork{self._pid}.jsonl")
        self.recorder.after_fork()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _on_ready(self, count: int) -> None:
        if self._thread is None and not self._closed:
            with self._lock:
                if self._thread is None:
                    name = f"zbus-sessions {self._who['role']}/{self._who['rank']}"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()
        if count >= self.config.session_flush:
            self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self.config.flush_period_s)
            self._wake.clear()
            self.flush()

    def _write(self, records: list[dict[str, Any]]) -> None:
        if not records:
            return
        if self._file is None and not self._open():
            self._lose("write_error", len(records))
            return
        assert self._file is not None  # noqa: S101  # _open said so
        if self._file.append(b"".join(map(_line, records))):
            self.written += len(records)
        else:
            self._lose("write_error", len(records))

    def _open(self) -> bool:
        file = LineFile(self.path)
        facts = opening_facts(self.config, **self._who, source=self.source, epoch=self._epoch, clock=self._clock)
        try:
            file.open()
        except OSError as error:
            _LOG.warning("sessions %s cannot be written: %s", self.path, error.strerror)
            return False
        if not file.append(_line({"zbus_sessions": facts})):
            file.close()
            return False
        self._file = file
        return True

    def _lose(self, reason: str, count: int) -> None:
        self.recorder.lost[reason] = self.recorder.lost.get(reason, 0) + count


def _line(record: dict[str, Any]) -> bytes:
    try:
        return _encoder.encode(record) + b"\n"
    except (ValueError, TypeError, OverflowError, RecursionError):
        return _encoder.encode(plain_json(record)) + b"\n"
