"""Where sockets are bound: a short private directory for ipc, loopback for tcp, and the checks before either."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from zbus.errors import ConfigError

__all__ = [
    "MAX_IPC_PATH",
    "RuntimeDir",
    "Transport",
    "bind_endpoints",
    "check",
    "check_length",
    "is_loopback",
]

MAX_IPC_PATH: Final = 107
"""Longest path of a unix socket in bytes (``sun_path`` holds 108 with the closing NUL)."""

Transport = Literal["ipc", "tcp", "both"]
"""How a server can be reached."""

_NAME_ROOM: Final = 48  # for `/<label>.<pid>.<random>`
_SOCKET_NAME: Final = re.compile(r"[a-z0-9-]+\.(\d+)\.[0-9a-f]{6}")
_LABEL: Final = re.compile(r"[a-z0-9-]{1,24}")
_EMPTY_FOR_S: Final = 3_600.0
_SHORTER: Final = "set ZBUS_RUNTIME_DIR to a short private directory, such as /tmp/z"


def check_length(endpoint: str) -> None:
    """Refuse an ipc endpoint whose path the kernel cannot hold.

    Raises:
        ConfigError: With the length, the limit and the fix.
    """
    if not endpoint.startswith("ipc://"):
        return
    length = len(os.fsencode(endpoint.removeprefix("ipc://")))
    if length > MAX_IPC_PATH:
        msg = (
            f"the socket path {endpoint.removeprefix('ipc://')!r} has {length} bytes; the system allows {MAX_IPC_PATH}"
        )
        raise ConfigError(msg, hint=_SHORTER)


def check(endpoint: str, *, has_keys: bool) -> None:
    """Refuse an endpoint that must not or cannot be bound.

    Args:
        endpoint: A ZeroMQ endpoint.
        has_keys: Whether the socket will be encrypted.

    Raises:
        ConfigError: The path is too long, or others could reach the address and there are no keys.
    """
    check_length(endpoint)
    if not endpoint.startswith("tcp://"):
        return
    host = _host_of(endpoint)
    if not _is_bindable(host):
        msg = f"{host!r} is neither an address nor an interface of this host, so nothing can be bound there"
        raise ConfigError(msg, hint="give an IP address, such as 127.0.0.1; names are not looked up")
    if not has_keys and not is_loopback(endpoint):
        msg = f"{endpoint!r} can be reached from other hosts, and this process has no keys to tell friend from foe"
        raise ConfigError(msg, hint="bind 127.0.0.1, or switch keys on (auth=curve)")


def is_loopback(endpoint: str) -> bool:
    """Return whether a tcp endpoint names a loopback address (a literal, ``localhost`` or ``lo``)."""
    host = _host_of(endpoint)
    if host in ("localhost", "lo"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool(mapped.is_loopback if mapped is not None else address.is_loopback)


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]").partition("%")[0]


def _is_bindable(host: str) -> bool:
    if host in ("localhost", "*"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in {name for _, name in socket.if_nameindex()}
    return True


def bind_endpoints(
    transport: Transport, label: str, *, runtime_dir: RuntimeDir | None = None, host: str = "127.0.0.1"
) -> list[str]:
    """Return the endpoints a server binds for one purpose, best first.

    Args:
        transport: ``ipc``, ``tcp`` or ``both``.
        label: What the socket is for: ``main``, ``ctl``, ``hub-pub``, …
        runtime_dir: Where ipc sockets live; needed unless ``transport`` is ``tcp``.
        host: Address of the interface for tcp; the port is 0, so the system picks a free one at bind.

    Raises:
        ConfigError: ipc without a runtime directory, or one with too long a path.
    """
    found = []
    if transport != "tcp":
        if runtime_dir is None:
            msg = f"transport {transport!r} needs a runtime directory"
            raise ConfigError(msg)
        found.append(runtime_dir.endpoint(label))
    if transport != "ipc":
        found.append(f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")
    return found


class RuntimeDir:
    """The private directory (0700) that holds the ipc sockets of one trial on this host.

    Not tied to a thread. All methods do quick local file I/O.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(
        cls, trial_dir: Path, *, base: Path | None = None, environ: Mapping[str, str] = os.environ
    ) -> RuntimeDir:
        """Make (or find again) the runtime directory of a trial and sweep leftovers of dead runs.

        The name is a short hash of the trial directory. It is made below ``base``, else ``ZBUS_RUNTIME_DIR``, else the
        first of ``XDG_RUNTIME_DIR`` and the system's temporary directories whose path is short enough.

        Args:
            trial_dir: The trial directory.
            base: Where to make it, asked for by the user.
            environ: Environment to read.

        Raises:
            ConfigError: The asked-for place is too long, missing or not private; or no place will do.
        """
        import hashlib  # brings all of OpenSSL along: only who makes the directory needs it

        digest = hashlib.blake2b(os.fsencode(trial_dir.absolute()), digest_size=5).hexdigest()
        asked = (
            base if base is not None else Path(environ["ZBUS_RUNTIME_DIR"]) if "ZBUS_RUNTIME_DIR" in environ else None
        )
        if asked is not None:
            return cls._create_in(asked, f"zbus-{digest}")
        tried: list[str] = []
        for candidate, name in _places(environ, digest):
            for attempt in (name, f"{name}-{os.urandom(3).hex()}"):
                try:
                    return cls._create_in(candidate, attempt)
                except ConfigError as error:
                    tried.append(error.message)
        msg = "no directory on this host can hold the sockets of this trial"
        raise ConfigError(msg, hint=_SHORTER, facts={f"tried {n}": text for n, text in enumerate(tried, 1)})

    @classmethod
    def open(cls, path: Path) -> RuntimeDir:
        """Return an existing runtime directory, such as the one a record names.

        Raises:
            ConfigError: It is missing, a link, another user's, or open to others.
        """
        _require_private(path)
        return cls(path)

    @classmethod
    def _create_in(cls, base: Path, name: str) -> RuntimeDir:
        path = base.absolute() / name
        length = len(os.fsencode(path)) + _NAME_ROOM
        if length > MAX_IPC_PATH:
            msg = f"socket paths in the runtime directory {str(base)!r} would have up to {length} bytes; "
            msg += f"the system allows {MAX_IPC_PATH}"
            raise ConfigError(msg, hint=_SHORTER)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            msg = f"cannot make the runtime directory {str(path)!r}: {error.strerror}"
            raise ConfigError(msg, hint=_SHORTER) from error
        made = cls.open(path)
        made.sweep()
        _sweep_siblings(path)
        return made

    def endpoint(self, label: str) -> str:
        """Return a fresh ipc endpoint of this process.

        Args:
            label: What the socket is for, up to 24 of ``a-z 0-9 -``.

        Raises:
            ValueError: The label does not fit.
            ConfigError: The path would be too long.
        """
        if not _LABEL.fullmatch(label):
            msg = f"socket label {label!r} is not 1 to 24 of a-z 0-9 -"
            raise ValueError(msg)
        endpoint = f"ipc://{self.path}/{label}.{os.getpid()}.{os.urandom(3).hex()}"
        check_length(endpoint)
        return endpoint

    def sweep(self) -> int:
        """Remove socket files of dead processes; return how many. A live socket is never removed.

        A file goes only if its process is not seen here and nobody listens on it: either alone may lie (another pid
        namespace; a socket bound a moment ago).
        """
        removed = 0
        for path in self._sockets():
            match = _SOCKET_NAME.fullmatch(path.name)
            if match and not _alive(int(match[1])) and not _listening(path):
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def remove(self) -> bool:
        """Sweep, then remove the directory if it is empty; return whether it is gone."""
        self.sweep()
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _sockets(self) -> Iterator[Path]:
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)]
        except OSError:
            return
        for name in names:
            yield self.path / name


def _places(environ: Mapping[str, str], digest: str) -> Iterator[tuple[Path, str]]:
    """Yield directories to try, with the name to use there."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_absolute() and _is_private(Path(runtime)):
        yield Path(runtime), f"zbus-{digest}"
    for place in dict.fromkeys((environ.get("TMPDIR") or tempfile.gettempdir(), "/tmp", "/var/tmp")):  # noqa: S108  # last resorts; the directory made there is private
        yield Path(place), f"zbus-{os.geteuid()}-{digest}"


def _is_private(path: Path) -> bool:
    try:
        _require_private(path)
    except ConfigError:
        return False
    return True


def _require_private(path: Path) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        msg = f"cannot use the runtime directory {str(path)!r}: {error.strerror}"
        hint = "on another host than the controller's, start with `zbus-worker start --transport tcp --bind ADDRESS`"
        raise ConfigError(msg, hint=hint if error.errno == errno.ENOENT else None) from error
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        msg = f"the runtime directory {str(path)!r} is a link or not a directory"
        raise ConfigError(msg, hint=f"remove {path}")
    if status.st_uid != os.geteuid():
        msg = f"the runtime directory {str(path)!r} belongs to user {status.st_uid}, not to you ({os.geteuid()})"
        raise ConfigError(msg, hint=_SHORTER)
    if stat.S_IMODE(status.st_mode) & 0o077:
        msg = f"the runtime directory {str(path)!r} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})"
        raise ConfigError(msg, hint=f"chmod 700 {path}")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def _sweep_siblings(path: Path) -> None:
    """Remove other trials' runtime directories that hold nothing but dead sockets.

    An empty one may have been made a moment ago, so it is left until it is an hour old (local clock, local file).
    """
    for other in path.parent.glob(path.name[: path.name.rindex("-") + 1] + "*"):
        if other == path or not _is_private(other):
            continue
        swept = RuntimeDir(other).sweep()
        try:
            if swept or time.time() - other.lstat().st_mtime > _EMPTY_FOR_S:
                other.rmdir()
        except OSError:
            continue
