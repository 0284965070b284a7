from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perfetto_page import PerfettoPage
from traceview.merge import merge
from waiting import scaled

pytestmark = [pytest.mark.ci, pytest.mark.alone, pytest.mark.timeout(scaled(300))]

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Sent:
    """What was recorded, counted from the files themselves.

    Attributes:
        slices: Name to count of everything a viewer draws: spans, marks and async phases.
        took: Name to summed nanoseconds of the spans.
        arrows: Arrows that have both ends.
        keys: Args that both ends of an arrow must have alike.
        drift: How much faster or slower than the run's clock any clock went.
    """

    slices: Counter[str] = field(default_factory=Counter)
    took: Counter[str] = field(default_factory=Counter)
    arrows: int = 0
    keys: tuple[str, ...] = ("call", "attempt")
    drift: float = 0.0


def count(root: Path) -> Sent:
    """Count what the files of a run hold."""
    sent = Sent()
    leaves: set[object] = set()
    arrives: set[object] = set()
    for path in root.rglob("traces_*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            phase = event["ph"]
            if phase in "Xib":
                sent.slices[event["name"]] += 1
            if phase == "X":
                start = round(event["ts"] * 1000)
                sent.took[event["name"]] += round((event["ts"] + event["dur"]) * 1000) - start
            if event.get("flow_out") or phase == "s":
                leaves.add(event.get("bind_id", event.get("id")))
            if event.get("flow_in") or phase == "f":
                arrives.add(event.get("bind_id", event.get("id")))
    sent.arrows = len(leaves & arrives)
    return sent


def calls_with_retries(root: Path) -> Sent:
    """Overlapping calls of a controller to two workers, some sent again, as processes record them."""
    from zbus import trace
    from zbus.trace.tracer import Tracer
    from zbus.trace.writer import TraceWriter

    config = trace.TraceConfig(root=str(root), level="full", run="e/t", flush_period_s=10)
    writers = {}
    for role, rank in (("controller", 0), ("actor", 0), ("actor", 1)):
        tracer = Tracer(role, rank)
        writers[role, rank] = TraceWriter(tracer, config)
        tracer.set_level("full")
        writers[role, rank].open()
    start = writers["controller", 0].tracer.now()
    for n in range(40):
        for rank in range(2):
            at = start + n * 1000
            for attempt in (1, 2) if n % 7 == 3 else (1,):
                ids = (bytes(16), f"actor/{rank}", 9, "main", n, attempt, "train")
                done = (at + 5000, at + 5100, 10, 20, "OK")
                writers["controller", 0].tracer.bus_client(*ids, at, at + 100, at + 200, *done)
                writers["actor", rank].tracer.bus_server(*ids, at + 300, at + 400, at + 450, at + 490, at + 499, "OK")
                at += 50
    for writer in writers.values():
        writer.close()
    return count(root)


def demo(root: Path) -> Sent:
    """The demo, shortened: two ranks train a small model through the bus."""
    pytest.importorskip("torch", reason="the demo trains with torch: install zbus-runtime[torch]")
    command = [Path(sys.executable).with_name("zbus-controller"), "run", "--json", "--root", str(root), "-t", "demo"]
    sizes = ["params.steps=20", "params.batch=32", "params.heldout_words=50", "params.checkpoint_every=10"]
    config = ROOT / "examples" / "g2p" / "sft.yaml"
    subprocess.run([*command, config, *sizes], check=True, capture_output=True, timeout=scaled(120))
    return count(root)


def generator() -> ModuleType:
    """Return the benchmark that makes traces of any size, with skewed and drifting clocks."""
    spec = importlib.util.spec_from_file_location("trace_merge_generator", ROOT / "benchmarks" / "trace_merge.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated(root: Path) -> Sent:
    """24 files of another tool: overlapping calls, arrows as events beside the spans, clocks that drift 50 ms apart."""
    made = generator().generate(root, 20_000, skew_ms=50.0, drift_ppm=50.0, asymmetry=0.5)
    sent = count(root)
    assert sent.arrows == made["calls"]
    sent.keys, sent.drift = ("call",), 1e-4
    return sent


def unknown_fields(message: Any) -> list[str]:
    """Return the fields in a message, or in any inside it, that the published schema does not have."""
    from google.protobuf.message import Message
    from google.protobuf.unknown_fields import UnknownFieldSet

    found = [f"{message.DESCRIPTOR.full_name} {field.field_number}" for field in UnknownFieldSet(message)]
    for known, value in message.ListFields():
        if known.message_type is not None:
            inner = [value] if isinstance(value, Message) else value
            found += [name for one in inner for name in unknown_fields(one)]
    return found


@pytest.mark.parametrize("make", [calls_with_retries, generated])
def test_the_published_schema_knows_every_field(tmp_path, make):
    """What we encode ourselves parses with Perfetto's own classes, nothing unknown, begins and ends in balance."""
    pb = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="pip install perfetto")
    sent = make(tmp_path / "run")
    merge([str(tmp_path / "run")], tmp_path / "merged.pftrace")
    trace = pb.Trace.FromString((tmp_path / "merged.pftrace").read_bytes())
    assert unknown_fields(trace) == []
    types = Counter(packet.track_event.type for packet in trace.packet if packet.HasField("track_event"))
    begin, end = types[pb.TrackEvent.TYPE_SLICE_BEGIN], types[pb.TrackEvent.TYPE_SLICE_END]
    assert begin == end == sum(sent.slices[name] for name in sent.took)
    described = {packet.track_descriptor.uuid for packet in trace.packet if packet.HasField("track_descriptor")}
    used = {packet.track_event.track_uuid for packet in trace.packet if packet.HasField("track_event")}
    assert used - {0} <= described


@pytest.fixture(scope="module")
def perfetto() -> Iterator[PerfettoPage]:
    """Give one browser for all tests here."""
    with PerfettoPage() as page:
        yield page


@pytest.mark.parametrize("make", [calls_with_retries, demo, generated])
def test_the_real_viewer_has_every_span_and_every_arrow(tmp_path, perfetto, make):
    """Both formats load without error or loss: each span, as long as it was; each arrow joins one call and attempt."""
    sent = make(tmp_path / "run")
    assert sent.arrows > 0
    for name in ("merged.json.gz", "merged.pftrace"):
        report = merge([str(tmp_path / "run")], tmp_path / name)
        assert report.problems.get("arrow_without_span", 0) == 0
        perfetto.open(tmp_path / name)
        assert perfetto.errors() == []
        slices = perfetto.slices()
        assert {n: c for n, (c, _) in slices.items()} == sent.slices, name
        for span, took in sent.took.items():
            # Moving a clock rounds each end by up to half a ns, and undoes its drift.
            assert abs(slices[span][1] - took) <= sent.slices[span] + took * sent.drift, (name, span)
        assert perfetto.number("select count(*) from slice where dur < 0") == 0
        assert perfetto.arrows(*sent.keys) == (sent.arrows, sent.arrows), name
    assert perfetto.foreign() == []
