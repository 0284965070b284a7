"""Sidecars and traced processes for tests: real ones, and what their files say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from waiting import scaled, wait_until

__all__ = ["TrialFiles", "sidecar", "traced"]


@contextmanager
def sidecar(trial: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run a sidecar of ``trial`` that can be found, unless it ended at once; end it in order unless the test did."""
    command = [sys.executable, "-m", "traceview.collect", str(trial), "--json", *options]
    (trial / "registry").mkdir(mode=0o700, parents=True, exist_ok=True)
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_until(
            lambda: process.poll() is not None or _record_pid(trial) == process.pid, what="a sidecar that can be found"
        )
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=scaled(20))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _record_pid(trial: Path) -> int | None:
    from zbus.trace.export import sidecar_record

    record = sidecar_record(trial / "registry")
    return None if record is None else record.pid


@contextmanager
def traced(
    trial: Path, code: str, *args: object, rank: int = 0, stdin: int | None = None, **config: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run Python code as ``actor/rank``, traced into ``trial``; its stdout is a pipe. Killed at the end."""
    head = f"""
        import sys, time
        from pathlib import Path
        from zbus import trace
        from zbus.trace.control import writer_of
        config = {{"root": sys.argv[1] + "/traces", "run": "exp/t", "gauge_period_s": 0.0, **{config!r}}}
        tracer = trace.configure(config, role="actor", rank={rank}, incarnation={rank} + 1)
        writer = writer_of(tracer)
        def on_sidecar():
            while writer._outlet is None:
                time.sleep(0.005)
        """
    command = [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code), str(trial), *map(str, args)]
    process = subprocess.Popen(command, text=True, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        process.wait()


class TrialFiles:
    """What the trace files of one rank say, put together as a reader must: blocks once, spill and spool included."""

    def __init__(self, trial: Path, role: str = "actor", rank: int = 0) -> None:
        self._read_all(trial, trial / "traces" / role / f"traces_{rank}.jsonl")

    @classmethod
    def of(cls, trial: Path, main: Path) -> TrialFiles:
        """Return what the files of the process say that writes ``main``."""
        self = cls.__new__(cls)
        self._read_all(trial, main)
        return self

    def _read_all(self, trial: Path, main_file: Path) -> None:
        from zbus.trace.spool import read_spool, scan_blocks

        root = trial / "traces"
        self.main = main_file
        self.spill = main_file.with_name(f"{main_file.name.removesuffix('.jsonl')}.spill.jsonl")
        self.events: list[dict[str, Any]] = []
        self.blocks: Counter[tuple[str, int]] = Counter()  # how often each is in the main file
        self.doubled = 0
        self.torn = 0
        self._seen: set[tuple[str, int]] = set()
        main = self.main.read_bytes() if self.main.exists() else b""
        whole = scan_blocks(self.main)[1] if main else 0  # a torn block stands whole in the spool, if anywhere
        self._read(main[:whole], main=True)
        if self.spill.exists():
            self._read(self.spill.read_bytes(), main=False)
        for segment in sorted((root / "spool").glob("*.spool"), key=lambda path: int(path.stem)):
            for part in read_spool(segment):
                if part.path == self.main:
                    self._read(part.data, main=False)
        self._read(main[whole:], main=False)

    def _read(self, data: bytes, *, main: bool) -> None:
        skip_to = at = 0
        while at < len(data):
            end = data.find(b"\n", at)
            line, begin, at = data[at : end if end >= 0 else len(data)], at, (end + 1 if end >= 0 else len(data))
            if begin < skip_to:
                continue
            try:
                event = json.loads(line)
            except ValueError:
                self.torn += bool(line)
                continue
            if event["name"] == "zbus_block":
                key = event["args"]["source"], event["args"]["seq"]
                self.blocks[key] += main
                if key in self._seen:
                    self.doubled += 1
                    skip_to = at + event["args"]["bytes"]
                    continue
                self._seen.add(key)
            self.events.append(event)

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the events of that name."""
        return [event for event in self.events if event["name"] == name]

    @property
    def numbers(self) -> list[int]:
        """The ``n`` of all ticks, sorted."""
        return sorted(event["args"]["n"] for event in self.named("tick"))
