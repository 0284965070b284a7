"""Recording spans: ours on and off beside a bare ring, VizTracer's log_event and AReaL's trace_scope.

    python benchmarks/trace_record.py --json         # one JSON line per recorder, then one per ratio

Each recorder lives in a process of its own and all take turns, round by round; a span has a name, a category and two
args. Figures are CPU nanoseconds per span: ``record`` of the recording thread, ``record_and_flush`` of the process with
what writes the spans to a file (``--burst`` spans at a time, as a training step would). A ratio is the median over the
rounds of the two figures of one round, so the machine's ups and downs cancel out. The bare ring is two looks at the
clock and a tuple put into a bounded deque, in line; it is emptied after each burst, as the others are. ``zbus`` writes
its own file; ``zbus-sidecar`` hands its blocks to a sidecar, as in a trial that has one: its figures are those of the
traced process, and what the sidecar takes for a span is a figure of its own.

AReaL is not a package here: AREAL_CHECKOUT names a checkout or its unpacked wheel; of it only ``perf_tracer.py`` is
loaded, with the two modules it imports stubbed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDERS = ("ring", "zbus", "zbus-sidecar", "zbus-off", "viztracer", "areal", "areal-off")
RATIOS = (  # ours, whose, of what, at most
    ("zbus", "areal", "record", 0.30),
    ("zbus", "viztracer", "record", 0.50),
    ("zbus", "ring", "record", 6.0),
    ("zbus-off", "areal-off", "record", 0.60),
    ("zbus", "areal", "record_and_flush", 0.12),
    ("zbus-sidecar", "areal", "record_and_flush", 0.12),
)
Loop = Callable[[int], None]
Flush = Callable[[], None]


def ring() -> tuple[Loop, Flush]:
    """Append two clock readings and a tuple to a bounded deque, in line: the floor. Emptied like all the others."""
    kept = collections.deque[Any](maxlen=1 << 16)
    put, now = kept.append, time.monotonic_ns

    def loop(count: int) -> None:
        for step in range(count):
            begin = now()
            put(("forward", "compute", begin, now(), step, 7))

    return loop, kept.clear


def zbus(level: str) -> tuple[Loop, Flush]:
    """Record with ``zbus.trace.span``; the flush is the writer's own. asyncio is there, as in every worker."""
    import asyncio  # noqa: F401  # spans then ask for the running task

    from zbus import trace

    config = trace.TraceConfig(root=tempfile.mkdtemp(), level=level, run="e/t", flush_period_s=10, ring_size=1 << 21)
    trace.configure(config, role="actor", rank=0)
    span = trace.span

    def loop(count: int) -> None:
        for step in range(count):
            with span("forward", category="compute", global_step=step, micro=7):
                pass

    return loop, lambda: trace.save_perf_tracer(force=True)


def zbus_sidecar() -> tuple[Loop, Flush, Callable[[], dict[str, float]]]:
    """Record with ``zbus.trace.span`` for a sidecar; the third function ends both and says what the sidecar took."""
    import asyncio  # noqa: F401  # as in zbus()

    from zbus import trace
    from zbus.trace.control import writer_of
    from zbus.trace.launch import Sidecar

    trial = Path(tempfile.mkdtemp())
    (trial / "registry").mkdir(mode=0o700)
    sidecar = Sidecar.start(trial)
    config = trace.TraceConfig(root=str(trial / "traces"), level="full", run="e/t", ring_size=1 << 21)
    writer = writer_of(trace.configure(config, role="actor", rank=0))
    assert writer is not None
    while writer._outlet is None:  # noqa: SLF001  # nobody else need know it
        if sidecar.process.poll() is not None:
            raise ChildProcessError((trial / "logs" / "sidecar.log").read_text())
        time.sleep(0.01)
    span = trace.span
    spans = 0
    began = cpu_ns(sidecar.process.pid)

    def loop(count: int) -> None:
        nonlocal spans
        spans += count
        for step in range(count):
            with span("forward", category="compute", global_step=step, micro=7):
                pass

    def close() -> dict[str, float]:
        trace.shutdown()
        account = trial / "traces" / "sidecar.json"
        before = os.times()
        sidecar.stop()
        after = os.times()
        said = json.loads(account.read_text())
        assert said["complete"], said
        assert said["sources"][0]["records"] >= spans, said
        whole = after.children_user + after.children_system - before.children_user - before.children_system
        return {"in_sidecar": (whole * 1e9 - began) / spans}

    return loop, lambda: trace.save_perf_tracer(force=True), close


def cpu_ns(pid: int) -> int:
    """Return the CPU time a process has taken so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def viztracer() -> tuple[Loop, Flush]:
    """Record with ``log_event``, function tracing off."""
    from viztracer import VizTracer

    tracer = VizTracer(verbose=0, tracer_entries=4_000_000, ignore_c_function=True, max_stack_depth=0)
    tracer.start()
    event = tracer.log_event

    def loop(count: int) -> None:
        for _ in range(count):
            with event("forward"):
                pass

    return loop, lambda: None


def areal(*, enabled: bool) -> tuple[Loop, Flush]:
    """Record with AReaL's ``trace_scope``; the flush is its ``save``."""

    @dataclasses.dataclass
    class SessionTracerConfig:
        enabled: bool = False
        flush_threshold: int = 256

    @dataclasses.dataclass
    class PerfTracerConfig:
        experiment_name: str = "e"
        trial_name: str = "t"
        fileroot: str = ""
        enabled: bool = True
        save_interval: int = 1
        profile_steps: list[int] | None = None
        session_tracer: SessionTracerConfig | None = None

    for name in ("areal", "areal.api", "areal.utils", "areal.api.cli_args", "areal.utils.logging"):
        sys.modules[name] = types.ModuleType(name)
    arguments: Any = sys.modules["areal.api.cli_args"]
    arguments.PerfTracerConfig, arguments.SessionTracerConfig = PerfTracerConfig, SessionTracerConfig
    stub: Any = sys.modules["areal.utils.logging"]
    stub.getLogger = logging.getLogger
    utils: Any = sys.modules["areal.utils"]
    utils.logging = stub
    spec = importlib.util.spec_from_file_location(
        "areal_perf_tracer", Path(os.environ["AREAL_CHECKOUT"]) / "areal/utils/perf_tracer.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.configure(PerfTracerConfig(fileroot=tempfile.mkdtemp(), enabled=enabled), rank=0, role="actor")
    scope = module.trace_scope

    def loop(count: int) -> None:
        for step in range(count):
            with scope("forward", category="compute", args={"global_step": step, "micro": 7}):
                pass

    return loop, lambda: module.save(force=True)


def serve(name: str, spans: int, burst: int) -> None:
    """Be one recorder: a round per line of input, its figures as a line of output."""
    close: Callable[[], dict[str, float]] = dict
    if name.startswith("areal"):
        loop, flush = areal(enabled=name == "areal")
    elif name == "zbus-sidecar":
        loop, flush, close = zbus_sidecar()
    elif name.startswith("zbus"):
        loop, flush = zbus("off" if name == "zbus-off" else "full")
    else:
        loop, flush = {"ring": ring, "viztracer": viztracer}[name]()
    loop(1000)
    flush()
    print("ready", flush=True)
    for _ in sys.stdin:
        record = 0
        cpu = time.process_time_ns()  # not the wall clock: cores may be shared
        for _ in range(spans // burst):
            mine = time.thread_time_ns()
            loop(burst)
            record += time.thread_time_ns() - mine
            flush()
        both = time.process_time_ns() - cpu
        print(json.dumps({"record": record / spans, "record_and_flush": both / spans}), flush=True)
    print(json.dumps(close()), flush=True)


class Recorder:
    """A recorder in its process."""

    def __init__(self, name: str, spans: int, burst: int) -> None:
        command = [sys.executable, __file__, "--serve", name, "--spans", str(spans), "--burst", str(burst)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.rounds: list[dict[str, float]] = []
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            msg = f"exit code {self.process.wait()}"
            raise ChildProcessError(msg)
        return answer

    def round(self) -> None:
        """Run one round."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.rounds.append(json.loads(self._answer()))

    def close(self) -> dict[str, float]:
        """End the process and return what it says of the whole time."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        said: dict[str, float] = json.loads(self._answer())
        self.process.wait()
        return said


def missing(name: str) -> str:
    """Return why a recorder cannot run here, or nothing."""
    if name.startswith("areal") and not os.environ.get("AREAL_CHECKOUT"):
        return "AREAL_CHECKOUT names no checkout"
    return "not installed" if name == "viztracer" and importlib.util.find_spec(name) is None else ""


def main() -> None:
    """Let all recorders take turns and print their figures and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=100_000, help="spans per round")
    parser.add_argument("--burst", type=int, default=10_000, help="spans between two flushes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.spans, options.burst)
        return

    def show(row: dict[str, Any]) -> None:
        row = {"bench": "trace_record"} | row
        print(
            json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items() if k != "bench"),
            flush=True,
        )

    recorders: dict[str, Recorder] = {}
    for name in RECORDERS:
        reason = missing(name)
        if reason:
            show({"recorder": name, "skipped": reason})
            continue
        try:
            recorders[name] = Recorder(name, options.spans, options.burst)
        except ChildProcessError as error:
            show({"recorder": name, "error": str(error)})
    for _ in range(options.rounds):
        for recorder in recorders.values():
            recorder.round()
    for name, recorder in recorders.items():
        whole = {kind: round(figure) for kind, figure in recorder.close().items()}
        kinds = ("record", "record_and_flush")
        figures = {kind: round(statistics.median(r[kind] for r in recorder.rounds)) for kind in kinds}
        best = {f"{kind}_best": round(min(r[kind] for r in recorder.rounds)) for kind in kinds}
        show({"recorder": name, "unit": "CPU ns per span", **figures, **best, **whole})
    for ours, theirs, kind, bar in RATIOS:
        if ours in recorders and theirs in recorders:
            pairs = zip(recorders[ours].rounds, recorders[theirs].rounds, strict=True)
            ratio = statistics.median(mine[kind] / other[kind] for mine, other in pairs)
            show({"ratio": f"{ours} / {theirs}", "of": kind, "median": round(ratio, 3), "at_most": bar})


if __name__ == "__main__":
    main()
