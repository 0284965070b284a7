"""The template of a role: a process that has done the imports and forks ranks from itself, in milliseconds.

The agent forks it before it has threads or sockets, and before it imports what only the agent needs. It stays
single-threaded, imports what the job names, and for each request forks twice, so that the rank becomes a child of the
agent (its subreaper), where its exit status arrives.

Messages on the SEQPACKET socket, JSON each:

- agent to template, first: ``{"role": "…", "preload": [...], "env": {...}, "sys_path": [...]}``; answer
  ``{"ready": …}``
- agent to template: ``{"spec": …, "env": {...}}`` with descriptors [log, gate, the spec's sockets…]; answer
  ``{"rank": r, "pid": p}`` or ``{"rank": r, "error": "…"}``

The rank waits at the gate until the agent holds its pidfd: no exit can be missed.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import msgspec

from workers.spawn import passed_fds, thread_defaults, with_fds
from workers.spec import RankSpec
from zbus.runtime.processes import ProcessHandle, die_with_parent, set_name

__all__ = ["ForkReply", "RankMain", "Template"]

log = logging.getLogger("zbus.agent")

RankMain = Callable[[RankSpec], int]
"""What a rank runs: takes its spec, returns the exit code. Called on the main thread of the new process."""

_MESSAGE_BYTES: Final = 4 * 1024 * 1024
_MAX_FDS: Final = 250
_BASE_MODULES: Final = ("zbus.runtime.host", "workers.worker", "hashlib", "encodings.ascii")
_SPARE_MODULES: Final = ("asyncio",)
"""What only some engines need. It is imported when there is nothing else to do."""
_SHARED_MODULES: Final = ("zbus.transport.server", "zbus.runtime.executor")
"""What agent and ranks both need and is not imported here: once, before the fork."""
_IDLE_S: Final = 1.0
_RESET: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)


class ForkReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a template answers: ``ready`` after the imports, else the pid of a rank or why there is none."""

    ready: bool = False
    rank: int = -1
    pid: int = 0
    error: str = ""
    warnings: list[str] = []


class Template:
    """The agent's end of a template process. Used on the agent's main thread only."""

    def __init__(self, handle: ProcessHandle, channel: socket.socket) -> None:
        self.handle = handle
        self._channel = channel
        self._gates: dict[int, int] = {}

    @classmethod
    def fork(cls, rank_main: RankMain | None = None) -> Template:
        """Fork the template from this process, which must have one thread.

        What only ranks need is imported after the fork, in the template, while the agent looks for its controller.

        Args:
            rank_main: What ranks run; ``workers.worker.main`` if None.

        Raises:
            OSError: No process or socket could be made.
        """
        _import_all(_SHARED_MODULES)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _template_process(theirs, parent, rank_main)
        theirs.close()
        ours.setblocking(False)  # noqa: FBT003  # its only parameter
        handle = ProcessHandle.open(pid)
        if handle is None:  # pragma: no cover  # an unreaped child always has a pidfd
            msg = "the template process vanished"
            raise OSError(msg)
        return cls(handle, ours)

    def fileno(self) -> int:
        """Return the socket, readable when a reply is there (for pollers)."""
        return self._channel.fileno()

    def configure(self, role: str, *, preload: Sequence[str], env: Mapping[str, str], sys_path: Sequence[str]) -> None:
        """Say whose ranks these will be and what to import; to be called once, before ``start``.

        Raises:
            OSError: The template is gone.
        """
        message = {"role": role, "preload": list(preload), "env": dict(env), "sys_path": list(sys_path)}
        self._channel.send(msgspec.json.encode(message))

    def start(self, spec: RankSpec, env: Mapping[str, str], log_fd: int) -> None:
        """Ask for a rank; the answer arrives as a ``ForkReply``, then ``release`` lets it run.

        Raises:
            OSError: The template is gone.
        """
        gate, ours = os.pipe()
        try:
            message = msgspec.json.encode({"spec": spec, "env": dict(env)})
            socket.send_fds(self._channel, [message], [log_fd, gate, *passed_fds(spec)])
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(gate)
        self._gates[spec.rank] = ours

    def replies(self) -> list[ForkReply] | None:
        """Return the replies that have arrived, or None when the template is gone."""
        found: list[ForkReply] = []
        while True:
            try:
                data = self._channel.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return found
            except OSError:
                return None
            if not data:
                return found or None
            found.append(msgspec.json.decode(data, type=ForkReply))

    def release(self, rank: int, *, run: bool = True) -> None:
        """Open the gate of a started rank, which the agent watches now; without ``run``, drop it."""
        gate = self._gates.pop(rank, None)
        if gate is None:
            return
        if run:
            with contextlib.suppress(BrokenPipeError):  # it was killed at the gate
                os.write(gate, b"g")
        os.close(gate)

    def close(self) -> None:
        """End the template; ranks that run are left alone. Reaps it."""
        for rank in list(self._gates):
            self.release(rank, run=False)
        self._channel.close()
        self.handle.signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.handle.pid, 0)
        self.handle.close()


# -- inside the template process ---------------------------------------------------------------------------------------


def _template_process(channel: socket.socket, parent: int, rank_main: RankMain | None) -> NoReturn:
    """Serve until the agent closes the socket or dies. Never returns into the frames of the agent."""
    code = 1
    try:
        # Ctrl-C goes to the whole foreground group: it is the agent's to answer, also for us.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if die_with_parent(parent):
            set_name("zbus:template")
            _serve(channel, rank_main)
        code = 0
    except BaseException:  # noqa: BLE001  # nothing may unwind into the agent's frames
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(channel: socket.socket, rank_main: RankMain | None) -> None:
    gc.disable()  # what is imported stays
    if rank_main is None:
        _import_all(_BASE_MODULES)
        _prepare()
    spare = _import_spare(channel, 0.0)
    first, _ = _receive(channel)
    if first is None:
        return
    set_name(f"zbus:{first['role']}")
    os.environ.update(first["env"])
    os.environ.update(thread_defaults(os.environ))
    _extend_path(first["sys_path"])
    warnings = _import_all(first["preload"])
    if threading.active_count() > 1:
        names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        channel.send(msgspec.json.encode(ForkReply(ready=True, error=f"preload started threads {', '.join(names)}")))
        return
    # What is imported now is shared by all ranks; without this the first collection would touch every page. There
    # is none here: a launch would wait for it.
    gc.freeze()
    gc.enable()
    channel.send(msgspec.json.encode(ForkReply(ready=True, warnings=warnings)))
    while True:
        spare = spare or _import_spare(channel, _IDLE_S)
        request, fds = _receive(channel)
        if request is None:
            return
        spec = msgspec.convert(request["spec"], RankSpec)
        channel.send(msgspec.json.encode(_fork_rank(channel, spec, request["env"], fds, rank_main)))


def _import_spare(channel: socket.socket, wait_s: float) -> bool:
    """Import what only some engines need, unless the agent has something to do within ``wait_s``; tell if that was so.

    A rank that needs it earlier imports it itself.
    """
    awaited = select.poll()
    awaited.register(channel, select.POLLIN)
    if awaited.poll(wait_s * 1e3):
        return False
    _import_all(_SPARE_MODULES)
    gc.freeze()
    return True


def _receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    room = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
    data, ancillary, _, _ = channel.recvmsg(_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return (msgspec.json.decode(data) if data else None), list(fds)


def _import_all(modules: Sequence[str]) -> list[str]:
    """Import modules; return a line for each that could not be. The rank that needs it will say so in full."""
    failed = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  # a user's module may raise anything
            failed.append(f"cannot preload {module}: {type(error).__name__}: {error}")
    return failed


def _prepare() -> None:
    from zbus.runtime.host import prepare

    prepare()


def _extend_path(entries: Sequence[str]) -> None:
    sys.path[:0] = [entry for entry in entries if entry not in sys.path]


def _fork_rank(
    channel: socket.socket, spec: RankSpec, env: Mapping[str, str], fds: Sequence[int], rank_main: RankMain | None
) -> ForkReply:
    """Fork twice; the middle process tells the pid of the rank and ends, which makes the rank the agent's child."""
    told, tell = os.pipe()
    try:
        middle = os.fork()
        if middle == 0:
            os.close(told)
            channel.close()
            _middle_process(tell, lambda: _rank_process(spec, env, fds, rank_main))
        os.close(tell)
        tell = -1
        os.waitpid(middle, 0)
        text = os.read(told, 32)
    except OSError as error:
        return ForkReply(rank=spec.rank, error=f"fork: {error.strerror}")
    finally:
        for fd in (told, tell, *fds):
            if fd >= 0:
                os.close(fd)
    if not text:
        return ForkReply(rank=spec.rank, error="fork failed: the limit of processes or memory is reached")
    return ForkReply(rank=spec.rank, pid=int(text))


def _middle_process(tell: int, rank_process: Callable[[], NoReturn]) -> NoReturn:
    try:
        rank = os.fork()
        if rank == 0:
            os.close(tell)
            rank_process()
        os.write(tell, str(rank).encode())
    finally:
        os._exit(0)  # without a word on the pipe, the fork failed


# -- inside a rank -----------------------------------------------------------------------------------------------------


def _rank_process(spec: RankSpec, env: Mapping[str, str], fds: Sequence[int], rank_main: RankMain | None) -> NoReturn:
    """Become the rank. Ends by ``os._exit`` after what an interpreter does at its end."""
    code = 70
    try:
        log_fd, gate, *passed = fds
        os.setsid()
        for signum in _RESET:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        _take_log(log_fd)
        for fd in passed:
            os.set_inheritable(fd, False)  # noqa: FBT003  # its only parameter
        opened = os.read(gate, 1)
        os.close(gate)
        if not opened:  # the agent died or gave this start up
            os._exit(70)
        os.environ.update(env)
        code = _run(with_fds(spec, passed), rank_main)
    except BaseException:  # noqa: BLE001  # nothing may unwind into the frames of the template
        traceback.print_exc()
        code = 1
    finally:
        _leave(code)


def _take_log(log_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)


def _run(spec: RankSpec, rank_main: RankMain | None) -> int:
    gc.unfreeze()
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # ranks forked from one template would draw the same numbers
    if rank_main is None:
        from workers.worker import main

        rank_main = main
    try:
        return rank_main(spec)
    except SystemExit as stop:
        return exit_code_of(stop)


def exit_code_of(stop: SystemExit) -> int:
    """Return the exit code an interpreter would give for ``stop``; a message is printed to stderr."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)  # noqa: T201  # what the interpreter itself does
    return 1


def _leave(code: int) -> NoReturn:
    """End as an interpreter does: wait for plain threads, run exit handlers, flush; then no other frame runs."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # as multiprocessing does after a fork
        atexit._run_exitfuncs()  # noqa: SLF001  # as above
    except BaseException:  # noqa: BLE001  # the exit code stands
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)
