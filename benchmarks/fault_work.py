"""What every system runs, and the truth it leaves. Standard library only: workers of all systems import it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["Truth", "step"]


def step(directory: str, number: int, seconds: float) -> int:
    """Leave a mark that this call has run, take ``seconds``, and answer the square of its number."""
    mark = f"{number} {os.getpid()}\n".encode()
    fd = os.open(f"{directory}/truth", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, mark)  # one short append: whole, and never over another
    finally:
        os.close(fd)
    time.sleep(seconds)
    return number * number


class Truth:
    """What really ran, by call number."""

    def __init__(self, directory: str) -> None:
        self._file = Path(directory) / "truth"

    def runs(self) -> dict[int, int]:
        """Return how often each call has begun."""
        found: dict[int, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in self._file.read_text().splitlines():
                number = int(line.split()[0])
                found[number] = found.get(number, 0) + 1
        return found

    def wait(self, number: int, seconds: float) -> bool:
        """Wait until a call has begun; False if it has not within ``seconds``."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if number in self.runs():
                return True
            time.sleep(0.01)
        return False

    def settle(self, quiet_s: float, limit_s: float) -> None:
        """Wait until nothing has begun for ``quiet_s`` seconds, or ``limit_s`` have passed."""
        until, last, since = time.monotonic() + limit_s, self.runs(), time.monotonic()
        while time.monotonic() < until and time.monotonic() - since < quiet_s:
            time.sleep(0.05)
            now = self.runs()
            if now != last:
                last, since = now, time.monotonic()
