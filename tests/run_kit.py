"""``zbus-controller run`` as a real process for fault tests: start it, wait for its stations, see what is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from waiting import scaled, wait_until
from zbus.config import TrialDir
from zbus.registry.file import FileRegistry
from zbus.registry.records import ExitRecord, Records

__all__ = ["DRIVERS", "Done", "RunKit", "Running", "normal", "run_kit"]

DRIVERS = Path(__file__).parent / "faults" / "drivers"
COMMAND = [sys.executable, "-m", "controller.cli", "run"]
WORKER = [sys.executable, "-m", "workers"]


@dataclass
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def block(self) -> str:
        """The error block, without what stands before and after it."""
        assert "error" in self.err, self.err
        text = self.err[re.search(r"^error(\[|:)", self.err, re.MULTILINE).start() :]  # type: ignore[union-attr]
        return text.partition("\nnext: ")[0].partition("\n\n")[0].rstrip("\n")


class Running:
    """A command that runs. Its stderr is collected on a thread, so that any line can be awaited."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return "".join(self._lines)

    def wait_err(self, text: str, timeout_s: float = 20.0) -> str:
        """Wait for a text on stderr."""

        def there() -> str:
            assert self.process.poll() is None or text in self.err, f"ended without {text!r}: {self.err}"
            return self.err if text in self.err else ""

        return wait_until(there, timeout_s, f"{text!r} on stderr")

    def signal(self, signum: int) -> None:
        """Send a signal to the command alone."""
        self.process.send_signal(signum)

    def end(self, timeout_s: float = 20.0) -> Done:
        """Wait for its end."""
        try:
            code = self.process.wait(scaled(timeout_s))
        except subprocess.TimeoutExpired:
            msg = f"still running after {timeout_s} s: {self.err}"
            raise AssertionError(msg) from None
        self._reader.join(5)
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        return Done(code, out, self.err)


class RunKit:
    """A directory with a job of two ranks; each run is a real command in it."""

    def __init__(self, directory: Path, runtime: Path, monkeypatch: Any) -> None:
        self.directory = directory
        self.runtime = runtime
        self._running: list[Running] = []
        monkeypatch.chdir(directory)
        monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(runtime))
        monkeypatch.setenv("HOME", str(directory))
        self.write()

    def write(self, **changes: Any) -> None:
        """Write the job, with changes to the role."""
        role = {"engine": f"{DRIVERS}/fault_engines.py:Victim", "replicas": 2, **changes}
        job = {
            "experiment": "demo",
            "target": f"{DRIVERS}/fault_driver.py:main",
            "roles": {"actor": role},
            "trace": {"merge": False},
        }
        (self.directory / "job.yaml").write_text(yaml.safe_dump(job))

    def start(self, *arguments: str, prefix: tuple[str, ...] = (), target: str = "job.yaml") -> Running:
        """Start a run."""
        return self.launch([*prefix, *COMMAND, target, *arguments])

    def launch(self, command: list[str]) -> Running:
        """Start any command."""
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        running = Running(process)
        self._running.append(running)
        return running

    def run(self, *arguments: str, timeout_s: float = 60.0, prefix: tuple[str, ...] = ()) -> Done:
        """Run to the end."""
        return self.start(*arguments, prefix=prefix).end(timeout_s)

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def trial(self) -> TrialDir:
        """The one trial that was made."""
        (path,) = (self.directory / "zbus-runs").glob("*/*")
        return TrialDir(path, path.parent.name, path.name)

    def summary(self) -> dict[str, Any]:
        """Return summary.json."""
        return json.loads(self.trial.summary.read_text())  # type: ignore[no-any-return]

    def records(self) -> Records:
        """Open the registry of the trial."""
        return Records(FileRegistry(self.trial.registry, create=False))

    def exits(self) -> list[ExitRecord]:
        """Return the exit records, by rank and start."""
        return sorted(self.records().exits(), key=lambda r: (r.role, r.rank, r.start))

    def pid(self, rank: int, start: int = 0) -> int:
        """Return the pid of a rank."""
        return next(r.pid for r in self.records().workers("actor") if (r.rank, r.start) == (rank, start))

    def log(self, rank: int, start: int = 0) -> str:
        """Return a rank's log, empty while it is not there."""
        with suppress(OSError, ValueError):
            return self.trial.log("actor", rank, start).read_text()
        return ""

    def wait_log(self, text: str, *ranks: int, start: int = 0) -> None:
        """Wait until the logs of ranks hold a text."""
        wait_until(lambda: all(text in self.log(rank, start) for rank in ranks or (0, 1)), what=f"{text!r} in logs")

    def processes(self) -> list[str]:
        """Return all living processes that belong to trials in this directory."""
        found = []
        mark = f"{self.directory}/zbus-runs".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                if mark in text and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(f"{entry.name} {text[:80]!r}")
        return found

    def gone(self, timeout_s: float = 2.0) -> None:
        """Wait until no process of any trial is left."""
        wait_until(lambda: not self.processes(), timeout_s, "every process of the trial to be gone")

    def close(self) -> None:
        """End what runs and check that nothing is left."""
        for running in self._running:
            with suppress(OSError):
                if running.process.poll() is None:
                    os.killpg(running.process.pid, signal.SIGKILL)
            running.process.wait()
            running._reader.join(5)
            for pipe in (running.process.stdout, running.process.stderr):
                if pipe is not None:
                    pipe.close()
        self.gone(5.0)


def normal(text: str) -> str:
    """Replace what differs from run to run: pids, host, times, sizes, directories."""
    import socket

    text = text.replace(f"{DRIVERS}/", "").replace(f"{DRIVERS.parents[2]}/", "")
    text = re.sub(rf"\b(host|on) {re.escape(socket.gethostname())}\b", r"\1 HOST", text)
    text = re.sub(r"\bpid \d+", "pid PID", text)
    text = re.sub(r"\b[\d.]+ s\b", "N s", text)
    text = re.sub(r"\b(line|py:)\s?\d+", r"\1 N", text)
    text = re.sub(r"\bprocess \d+", "process PID", text)
    text = re.sub(r"0x[0-9a-f]{8,}", "0xADDRESS", text)
    return re.sub(r"\d{8}-\d{6}-\w+", "TRIAL", text)


def run_kit(directory: Path, runtime: Path, monkeypatch: Any) -> Iterator[RunKit]:
    """Yield a kit and close it: the body of a fixture."""
    kit = RunKit(directory, runtime, monkeypatch)
    try:
        yield kit
    finally:
        kit.close()
