"""Starting and ending a trial's sidecar as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

__all__ = ["Sidecar"]

_STOP_S: Final = 15.0


class Sidecar:
    """The sidecar process of one trial; use ``start``, end it with ``stop`` or as a context manager.

    It is not waited for: processes find it by the registry once it listens, and write their own files until then. It
    ends by itself when the process that started it is gone.

    Attributes:
        process: The process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    @classmethod
    def start(cls, trial: Path, *, host: str | None = None) -> Sidecar:
        """Start a sidecar for a trial; what it says goes to ``logs/sidecar.log``. Returns at once.

        Args:
            trial: Trial directory.
            host: Address on which processes of other hosts reach it; None: this host alone.

        Raises:
            OSError: No process could be made, or the log cannot be written.
        """
        command = [sys.executable, "-m", "traceview.collect", os.fspath(trial.absolute()), "--parent", str(os.getpid())]
        if host is not None:
            command += ["--bind", host]
        log = trial / "logs" / "sidecar.log"
        log.parent.mkdir(mode=0o700, exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(  # in a session of its own: a Ctrl-C at the terminal is not for it
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        return cls(process)

    def stop(self, timeout_s: float = _STOP_S) -> bool:
        """Ask it to write everything and end; kill it after ``timeout_s`` seconds. Harmless when repeated.

        Call it after the traced processes have ended. Returns whether it ended in order; what it did not get to write
        is in its spool, which a merge reads.
        """
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
