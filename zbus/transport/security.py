"""Key pairs: one per process from the start; its public half stands in every record of that process."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq

from zbus.errors import ConfigError

__all__ = ["CurveKeys", "ProcessKeys", "read_secret", "write_secret"]

_Z85_KEY: Final = 40


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE key pair in Z85 text (40 bytes each). The secret is left out of ``repr``."""

    public: bytes
    secret: bytes = field(repr=False)

    @property
    def public_text(self) -> str:
        """The public key as it stands in records."""
        return self.public.decode("ascii")


class ProcessKeys(CurveKeys):
    """The key pair of this process."""

    __slots__ = ()

    @classmethod
    def create(cls) -> ProcessKeys:
        """Return a fresh key pair; the secret never leaves the process unless ``write_secret`` is called."""
        public, secret = zmq.curve_keypair()
        return cls(public, secret)


def write_secret(path: Path, keys: CurveKeys) -> None:
    """Create a key file, mode 0600, that holds both halves. Blocking file I/O.

    Raises:
        ConfigError: Something stands at ``path`` already, or it cannot be written; nothing is replaced, no half stays.
    """
    made = False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        made = True
        with os.fdopen(descriptor, "wb") as file:
            file.write(keys.public + b"\n" + keys.secret + b"\n")
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                path.unlink()
        msg = f"cannot create the key file {str(path)!r}: {error.strerror}"
        raise ConfigError(msg) from error


def read_secret(path: Path) -> CurveKeys:
    """Read a key file back. Blocking file I/O.

    Raises:
        ConfigError: It is missing, a link, another user's, readable by others, or no key file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            content = file.read(4 * _Z85_KEY)
    except OSError as error:
        msg = f"cannot read the key file {str(path)!r}: {error.strerror}"
        raise ConfigError(msg) from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        msg = f"the key file {str(path)!r} is not a private file of this user"
        raise ConfigError(msg, hint=f"chmod 600 {path}; chown it to yourself, or delete it")
    parts = content.split(b"\n")
    if len(parts) != 3 or len(parts[0]) != _Z85_KEY or len(parts[1]) != _Z85_KEY or parts[2]:
        msg = f"{str(path)!r} is not a key file"
        raise ConfigError(msg)
    try:
        matches = zmq.curve_public(parts[1]) == parts[0]
    except (ValueError, zmq.ZMQError):
        matches = False
    if not matches:
        msg = f"the two keys in {str(path)!r} do not belong together"
        raise ConfigError(msg)
    return CurveKeys(parts[0], parts[1])
