"""Numbered dumps on disk: each a directory that is whole or not there, whenever its writer is killed.

::

    <directory>/00000040/          the dump of step 40: whatever was put there, and manifest.json
    <directory>/00000040.1/        step 40 was dumped a second time (a resumed run took it again)
    <directory>/.new-…             being written; what a killed writer leaves goes with the next dump
    <directory>/.old-…             being removed
    <directory>/broken-00000050/   set aside: it was broken, and the run went on from an older one
    <note>                         the newest dump that was ever finished, so that one that vanished is missed

Reading changes nothing on disk. One process writes at a time: the one that holds the trial's lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from zbus.config import sync_to_disk, write_atomically
from zbus.errors import RecoverError

__all__ = ["MANIFEST", "SCHEMA", "Dumps", "Name"]

SCHEMA: Final = "zbus.dump/1"
MANIFEST: Final = "manifest.json"

_NAME: Final = re.compile(r"(\d{8,})(?:\.(\d+))?")
_PRIVATE: Final = 0o700


class Name(NamedTuple):
    """What a dump is called; later ones compare greater."""

    step: int
    again: int = 0

    def __str__(self) -> str:
        return f"{self.step:08d}.{self.again}" if self.again else f"{self.step:08d}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """Return the name that ``text`` writes, or None."""
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), int(match[2] or 0)) if match else None


class Dumps:
    """The dumps of one trial.

    Args:
        directory: Where they lie; made with the first.
        note: The file that says which was the newest; outside of ``directory``, so that both are not lost at once.
    """

    def __init__(self, directory: Path, note: Path) -> None:
        self.directory = directory
        self.note = note

    # -- reading ---------------------------------------------------------------------------------------------------

    def path(self, name: Name) -> Path:
        """Return the directory of a dump."""
        return self.directory / str(name)

    def listing(self) -> list[Name]:
        """Return the dumps that are there, the newest last, whole or not.

        Raises:
            RecoverError: The directory cannot be read.
        """
        try:
            found = sorted(name for entry in os.scandir(self.directory) if (name := Name.parse(entry.name)))
        except FileNotFoundError:
            return []
        except OSError as error:
            msg = f"dumps in {self.directory} cannot be listed: {error.strerror}"
            raise RecoverError(msg, hint="make the directory readable and run again with --resume") from error
        return found

    def noted(self) -> Name | None:
        """Return the newest dump that was ever finished, as the note has it; None where none was.

        Raises:
            RecoverError: The note cannot be read.
        """
        try:
            text = self.note.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except OSError as error:
            msg = f"{self.note}, which names the newest dump, cannot be read: {error.strerror}"
            raise RecoverError(msg, hint="make the file readable and run again with --resume") from error
        try:
            name = Name.parse(json.loads(text)["newest"])
        except (ValueError, TypeError, KeyError):
            name = None
        if name is None:
            msg = f"{self.note}, which names the newest dump, is damaged"
            raise RecoverError(msg, hint=f"remove it to go on from the newest dump in {self.directory}")
        return name

    def complaint(self, name: Name, *, contents: bool = True) -> str:
        """Return what is wrong with a dump; empty where it is whole.

        Args:
            name: Which.
            contents: Also read every file and compare its digest, not only names and sizes.
        """
        path = self.path(name)
        try:
            files = _manifest(path / MANIFEST, name)
            for file, facts in files.items():
                size = (path / file).stat().st_size
                if size != facts["bytes"]:
                    return f"{file} has {size:,} bytes, {facts['bytes']:,} were written"
                if contents and _digest(path / file) != facts["blake2b"]:
                    return f"the contents of {file} are not those that were written"
        except FileNotFoundError as error:
            missing = Path(error.filename).relative_to(path) if error.filename else error
            return f"{missing} is missing"
        except OSError as error:
            return f"{error.filename or path} cannot be read: {error.strerror}"
        except ValueError as error:
            return str(error)
        return ""

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, step: int, fill: Callable[[Path], None]) -> Name:
        """Make the dump of a step: a fresh directory, filled, synced, and only then under its name.

        Args:
            step: Its number.
            fill: Puts files into the directory it is given.

        Raises:
            RecoverError: It could not be written; the dumps before it are as they were.
            Exception: What ``fill`` raises, likewise.
        """
        name = self._free(step)
        temp = self.directory / f".new-{name}-{os.urandom(4).hex()}"
        try:
            with self.writing(step):
                self.directory.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
                self._sweep()
                temp.mkdir(mode=_PRIVATE)
            fill(temp)
            with self.writing(step):
                _seal(temp, name)
                temp.rename(self.path(name))
                sync_to_disk(self.directory)
                sync_to_disk(self.directory.parent)
                self._write_note(name)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        return name

    @contextmanager
    def writing(self, step: int) -> Iterator[None]:
        """Turn an ``OSError`` of the block into the ``RecoverError`` that says what could not be done."""
        try:
            yield
        except OSError as error:
            msg = f"the dump of step {step} could not be written to {self.directory}: {error.strerror or error}"
            hint = "free some space, then go on from the dump before it: run again with --resume"
            facts = {"file": str(error.filename)} if error.filename else {}
            raise RecoverError(msg, hint=hint, facts=facts) from error

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep`` dumps; each vanishes at once. What cannot be removed is left."""
        for name in self.listing()[: -max(1, keep)]:
            self._remove(name)

    def set_aside(self, newest: Name) -> list[Path]:
        """Make a dump the newest: later ones get other names, and are kept. Returns their new paths.

        Raises:
            RecoverError: One could not be renamed.
        """
        moved = []
        try:
            for name in self.listing():
                if name > newest:
                    target = self.directory / f"broken-{name}-{os.urandom(4).hex()}"
                    self.path(name).rename(target)
                    moved.append(target)
            sync_to_disk(self.directory)
            self._write_note(newest)
        except OSError as error:
            msg = f"a broken dump in {self.directory} could not be set aside: {error.strerror}"
            raise RecoverError(msg, hint="make the directory writable and run again with --resume") from error
        return moved

    def _free(self, step: int) -> Name:
        """Return a name for the step that is later than those that step has."""
        taken = [name.again for name in self.listing() if name.step == step]
        return Name(step, max(taken) + 1 if taken else 0)

    def _sweep(self) -> None:
        """Remove what killed writers left."""
        for entry in os.scandir(self.directory):
            if entry.name.startswith((".new-", ".old-")):
                shutil.rmtree(entry.path, ignore_errors=True)

    def _remove(self, name: Name) -> None:
        # Removing files takes long enough to be killed in: by then it must not look like a dump any more.
        doomed = self.directory / f".old-{name}-{os.urandom(4).hex()}"
        try:
            self.path(name).rename(doomed)
        except OSError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def _write_note(self, name: Name) -> None:
        write_atomically(self.note, json.dumps({"schema": SCHEMA, "newest": str(name)}) + "\n")
        sync_to_disk(self.note.parent)


def _seal(directory: Path, name: Name) -> None:
    """Sync every file and directory, and write the manifest that tells what belongs to the dump."""
    files = {}
    for path in sorted(_files(directory)):
        files[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size, "blake2b": _digest(path)}
        sync_to_disk(path)
    body = {"schema": SCHEMA, "name": str(name), "files": files}
    write_atomically(directory / MANIFEST, json.dumps({**body, "blake2b": _digest_of(body)}, indent=1) + "\n")
    for place, _, _ in os.walk(directory, topdown=False):
        sync_to_disk(Path(place))


def _files(directory: Path) -> Iterator[Path]:
    for place, directories, names in os.walk(directory):
        for name in (*directories, *names):
            path = Path(place) / name
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                msg = f"a dump holds files and directories; {path.relative_to(directory)} is neither"
                raise RecoverError(msg, hint="have the engine's save write a copy in place of a link")
            if path.is_file():
                yield path


def _manifest(path: Path, name: Name) -> Mapping[str, Any]:
    """Return the files of a dump by name.

    Raises:
        ValueError: The manifest is damaged, or that of another dump.
        OSError: It cannot be read.
    """
    text = path.read_bytes()
    try:
        found = json.loads(text)
        told = found.pop("blake2b")
        files: Mapping[str, Any] = found["files"]
    except (ValueError, TypeError, KeyError, AttributeError):
        msg = f"{MANIFEST} is damaged"
        raise ValueError(msg) from None
    if found["schema"] != SCHEMA:
        msg = f"it is written as {found['schema']}, this version reads {SCHEMA}"
        raise ValueError(msg)
    if told != _digest_of(found):
        msg = f"{MANIFEST} is damaged"
        raise ValueError(msg)
    if found["name"] != str(name):
        msg = f"it is a copy of dump {found['name']}"
        raise ValueError(msg)
    return files


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=32).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake2b).hexdigest()


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=32)
