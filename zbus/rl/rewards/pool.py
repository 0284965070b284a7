"""A pool of processes that call reward functions, and the one thread that owns them.

Calls that wait are handed to a process many at a time, so that a cheap reward costs little more than a call of it.
The processes are started by exec (their owner has threads), by a thread that lives as long as the pool: the kernel
ties their life to that thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from zbus.codec import Buffer, decode, encode, rebuild_exception
from zbus.errors import ConfigError, RewardError
from zbus.rl.rewards.wire import pack_frames, read_records, receive, send, unpack_frames
from zbus.runtime.processes import describe_exit

__all__ = ["RewardPool"]

_COMMAND: Final = (sys.executable, "-P", "-m", "zbus.rl.rewards.process")
_MOST_CHUNK: Final = 256
_CHUNK_S: Final = 0.05
"""So long a chunk may take, by what calls took lately; a single call may take longer."""
_LOOK_NS: Final = 2_000_000
_LOOK_MOST_NS: Final = 50_000_000
"""A process tells of the end of a chunk, and before that at its own pace: while it is in a call with others before and
behind it, results that stand already are looked for, first after the one time, then ever later, up to the other."""
_SEND_S: Final = 10.0
_SHOWN: Final = 80

Waiter = concurrent.futures.Future[Any] | asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Call:
    name: str
    args: tuple[Any, ...]
    piece: bytes
    timeout_s: float
    waiter: Waiter


@dataclass(slots=True, eq=False)
class _Process:
    popen: subprocess.Popen[bytes]
    pidfd: int
    socket: socket.socket
    results: int
    deadline_ns: int  # for being ready, then for the call it is at
    ready: bool = False
    calls: deque[_Call] = field(default_factory=deque)  # of its chunk, those that have no result
    read: int = 0
    since_ns: int = 0  # when the call that it is at began
    look_ns: int = 0
    pause_ns: int = _LOOK_NS


class RewardPool:
    """Calls reward functions by name in processes of their own. All methods may be called from any thread.

    A reward is a plain function of data that the codec carries, and returns such data. It must not matter how often it
    is called: one that was cut off because the process had to be killed for another is called again.

    Args:
        rewards: By name: ``"file.py:function"``, ``"package.module:function"``, or a function of a module.
        processes: Most processes.
        timeout_s: How long one call may take, in seconds; its process is then killed, and another takes its place.
        start_timeout_s: How long a process may take to import the functions.
        name: Whose pool it is, for messages.

    Raises:
        ConfigError: A reward is no plain function of a module, or a number cannot be.
    """

    def __init__(
        self,
        rewards: Mapping[str, Any],
        *,
        processes: int = 1,
        timeout_s: float = 10.0,
        start_timeout_s: float = 60.0,
        name: str = "rewards",
    ) -> None:
        if processes < 1 or not timeout_s > 0:
            msg = f"{name}: {processes} processes with a timeout of {timeout_s} s call nothing"
            raise ConfigError(msg, hint="at least one process, and a timeout above 0")
        self._paths = {key: _path_of(key, reward) for key, reward in rewards.items()}
        self._numbers = {key: number for number, key in enumerate(self._paths)}
        self._most = processes
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._name = name
        self._lock = threading.Lock()
        self._queue: deque[_Call] = deque()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._closing = False
        self._processes: list[_Process] = []  # of the thread, as all below
        self._mean_s = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="zbus-rewards", daemon=True)
        self._thread.start()

    # -- calls -------------------------------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Wait until the first process has imported all functions.

        Raises:
            RewardError: It did not within ``start_timeout_s``, or died.
            EngineLoadError: A function cannot be imported (as ``RemoteError``).
        """
        self._started.result()

    def call(self, name: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a reward and wait for what it returns.

        Raises:
            ConfigError: No reward has this name.
            CodecError: An argument cannot be carried.
            RewardError: It hung or its process died.
            RemoteError: It raised; also an instance of the class that it raised.
        """
        return self.map(name, [args], timeout_s=timeout_s)[0]

    def map(self, name: str, items: Iterable[tuple[Any, ...]], *, timeout_s: float | None = None) -> list[Any]:
        """Call a reward once for each tuple of arguments; return the results in their order.

        Raises:
            ConfigError, CodecError, RewardError, RemoteError: As ``call``, for the first item that failed; the others
                have been called all the same.
        """
        given = [*items]
        waiters: list[concurrent.futures.Future[Any]] = [concurrent.futures.Future() for _ in given]
        self._submit([self._call(name, args, timeout_s, to) for args, to in zip(given, waiters, strict=True)])
        concurrent.futures.wait(waiters)
        return [waiter.result() for waiter in waiters]

    async def acall(self, name: str, *args: Any, timeout_s: float | None = None) -> Any:
        """As ``call``, on an event loop. When cancelled, a call that still waits is not made."""
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._submit([self._call(name, args, timeout_s, waiter)])
        return await waiter

    def _call(self, name: str, args: tuple[Any, ...], timeout_s: float | None, waiter: Waiter) -> _Call:
        number = self._numbers.get(name)
        if number is None:
            msg = f"{self._name} has no reward {name!r}; it has {', '.join(map(repr, self._numbers)) or 'none'}"
            raise ConfigError(msg, hint=f'declare it: rewards={{"{name}": "file.py:function"}}')
        piece = pack_frames(encode([number, args]))
        return _Call(name, args, piece, self._timeout_s if timeout_s is None else timeout_s, waiter)

    def _submit(self, calls: Sequence[_Call]) -> None:
        with self._lock:
            if self._closing:
                why = "was not called: the pool is closed"
                raise self._error(why, calls[0] if calls else None)
            self._queue.extend(calls)
            os.eventfd_write(self._wake, 1)  # under the lock: after `close` its number may be another file's

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes; calls that are not done fail. Again is harmless."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._begin()
            while not self._closing:
                self._hand_out()
                self._wait()
                for process in [*self._processes]:
                    self._look_after(process)
        except BaseException as error:
            self._end_all(f"was given up: {type(error).__name__}: {error}")
            raise
        self._end_all("was given up: the pool was closed")

    def _begin(self) -> None:
        """Start one process more."""
        try:
            process = self._started_process()
        except OSError as error:  # no memory, process or descriptor is left just now: the next call tries again
            if not self._processes:
                self._fail_waiting(self._error(f"no process could be started: {error}", None))
            return
        ours = process.socket
        self._processes.append(process)
        with contextlib.suppress(OSError):  # it is gone already, which is seen at once
            send(ours, [pack_frames(encode({"sys_path": sys.path, "rewards": self._paths}))])

    def _started_process(self) -> _Process:
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                results = os.memfd_create("zbus-rewards")
                undo.callback(os.close, results)
                popen = subprocess.Popen(
                    [*_COMMAND, str(os.getpid()), str(theirs.fileno()), str(results)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), results),
                    start_new_session=True,
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                )
            undo.callback(popen.wait)
            undo.callback(popen.kill)
            pidfd = os.pidfd_open(popen.pid)
            undo.pop_all()
        ours.settimeout(_SEND_S)
        return _Process(popen, pidfd, ours, results, _after(self._start_timeout_s))

    def _fail_waiting(self, error: Exception) -> None:
        """Tell those who wait, and who waits for the start, that there is no process."""
        if not self._started.done():
            self._started.set_exception(error)
        with self._lock:
            left, self._queue = self._queue, deque()
        _settle([(call.waiter, None, error) for call in left])

    def _hand_out(self) -> None:
        """Give calls that wait to processes that are free, and start a process where all are busy."""
        for process in self._processes:
            if process.ready and not process.calls:
                self._give(process)
        with self._lock:
            waiting = bool(self._queue)
        coming = any(not process.ready for process in self._processes)
        if waiting and not coming and len(self._processes) < self._most:
            self._begin()

    def _give(self, process: _Process) -> None:
        chunk: list[_Call] = []
        with self._lock:
            share = -(-len(self._queue) // self._most)
            quick = max(1, int(_CHUNK_S / self._mean_s)) if self._mean_s else _MOST_CHUNK
            while self._queue and len(chunk) < min(share, quick, _MOST_CHUNK):
                call = self._queue.popleft()
                if not call.waiter.cancelled():
                    chunk.append(call)
        if not chunk:
            return
        process.calls.extend(chunk)
        process.read = 0
        process.since_ns = time.monotonic_ns()
        process.deadline_ns = process.since_ns + round(chunk[0].timeout_s * 1e9)
        process.pause_ns = _LOOK_NS
        process.look_ns = process.since_ns + _LOOK_NS
        os.ftruncate(process.results, 0)
        with contextlib.suppress(OSError):  # it is gone, which is seen at once
            send(process.socket, [call.piece for call in chunk])

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        deadline = None
        for process in self._processes:
            poller.register(process.pidfd, select.POLLIN)
            poller.register(process.socket, select.POLLIN)
            if process.calls or not process.ready:
                deadline = min(deadline or process.deadline_ns, process.deadline_ns)
            if len(process.calls) > 1:
                deadline = min(deadline or process.look_ns, process.look_ns)
        left_ms = None if deadline is None else max(0, -(-(deadline - time.monotonic_ns()) // 1_000_000))
        poller.poll(left_ms)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _look_after(self, process: _Process) -> None:
        if not process.ready:
            self._await_ready(process)
            return
        dead = _readable(process.pidfd)
        self._collect(process)
        if dead:
            self._bury(process, hung=None)
        elif process.calls and time.monotonic_ns() >= process.deadline_ns:
            self._bury(process, hung=process.calls[0])

    def _await_ready(self, process: _Process) -> None:
        told: bytearray | None = None
        if _readable(process.socket.fileno()):
            with contextlib.suppress(OSError):  # killed before it read: a reset, where an end would be told otherwise
                told = receive(process.socket)
            if told is not None and not told:
                process.ready = True
                if not self._started.done():
                    self._started.set_result(None)
                return
        elif time.monotonic_ns() < process.deadline_ns and not _readable(process.pidfd):
            return
        late = not told and not _readable(process.pidfd) and time.monotonic_ns() >= process.deadline_ns
        self._end(process)
        error: Exception
        if told:
            error = self._rebuilt("import", unpack_frames(memoryview(told))[0], process)
        else:
            how = f"had not imported the rewards after {self._start_timeout_s:g} s" if late else _exit_of(process)
            error = self._error(f"its process {how}", None)
        self._fail_waiting(error)

    def _collect(self, process: _Process) -> None:
        """Take the results that stand in the file, and hand them to who waits."""
        with contextlib.suppress(OSError):  # it is gone; the file is not
            while _readable(process.socket.fileno()) and process.socket.recv(4096):
                pass
        done: list[_Settled] = []
        for record, end in read_records(process.results, process.read):
            call = process.calls.popleft()
            process.read = end
            took_s = (record.ended_ns - process.since_ns) / 1e9
            self._mean_s = 0.9 * self._mean_s + 0.1 * took_s if self._mean_s else took_s
            process.since_ns = record.ended_ns
            if process.calls:
                process.deadline_ns = record.ended_ns + round(process.calls[0].timeout_s * 1e9)
            if record.returned:
                done.append((call.waiter, decode(record.frames), None))
            else:
                done.append((call.waiter, None, self._rebuilt(call.name, record.frames, process)))
        process.pause_ns = _LOOK_NS if done else min(2 * process.pause_ns, _LOOK_MOST_NS)
        process.look_ns = time.monotonic_ns() + process.pause_ns
        _settle(done)

    def _bury(self, process: _Process, *, hung: _Call | None) -> None:
        """See to the calls of a process that is gone or has to go: one was being made, the others go to another one."""
        _kill(process)
        self._collect(process)
        self._drop(process)
        calls = process.calls
        made = hung is not None and (not calls or calls[0] is not hung)  # it did return after all: nobody is to blame
        guilty = calls.popleft() if calls and not made else None
        with self._lock:
            self._queue.extendleft(reversed(calls))
        if guilty is not None:
            slow, died = f"took longer than {guilty.timeout_s:g} s", f"did not return: its process {_exit_of(process)}"
            _settle([(guilty.waiter, None, self._error(slow if hung else died, guilty, hung=hung is not None))])

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end(self, process: _Process) -> None:
        _kill(process)
        self._drop(process)

    def _drop(self, process: _Process) -> None:
        self._processes.remove(process)
        process.socket.close()
        os.close(process.pidfd)
        os.close(process.results)

    def _end_all(self, why: str) -> None:
        """End the processes, and tell everybody who waits why there is no result."""
        with self._lock:
            self._closing = True
            left = [*self._queue]
            self._queue.clear()
        for process in [*self._processes]:
            left += process.calls
            self._end(process)
        _settle([(call.waiter, None, self._error(why, call)) for call in left])
        if not self._started.done():
            self._started.set_exception(self._error(why, None))

    def _error(self, how: str, call: _Call | None, *, hung: bool = False) -> RewardError:
        if call is None:
            return RewardError(f"{self._name}: rewards cannot be called: {how}")
        hint = "bound the work of the function, or give it more time (timeout_s)" if hung else None
        item = repr(call.args)
        item = item if len(item) <= _SHOWN else f"{item[:_SHOWN]}…"
        msg = f"{self._name}: reward {call.name!r} {how}; called with {item}"
        return RewardError(msg, reward=call.name, item=item, hung=hung, hint=hint)

    def _rebuilt(self, name: str, frames: Sequence[Buffer], process: _Process) -> Exception:
        role, _, rank = self._name.partition("/")
        return rebuild_exception(
            decode(frames),
            role=role,
            rank=int(rank) if rank.isdecimal() else None,
            host=None,
            pid=process.popen.pid,
            method=f"reward {name!r}",
        )


_Settled = tuple[Waiter, Any, Exception | None]


def _settle(settled: Iterable[_Settled]) -> None:
    """Hand results and errors to who waits: each event loop is woken once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Settled]] = {}
    for waiter, value, error in settled:
        if isinstance(waiter, asyncio.Future):
            by_loop.setdefault(waiter.get_loop(), []).append((waiter, value, error))
        else:
            _set(waiter, value, error)
    for loop, group in by_loop.items():
        with contextlib.suppress(RuntimeError):  # it is closed: nobody waits there any more
            loop.call_soon_threadsafe(_set_all, group)


def _set_all(settled: Iterable[_Settled]) -> None:
    for waiter, value, error in settled:
        _set(waiter, value, error)


def _set(waiter: Waiter, value: Any, error: Exception | None) -> None:
    if waiter.done():
        return
    if error is None:
        waiter.set_result(value)
    else:
        waiter.set_exception(error)


def _kill(process: _Process) -> None:
    """Kill a process and what it has started, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.popen.pid, signal.SIGKILL)
    process.popen.wait()


def _readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _after(seconds: float) -> int:
    return time.monotonic_ns() + round(seconds * 1e9)


def _exit_of(process: _Process) -> str:
    code = process.popen.returncode
    return describe_exit(code if code >= 0 else None, -code if code < 0 else None)


def _path_of(name: str, reward: Any) -> str:
    """Return where a reward can be imported from.

    Raises:
        ConfigError: It cannot be.
    """
    if isinstance(reward, str):
        return reward
    if inspect.isfunction(reward) and not inspect.iscoroutinefunction(reward) and reward.__qualname__.isidentifier():
        file = inspect.getsourcefile(reward)
        if file is not None:
            return f"{Path(file).resolve()}:{reward.__qualname__}"
    msg = f"reward {name!r} is {reward!r}, not a plain function of a module"
    raise ConfigError(msg, hint='give "file.py:function", or a function that is defined with def at the top of a file')
