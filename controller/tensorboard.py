"""Metrics as TensorBoard event files, by the ``tensorboard`` package alone: no torch in the controller."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from zbus.errors import ConfigError

__all__ = ["TensorBoardSink"]


class TensorBoardSink:
    """Writes scalars for ``tensorboard --logdir DIRECTORY``.

    Args:
        directory: Where the event files go; each run adds one.

    Raises:
        ConfigError: The package is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            msg = f"metrics cannot go to TensorBoard: {error}"
            raise ConfigError(msg, hint="install it: pip install 'zbus-runtime[tensorboard]'") from error
        self.directory = os.fspath(directory)
        self._event: Any = Event
        self._session: Any = SessionLog
        self._summary: Any = Summary
        self._writer: Any = EventFileWriter(self.directory)

    def __repr__(self) -> str:
        return f"TensorBoardSink({self.directory!r})"

    def resume(self, step: int) -> None:
        """Have TensorBoard forget later steps, which are taken again."""
        restart = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step + 1, session_log=restart))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar per key."""
        scalars = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        summary = self._summary(value=scalars)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write out what is held back and close the file."""
        self._writer.close()
