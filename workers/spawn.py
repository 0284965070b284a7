"""How an agent makes processes: sockets it holds for them, and a start by exec.

The other way to start a rank, by fork of a template, is in ``workers.template``.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from workers.spec import SPEC_VARIABLE, RankSpec

__all__ = ["THREAD_VARIABLES", "WORKER_COMMAND", "hold_port", "open_log", "spawn_exec", "thread_defaults"]

WORKER_COMMAND: Final = (sys.executable, "-P", "-m", "workers.worker")
"""Starts a rank. ``-P`` keeps the working directory out of ``sys.path``, where a user's ``workers`` may lie."""

THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_BACKLOG: Final = 512
_RESET: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1)


def thread_defaults(env: Mapping[str, str]) -> dict[str, str]:
    """Return the thread limits to add to ``env``: 1 for each variable that nobody set.

    Several ranks that each start a thread per core slow each other down by more than they gain; whoever sets
    ``OMP_NUM_THREADS`` sets the default of the others too.
    """
    value = env.get("OMP_NUM_THREADS", "1")
    return {name: value for name in THREAD_VARIABLES if name not in env}


def hold_port(host: str) -> socket.socket:
    """Bind and listen on a free port of ``host``; the port is ours from now on, so no other process can get it.

    Raises:
        OSError: The address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.bind((host, 0))
        held.listen(_BACKLOG)
    except OSError:
        held.close()
        raise
    return held


def open_log(path: Path) -> int:
    """Open the log of one start for appending and return the descriptor; made private, links are not followed.

    Raises:
        OSError: It cannot be opened.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


@contextmanager
def _inheritable(fds: Sequence[int]) -> Iterator[None]:
    for fd in fds:
        os.set_inheritable(fd, True)  # noqa: FBT003  # its only parameter
    try:
        yield
    finally:
        for fd in fds:
            os.set_inheritable(fd, False)  # noqa: FBT003  # its only parameter


def passed_fds(spec: RankSpec) -> list[int]:
    """Return the descriptors a spec names, in the order in which they are passed on."""
    single = (spec.torch_store_fd, spec.lease_fd, spec.published_fd)
    return [*spec.listen_fds, *(fd for fd in single if fd is not None)]


def with_fds(spec: RankSpec, fds: Sequence[int]) -> RankSpec:
    """Return ``spec`` with its descriptors replaced by ``fds`` (the order of ``passed_fds``)."""
    count = len(spec.listen_fds)
    rest = list(fds[count:])
    store = rest.pop(0) if spec.torch_store_fd is not None else None
    lease = rest.pop(0) if spec.lease_fd is not None else None
    published = rest.pop(0) if spec.published_fd is not None else None
    return msgspec.structs.replace(
        spec, listen_fds=list(fds[:count]), torch_store_fd=store, lease_fd=lease, published_fd=published
    )


def spawn_exec(spec: RankSpec, env: Mapping[str, str], log_fd: int, command: Sequence[str] = WORKER_COMMAND) -> int:
    """Start a rank as a new program and return its pid. No shell, no pipe: the log is its stdout and stderr.

    Call it on the agent's main thread: the kernel ties a parent-death signal to the thread that forked. The caller
    reaps the child.

    Raises:
        OSError: The program cannot be started.
    """
    full = {**env, SPEC_VARIABLE: spec.to_json()}
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log_fd, 1),
        (os.POSIX_SPAWN_DUP2, log_fd, 2),
    ]
    with _inheritable(passed_fds(spec)):
        return os.posix_spawn(
            command[0], list(command), full, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET
        )
