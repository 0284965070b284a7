"""Recording spans: ours on and off beside a bare ring, VizTracer's log_event and AReaL's trace_scope.

    python benchmarks/trace_record.py --json         # one JSON line per recorder; ns per span with two args

Each recorder runs in a fresh process, the minimum of several rounds. AReaL is not a package here: AREAL_CHECKOUT names
a checkout or its unpacked wheel; of it only ``perf_tracer.py`` is loaded, with the two modules it imports stubbed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDERS = ("ring", "zbus", "zbus-off", "viztracer", "areal", "areal-off")
Loop = Callable[[int], None]
Flush = Callable[[], None]


def ring() -> tuple[Loop, Flush]:
    """Append two clock readings and a tuple to a bounded deque, in line: the floor."""
    put, now = collections.deque[Any](maxlen=1 << 16).append, time.monotonic_ns

    def loop(count: int) -> None:
        for step in range(count):
            begin = now()
            put(("forward", "compute", begin, now(), step, 7))

    return loop, lambda: None


def zbus(level: str) -> tuple[Loop, Flush]:
    """Record with ``zbus.trace.span``; the flush is the writer's own."""
    from zbus import trace

    config = trace.TraceConfig(root=tempfile.mkdtemp(), level=level, run="e/t", flush_period_s=3600, ring_size=1 << 21)
    tracer = trace.configure(config, role="actor", rank=0)
    span = trace.span

    def loop(count: int) -> None:
        for step in range(count):
            with span("forward", category="compute", global_step=step, micro=7):
                pass

    return loop, tracer.flush if hasattr(tracer, "flush") else lambda: trace.save_perf_tracer(force=True)


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


def one(name: str, count: int, rounds: int) -> None:
    """Measure one recorder in this process."""
    if name.startswith("areal"):
        loop, flush = areal(enabled=name == "areal")
    elif name.startswith("zbus"):
        loop, flush = zbus("full" if name == "zbus" else "off")
    else:
        loop, flush = {"ring": ring, "viztracer": viztracer}[name]()
    loop(1000)
    flush()
    record, both = [], []
    for _ in range(rounds):
        cpu, mine = time.process_time_ns(), time.thread_time_ns()  # not the wall clock: cores may be shared
        loop(count)
        record.append((time.thread_time_ns() - mine) / count)
        flush()
        both.append((time.process_time_ns() - cpu) / count)
    print(json.dumps({"record_cpu_ns": round(min(record)), "record_and_flush_cpu_ns": round(min(both))}))


def missing(name: str) -> str:
    """Return why a recorder cannot run here, or nothing."""
    if name.startswith("areal") and not os.environ.get("AREAL_CHECKOUT"):
        return "AREAL_CHECKOUT names no checkout"
    return "not installed" if name == "viztracer" and importlib.util.find_spec(name) is None else ""


def main() -> None:
    """Run every recorder in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.spans, options.rounds)
        return
    for name in RECORDERS:
        row: dict[str, Any] = {"bench": "trace_record", "recorder": name}
        reason = missing(name)
        if reason:
            row["skipped"] = reason
        else:
            command = [
                sys.executable,
                __file__,
                "--one",
                name,
                "--spans",
                str(options.spans),
                "--rounds",
                str(options.rounds),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            row |= json.loads(done.stdout) if not done.returncode else {"error": done.stderr.strip()[-200:]}
        print(
            json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items() if k != "bench"),
            flush=True,
        )


if __name__ == "__main__":
    main()
