from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfetto_page import PerfettoPage
from traceview.convert import convert
from traceview.merge import merge
from traceview.problems import Problems
from traceview.survey import survey

SHARED = Path(os.environ.get("ZBUS_TEST_SHARED") or Path(__file__).parents[3] / "shared")
SAMPLES = SHARED / "samples"
FILES = sorted(SAMPLES.glob("*/*.json*"))
SMALL = [path for path in FILES if path.stat().st_size < 1_000_000]

pytestmark = pytest.mark.ci


@pytest.mark.skipif(not FILES, reason="no public sample traces: ../shared/samples, or $ZBUS_TEST_SHARED/samples")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_public_sample_merges_in_both_formats(tmp_path, path):
    """A trace of another tool merges and reads with all its spans, in strict JSON and as Perfetto packets."""
    chrome = merge([str(path)], tmp_path / "o.json")
    events = json.loads((tmp_path / "o.json").read_text())["traceEvents"]
    spans = sum(event["ph"] == "X" for event in events)
    assert spans == chrome.spans > 0
    assert all(event["ts"] >= 0 for event in events if event["ph"] == "X")
    perfetto = merge([str(path)], tmp_path / "o.pftrace")
    assert perfetto.spans == spans
    counted = sum(s.times.count for r in survey([str(path)], Problems()).ranks.values() for s in r.spans.values())
    assert counted <= spans  # begin and end pairs become spans in a merge only


@pytest.fixture(scope="module")
def perfetto() -> Iterator[PerfettoPage]:
    """Give one browser for all samples."""
    with PerfettoPage() as page:
        yield page


@pytest.mark.skipif(not FILES, reason="no public sample traces: ../shared/samples, or $ZBUS_TEST_SHARED/samples")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_public_sample_opens_in_the_viewer_whole(tmp_path, perfetto, path):
    """What we make of another tool's trace loads in the Perfetto UI without error or loss: every span is a slice."""
    merge([str(path)], tmp_path / "o.json")
    drawn = Counter(e["ph"] for e in json.loads((tmp_path / "o.json").read_text())["traceEvents"])
    perfetto.open(tmp_path / "o.json")
    assert perfetto.errors() == []
    assert perfetto.number("select count(*) from slice") == drawn["X"] + drawn["i"] + drawn["b"] + drawn["n"]


@pytest.mark.skipif(not FILES, reason="no public sample traces: ../shared/samples, or $ZBUS_TEST_SHARED/samples")
@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.name)
@pytest.mark.parametrize("form", ["jsonl", "otlp"])
def test_every_small_public_sample_converts(tmp_path, path, form):
    """A trace of another tool becomes JSON lines that merge again, or OTLP spans, without losing one."""
    spans = merge([str(path)], tmp_path / "o.json").spans
    report = convert([str(path)], tmp_path / "out", form)
    assert report.spans == spans
    if form == "jsonl":
        assert merge([str(tmp_path / "out")], tmp_path / "again.json").spans == spans
    else:
        resources = json.loads((tmp_path / "out").read_text())["resourceSpans"]
        assert sum(len(scope["spans"]) for one in resources for scope in one["scopeSpans"]) == spans


@pytest.mark.skipif(not FILES, reason="no public sample traces: ../shared/samples, or $ZBUS_TEST_SHARED/samples")
def test_two_runs_of_one_job_can_be_compared(tmp_path):
    """The two sample runs meant for comparison give a table with the kernels that changed."""
    pair = [str(SAMPLES / "hta" / f"diff_{name}.json.gz") for name in ("control", "test")]
    done = subprocess.run(
        [sys.executable, "-m", "traceview", "diff", *pair, "--json"], capture_output=True, text=True, check=True
    )
    rows = json.loads(done.stdout)["rows"]
    assert any(row["significant"] for row in rows)


def test_a_trace_that_torch_makes_now_merges(tmp_path):
    """What torch.profiler writes in this environment merges beside a run's own files."""
    torch = pytest.importorskip("torch", reason="needs torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        a = torch.ones(64, 64)
        for _ in range(5):
            a = a @ a / 64
    profile.export_chrome_trace(str(tmp_path / "torch.json"))
    report = merge([str(tmp_path / "torch.json")], tmp_path / "o.json")
    names = {e["name"] for e in json.loads((tmp_path / "o.json").read_text())["traceEvents"] if e["ph"] == "X"}
    assert "aten::matmul" in names
    assert report.spans > 10


def test_a_trace_that_viztracer_makes_now_merges(tmp_path):
    """What VizTracer writes in this environment merges in both formats."""
    viztracer = pytest.importorskip("viztracer", reason="pip install viztracer")
    traced = f"viztracer.VizTracer(output_file={str(tmp_path / 'v.json')!r}, verbose=0)"
    code = f"import viztracer\nwith {traced}:\n    sorted([3, 1])\n    sum(range(9))\n"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert viztracer
    for name in ("o.json", "o.pftrace"):
        assert merge([str(tmp_path / "v.json")], tmp_path / name).spans >= 2
