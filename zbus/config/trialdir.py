"""The trial directory: every path of one run, its creation and its lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from zbus import names
from zbus.errors import ConfigError, TrialError

__all__ = ["DEFAULT_ROOT", "TrialDir", "new_trial_name", "sync_to_disk", "write_atomically"]

DEFAULT_ROOT: Final = "zbus-runs"
_SUBDIRS: Final = ("registry", "keys", "logs", "traces", "crash", "stacks", "journal", "checkpoints")
_PRIVATE: Final = 0o700
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"


def new_trial_name(wall_ns: int | None = None) -> str:
    """Return ``20261130-0912-k3f``: local time and a random suffix.

    Args:
        wall_ns: Nanoseconds since the Unix epoch; now if None.
    """
    seconds = (time.time_ns() if wall_ns is None else wall_ns) / 1e9
    import secrets  # brings all of OpenSSL along: only who names a trial needs it

    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))
    return f"{stamp}-{''.join(secrets.choice(_ALPHABET) for _ in range(3))}"


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by a private file with ``text``; a reader sees the old or the new file, never a part.

    Raises:
        OSError: The directory cannot be written; the old file is intact.
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise


def sync_to_disk(path: Path) -> None:
    """Return when a file, or the entries of a directory, would outlive a power cut.

    Raises:
        OSError: The disk refuses.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class TrialDir:
    """Paths of one trial. Making one touches no file; ``create`` does.

    Attributes:
        path: ``<root>/<experiment>/<trial>``, absolute.
        experiment, trial: Validated names.
    """

    path: Path
    experiment: str
    trial: str
    _lock: list[int] = field(default_factory=list, repr=False, compare=False)

    # -- making one ------------------------------------------------------------------------------------------------

    @classmethod
    def at(cls, root: str | os.PathLike[str], experiment: str, trial: str) -> TrialDir:
        """Return the directory of ``experiment/trial`` under ``root`` without touching it.

        Raises:
            ConfigError: A name is not valid.
        """
        names.trial(experiment, trial)
        return cls(Path(root).resolve() / experiment / trial, experiment, trial)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TrialDir:
        """Return the existing trial directory at ``path``.

        Raises:
            TrialError: There is no trial directory at ``path``.
        """
        full = Path(path).resolve()
        if not (full / "registry").is_dir():
            msg = f"{path} is not a trial directory"
            raise TrialError(msg, hint="name <root>/<experiment>/<trial>; it holds a `registry` directory")
        return cls(full, full.parent.name, full.name)

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str] = DEFAULT_ROOT,
        experiment: str = "default",
        trial: str | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> TrialDir:
        """Make the directory (mode 0700) and take its lock.

        Args:
            root: Where all experiments live; made if missing.
            experiment: Name of the experiment.
            trial: Name of the trial; a new one (time and random suffix) if None or empty.
            resume: Go on in an existing trial: its files stay.
            overwrite: Remove an existing trial that nobody uses, then start anew.

        Raises:
            ConfigError: A name is not valid, or the place cannot be written.
            TrialError: The trial exists (and neither ``resume`` nor ``overwrite``), is in use, is a symbolic link or
                belongs to somebody else; or there is nothing to resume.
        """
        self = cls.at(root, experiment, trial or new_trial_name())
        exists = self._check_existing(resume=resume, overwrite=overwrite)
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            if not exists:
                self.path.mkdir(mode=_PRIVATE)
            self.path.chmod(_PRIVATE)
            self.lock()
            if exists and overwrite and not resume:
                self._empty()
            for name in _SUBDIRS:
                (self.path / name).mkdir(mode=_PRIVATE, exist_ok=True)
        except FileExistsError:
            raise self._exists() from None
        except OSError as error:
            self.unlock()
            raise self._unwritable(error) from error
        return self

    def _check_existing(self, *, resume: bool, overwrite: bool) -> bool:
        try:
            info = self.path.lstat()
        except FileNotFoundError:
            if resume:
                msg = f"trial {self.name} does not exist, so there is nothing to resume"
                raise TrialError(msg, facts={"looked in": str(self.path.parent)}) from None
            return False
        except OSError as error:
            raise self._unwritable(error) from error
        if not stat.S_ISDIR(info.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "not a directory"
            msg = f"{self.path} is {kind}"
            raise TrialError(msg, hint="a trial directory must be a real directory: remove it or use another --trial")
        if info.st_uid != os.geteuid():
            msg = f"trial directory {self.path} belongs to another user (uid {info.st_uid})"
            raise TrialError(msg, hint="use another --trial or --root")
        if not (resume or overwrite):
            holder = self.holder()
            raise self._in_use(holder) if holder is not None else self._exists()
        return True

    def _exists(self) -> TrialError:
        state = "is finished" if self.summary.exists() else "exists"
        return TrialError(
            f"trial {self.name} {state}",
            facts={"directory": str(self.path)},
            hint="go on in it with --resume, replace it with --overwrite, or name another with --trial",
        )

    def _in_use(self, holder: dict[str, Any]) -> TrialError:
        who = f"pid {holder['pid']} on host {holder['host']}" if holder.get("pid") else "another process"
        return TrialError(
            f"trial {self.name} is in use by a live controller",
            facts={"holder": who, "directory": str(self.path)},
            hint=f"stop it with: zbus-controller stop {self.path}",
        )

    def _unwritable(self, error: OSError) -> ConfigError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return ConfigError(
            f"trial directory {self.path} cannot be made: {reason}",
            facts={"path": str(error.filename or self.path)},
            hint="choose a directory you can write with --root or ZBUS_ROOT",
        )

    def _empty(self) -> None:
        for entry in os.scandir(self.path):
            if entry.name == self.lock_file.name:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                Path(entry.path).unlink()

    # -- lock ------------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Hold the trial until this process ends or ``unlock`` is called.

        It answers "in use?" at once on one host; across hosts the epoch's lease in the registry decides.

        Raises:
            TrialError: Another process holds it; the holder is named.
        """
        if self._lock:
            return
        fd = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _read_holder(fd)
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise self._in_use(holder) from None
            raise
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        self._lock.append(fd)

    def unlock(self) -> None:
        """Release the lock if this object holds it. Safe to repeat."""
        while self._lock:
            os.close(self._lock.pop())

    def holder(self) -> dict[str, Any] | None:
        """Return ``{"pid": …, "host": …}`` of the live process that holds the lock, or None."""
        try:
            fd = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _read_holder(fd)
        finally:
            os.close(fd)
        return None

    # -- paths -----------------------------------------------------------------------------------------------------

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """``experiment/trial``."""
        return f"{self.experiment}/{self.trial}"

    @property
    def root(self) -> Path:
        """The directory above all experiments."""
        return self.path.parent.parent

    @property
    def lock_file(self) -> Path:
        """The file whose lock says that a controller of this host uses the trial."""
        return self.path / ".lock"

    @property
    def config(self) -> Path:
        """``config.yaml``: the resolved config."""
        return self.path / "config.yaml"

    @property
    def registry(self) -> Path:
        """Root of the file registry."""
        return self.path / "registry"

    @property
    def keys(self) -> Path:
        """Key pairs of this trial."""
        return self.path / "keys"

    @property
    def logs(self) -> Path:
        """Logs of all processes."""
        return self.path / "logs"

    @property
    def controller_log(self) -> Path:
        """Log of the controller."""
        return self.logs / "controller.log"

    @property
    def traces(self) -> Path:
        """Root of the per-rank trace files."""
        return self.path / "traces"

    @property
    def crash(self) -> Path:
        """Crash reports as JSON."""
        return self.path / "crash"

    @property
    def stacks(self) -> Path:
        """Stack dumps."""
        return self.path / "stacks"

    @property
    def journal(self) -> Path:
        """Crash journals of the lanes."""
        return self.path / "journal"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the user's job."""
        return self.path / "checkpoints"

    @property
    def recover_note(self) -> Path:
        """``recover.json``: the newest dump that ``--resume`` can go on from, once there is one."""
        return self.path / "recover.json"

    @property
    def report(self) -> Path:
        """``report.html``."""
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        """``summary.json``, written when the run has ended."""
        return self.path / "summary.json"

    def log(self, role: str, rank: int, start: int = 0) -> Path:
        """Return the log of one start of one rank: ``logs/<role>/<rank>.<start>.log``."""
        return self.logs / role / f"{rank}.{start}.log"

    def agent_log(self, role: str, host: str) -> Path:
        """Return the log of the agent of ``role`` on ``host``."""
        return self.logs / "agents" / f"{role}.{host}.log"

    def trace(self, role: str, rank: int, start: int = 0) -> Path:
        """Return the trace file of one start of one rank: ``traces/<role>/traces_<rank>[.<start>].jsonl``."""
        suffix = f".{start}" if start else ""
        return self.traces / role / f"traces_{rank}{suffix}.jsonl"

    def crash_file(self, role: str, rank: int, start: int = 0) -> Path:
        """Return the crash report of one start of one rank: ``crash/<role>.<rank>.<start>.json``."""
        return self.crash / f"{role}.{rank}.{start}.json"

    def stack_file(self, role: str, rank: int, start: int = 0) -> Path:
        """Return the stack dump of one start of one rank: ``stacks/<role>.<rank>.<start>.txt``."""
        return self.stacks / f"{role}.{rank}.{start}.txt"

    def relative(self, path: str | os.PathLike[str]) -> str:
        """Return ``path`` relative to the trial directory if it lies inside, else unchanged."""
        with contextlib.suppress(ValueError):
            return str(Path(path).relative_to(self.path))
        return os.fspath(path)


def _read_holder(fd: int) -> dict[str, Any]:
    """Return what the holder wrote into the lock file; empty where it has not yet."""
    try:
        found = json.loads(os.pread(fd, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
