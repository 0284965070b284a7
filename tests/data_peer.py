"""A process that reads arrays out of another's shared memory, told what to do line by line."""

import contextlib
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from zbus.data.courier import Courier
from zbus.errors import CodecError


class Reader:
    """The other side of the pipes. ``token`` names the process."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.token = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, *words: str) -> str:
        """Send a command and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return self._line()

    def open(self, frame: bytes, owner: str) -> str:
        """Open an array and keep it; return its hash, or the error."""
        return self.ask("open", bytes(frame).hex(), owner)

    def close(self) -> None:
        """Kill it if it is still there."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def reading(root: Path) -> Iterator[Reader]:
    """Run a reader for the length of a ``with`` block."""
    reader = Reader(root)
    try:
        yield reader
    finally:
        reader.close()


def digest(data: object) -> str:
    """Return a hash of bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()  # type: ignore[arg-type]  # anything bytes-like


def main() -> None:
    """Follow commands until there are no more."""
    courier = Courier.enter(root=Path(sys.argv[1]))
    print(courier.token, flush=True)
    kept: list[object] = []
    for line in sys.stdin:
        command, *words = line.split()
        if command == "open":
            try:
                kept.append(courier.opened([b"", bytes.fromhex(words[0])], words[1])[1])
                print(digest(kept[-1]), flush=True)
            except CodecError as error:
                print(f"error: {error.message}", flush=True)
        elif command == "hash":
            print(digest(kept[-1]), flush=True)
        elif command == "drop":
            kept.clear()
            print("dropped", flush=True)
    courier.leave()


if __name__ == "__main__":
    main()
