"""The registry as files: one file per record, below one private directory that all hosts of a trial share.

``<root>/<area>/<name>`` holds one record (see ``format``). Promises R1 to R9 and how they are kept:

- *whole or none*: written to a temporary name, synced, then renamed; a checksum tells a torn file;
- *one winner*: a finished temporary file is ``link``-ed to the claimed name, and the claim is judged by what then
  stands there, never by the return code (a resent NFS request may report failure after success);
- *never missing*: a listing ignores temporary names, looks again when the directory changed under it, and checks
  names that vanished since its last look by opening them;
- *nothing foreign breaks it*: what is not a record is named in ``Listing.junk``;
- *deletes only what was named*: the file is moved aside first, judged, and moved back if it was another.

A root that is deleted under running processes is made again by the next write, and each process puts the records it
wrote back. Temporary files of dead processes are swept by listings.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from zbus import names
from zbus.clock import SYSTEM_CLOCK, Clock
from zbus.errors import ConfigError, RegistryError
from zbus.registry.base import (
    ROOT_ID_KEY,
    JunkRecord,
    Listing,
    area_of,
    check_value,
    registry_error,
    split_key,
)
from zbus.registry.format import MAX_FILE_BYTES, NotARecord, pack, unpack
from zbus.registry.fs import FS, Area, LocalFS
from zbus.registry.tempfiles import TempNames, is_temp

__all__ = ["FileRegistry"]

_T = TypeVar("_T")
_log: Final = logging.getLogger("zbus")

_ATTEMPTS: Final = 15
"""With the pauses between them about 4.5 s: longer than NFS clients remember a name as absent (2 s were measured)."""
_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 1.0
_STALE: Final = frozenset({errno.ESTALE, errno.EINTR})
"""Errors that looking the path up anew may cure."""
_PASSING: Final = _STALE | {errno.ENOENT}
"""Errors of a write that a fresh attempt may cure: a directory made or removed by another, a stale handle."""
_OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing about the file: hiding a record for them would be a lie."""
_LOOKS: Final = 3


class FileRegistry:
    """A registry in a directory. Every method may be called from any thread; it holds no descriptor between calls.

    Args:
        root: The directory (``TrialDir.registry``); made with mode 0700 if it is missing.
        create: Make the root if missing. A reader passes False and gets ``RegistryError`` instead.
        fs: File operations; None means the real ones.
        clock: For the age of foreign temporary files.
        sleep: Waits between attempts, in seconds.

    Raises:
        RegistryError: The root cannot be made, belongs to someone else, or is open to other users.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        create: bool = True,
        fs: FS | None = None,
        clock: Clock = SYSTEM_CLOCK,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._fs: FS = fs if fs is not None else LocalFS(root)
        self._sleep = sleep
        self._temps = TempNames(clock)
        self._closed = False
        self._lock = threading.Lock()
        self._heal_lock = threading.Lock()
        self._owner_pid = os.getpid()
        self._own: dict[str, bytes] = {}
        self._seen: dict[str, frozenset[str]] = {}
        self._root_id: bytes | None = None
        if create:
            self._guard("create", "(root)", lambda: self._fresh(lambda: self._fs.make_root(parents=True)))
        elif not self._fs.root.is_dir():
            msg = f"there is no registry at {self._fs.root}"
            raise RegistryError(msg, hint="check the trial name and that this host mounts the same root")

    # -- the Registry protocol -----------------------------------------------------------------------------------

    def claim(self, key: str, value: bytes) -> bytes:
        """Store ``value`` unless the key is taken; return the value that stands."""
        self._check(key, value)
        self._heal()
        standing = self._claim(key, value)
        if standing == value:
            self._remember(key, value)
        return standing

    def put(self, key: str, value: bytes, *, durable: bool = True) -> None:
        """Store or replace the whole record."""
        area, name = self._check(key, value)
        self._heal()

        def step(directory: Area) -> None:
            self._replace(directory, name, value, durable=durable)

        self._write("write", key, area, step)
        self._remember(key, value)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None where there is none (yet)."""
        area, name = self._check(key)

        def step(directory: Area) -> bytes | None:
            return self._read(directory, name, absent_is_proof=False)

        return self._look("read", key, area, step, None)

    def list(self, prefix: str) -> Listing:
        """Return all records of one area."""
        area = area_of(prefix)
        self._check_open()

        def step(directory: Area) -> Listing:
            return self._list(area, directory)

        try:
            return self._look("list", area, area, step, Listing())
        except RegistryError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOTDIR, errno.ELOOP):
                return Listing(junk=(f"{area}: not a directory",))
            raise

    def delete(self, key: str, expected: bytes | None = None) -> bool:
        """Remove a record; with ``expected``, only while that value stands."""
        area, name = self._check(key)

        def step(directory: Area) -> bool:
            return self._delete(directory, name, expected)

        with self._lock:
            if expected is None or self._own.get(key) == expected:
                self._own.pop(key, None)
        return self._look("delete", key, area, step, absent=False)

    def close(self) -> None:
        """Refuse further calls; records stay."""
        self._closed = True

    # -- one attempt each ----------------------------------------------------------------------------------------

    def _claim(self, key: str, value: bytes) -> bytes:
        area, name = split_key(key)

        def step(directory: Area) -> bytes:
            standing = self._read(directory, name)
            return self._link(directory, name, value) if standing is None else standing

        return self._write("claim", key, area, step)

    def _link(self, directory: Area, name: str, value: bytes) -> bytes:
        """Try to give a finished file the claimed name, then say what stands there."""
        temp = self._write_temp(directory, value, durable=True)
        try:
            failure: OSError | None = None
            try:
                directory.link(temp, name)
            except OSError as error:
                failure = error
            # judged by what stands, whatever link() said: a resent request reports EEXIST after its own success
            standing = self._read(directory, name, absent_is_proof=False)
            if standing is None:
                if directory.links(temp) > 1:
                    standing = value  # linked, and this host still remembers the name as absent
                elif failure is None or failure.errno == errno.EEXIST:
                    raise FileNotFoundError(errno.ENOENT, "claimed and deleted meanwhile, or not visible yet")
                else:
                    raise failure
            if standing == value:
                directory.sync()
            return standing
        finally:
            self._discard(directory, temp)

    def _replace(self, directory: Area, name: str, value: bytes, *, durable: bool) -> None:
        temp = self._write_temp(directory, value, durable=durable)
        try:
            directory.rename(temp, name)
        except FileNotFoundError:
            if not self._stands(directory, name, value):  # else a resent rename reported failure after success
                raise
        except BaseException:
            self._discard(directory, temp)
            raise
        if durable:
            directory.sync()

    def _delete(self, directory: Area, name: str, expected: bytes | None) -> bool:
        if expected is None:
            directory.unlink(name)
            directory.sync()
            return True
        try:
            if self._read(directory, name) != expected:
                return False
        except NotARecord:
            return False
        aside = self._temps.new()
        try:
            directory.rename(name, aside)
        except FileNotFoundError:
            if aside not in directory.names():  # else a resent rename reported failure after success
                return False
        gone = False
        try:
            gone = self._read(directory, aside) == expected
        except NotARecord:
            gone = False
        finally:
            if not gone:  # replaced between the look and the move
                self._give_back(directory, aside, name)
            self._discard(directory, aside)
        try:
            directory.sync()
        except OSError as error:
            if error.errno != errno.ESTALE:  # the whole directory went, and the record with it
                raise
        return gone

    def _give_back(self, directory: Area, aside: str, name: str) -> None:
        """Give a record that was moved aside its name back, unless a newer one took it."""
        try:
            directory.link(aside, name)
        except FileExistsError:
            return
        except OSError:
            directory.rename(aside, name)  # better an older record over a newer than none at all

    def _write_temp(self, directory: Area, value: bytes, *, durable: bool) -> str:
        while True:
            temp = self._temps.new()
            try:
                handle = directory.create_excl(temp)
                break
            except FileExistsError:
                continue
        try:
            try:
                directory.write(handle, pack(value))
                if durable:
                    directory.fsync(handle)
            finally:
                directory.close_file(handle)
        except BaseException:
            self._discard(directory, temp)
            raise
        return temp

    def _discard(self, directory: Area, temp: str) -> None:
        """Remove a temporary file; a failure only leaves work for a later sweep."""
        try:
            directory.unlink(temp)
        except OSError:
            return

    def _stands(self, directory: Area, name: str, value: bytes) -> bool:
        try:
            return self._read(directory, name) == value
        except (OSError, NotARecord):
            return False

    def _read(self, directory: Area, name: str, *, absent_is_proof: bool = True) -> bytes | None:
        """Return a record's value, None if absent; raise ``NotARecord`` for junk.

        Unless absence is proof enough, "not found" is checked against the directory's names: a client may remember a
        name as absent for seconds after it was created elsewhere (R6).
        """
        pause_s = _FIRST_PAUSE_S
        for attempt in itertools.count(1):
            try:
                return unpack(*directory.read(name, MAX_FILE_BYTES))
            except FileNotFoundError:
                if absent_is_proof or attempt >= _ATTEMPTS or name not in directory.names():
                    return None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EMLINK):
                    msg = "a symbolic link"
                    raise NotARecord(msg) from error
                if error.errno in (errno.ENXIO, errno.EISDIR):
                    msg = "not a regular file"
                    raise NotARecord(msg) from error
                if error.errno != errno.ESTALE or attempt >= _LOOKS:
                    raise
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None  # pragma: no cover  # the loop above has no end

    def _list(self, area: str, directory: Area) -> Listing:
        found = self._names(directory)
        with self._lock:
            before = self._seen.get(area, frozenset())
        entries: dict[str, bytes] = {}
        junk: list[str] = []
        # a name that was there at the last look and is not in this one may have been passed over while it was replaced
        for name in sorted(found | before):
            if is_temp(name):
                if self._temps.dead(area, name):
                    self._discard(directory, name)
                continue
            key = f"{area}/{name}"
            try:
                names.check(name)
                value = self._read(directory, name)
            except ConfigError:
                junk.append(f"{area}/{_printable(name)}: not a valid name")
            except NotARecord as error:
                junk.append(f"{key}: {error}")
            except OSError as error:
                if error.errno in _OURS:
                    raise
                junk.append(f"{key}: {os.strerror(error.errno or 0)}")
            else:
                if value is not None:
                    entries[key] = value
        self._temps.keep(area, found)
        with self._lock:
            self._seen[area] = frozenset(key.partition("/")[2] for key in entries)
        return Listing(entries, tuple(junk))

    def _names(self, directory: Area) -> set[str]:
        """Return the names, looking again while the directory changes: one pass over a big one is not atomic."""
        found: set[str] = set()
        for _ in range(_LOOKS):
            version = directory.version()
            found.update(directory.names())
            if directory.version() == version:
                break
        return found

    # -- attempts, errors, healing -------------------------------------------------------------------------------

    def _write(self, action: str, key: str, area: str, step: Callable[[Area], _T]) -> _T:
        """Run a step in its open area, making directories and trying again as long as that may help (B21)."""

        def attempts() -> _T:
            pause_s = _FIRST_PAUSE_S
            for attempt in itertools.count(1):
                try:
                    with self._fs.open(area) as directory:
                        return step(directory)
                except OSError as error:
                    if error.errno not in _PASSING or attempt >= _ATTEMPTS:
                        raise
                self._fresh(lambda: self._make(area))
                if attempt > 1:
                    self._sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            raise AssertionError  # pragma: no cover  # the loop above has no end

        return self._guard(action, key, attempts)

    def _look(self, action: str, key: str, area: str, step: Callable[[Area], _T], absent: _T) -> _T:
        """Run a step that makes nothing: whatever is missing gives ``absent``, a stale handle is opened again."""

        def attempt() -> _T:
            try:
                with self._fs.open(area) as directory:
                    return step(directory)
            except FileNotFoundError:
                return absent

        return self._guard(action, key, lambda: self._fresh(attempt))

    def _fresh(self, step: Callable[[], _T]) -> _T:
        """Run a step, and again with fresh handles while they are stale; bounded."""
        for attempt in itertools.count(1):
            try:
                return step()
            except OSError as error:
                if error.errno not in _STALE or attempt >= _ATTEMPTS:
                    raise
            self._sleep(_FIRST_PAUSE_S)
        raise AssertionError  # pragma: no cover  # the loop above has no end

    def _make(self, area: str) -> None:
        try:
            self._fs.make_area(area)
        except FileNotFoundError:
            # only the root itself: if the trial directory is gone too, the mount may be, and a new tree would hide that
            if self._fs.make_root():
                _log.warning("registry directory %s had been deleted; made it again", self._fs.root)
            self._fs.make_area(area)

    def _guard(self, action: str, key: str, step: Callable[[], _T]) -> _T:
        try:
            return step()
        except NotARecord as error:
            msg = f"registry key {key} holds something that is not a record: {error}"
            where = str(self._fs.root / key)
            raise JunkRecord(msg, hint=f"look at {where} and remove it", facts={"file": where}) from error
        except OSError as error:
            raise registry_error(action, key, str(self._fs.root / key), error) from error

    def _check(self, key: str, value: bytes = b"") -> tuple[str, str]:
        parts = split_key(key)
        self._check_open()
        check_value(key, value)
        return parts

    def _check_open(self) -> None:
        if self._closed:
            msg = f"the registry at {self._fs.root} is closed"
            raise RegistryError(msg)

    def _remember(self, key: str, value: bytes) -> None:
        with self._lock:
            self._own[key] = value

    def _heal(self) -> None:
        """Notice before each write that the root was deleted and made again; put this process's records back."""
        if self._owner_pid != os.getpid():  # forked: the records are the parent's to keep
            with self._lock:
                self._owner_pid = os.getpid()
                self._own = {}
        with self._heal_lock:
            try:
                root_id = self._claim_root_id()
                if self._root_id not in (None, root_id):
                    self._put_back()
                self._root_id = root_id
            except RegistryError:
                return  # tried again before the next write; the write at hand speaks for itself

    def _claim_root_id(self) -> bytes:
        standing = self.get(ROOT_ID_KEY)
        return standing if standing is not None else self._claim(ROOT_ID_KEY, os.urandom(16).hex().encode())

    def _put_back(self) -> None:
        with self._lock:
            own = dict(self._own)
        _log.warning("registry %s is a new directory; putting %d records back", self._fs.root, len(own))
        for key, value in own.items():
            self._claim(key, value)


def _printable(name: str) -> str:
    return ascii(name)[1:-1]
