from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceview.merge import merge
from zbus.runtime.processes import children_of
from zbus.testing.memory import high_water_mb

GOOD = (Path(__file__).parents[2] / "golden" / "trace" / "traces_0.jsonl").read_bytes()


def merged(data: bytes) -> tuple[list[dict], dict[str, int]]:
    """Merge a file with this content beside a good one: the spans and the problems."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "bad.jsonl").write_bytes(data)
        (root / "good.jsonl").write_bytes(GOOD)
        report = merge([name], root / "out.json", all_runs=True)  # damage may change the run's name and epoch
        events = json.loads((root / "out.json").read_text())["traceEvents"]
        return [e for e in events if e["ph"] == "X"], report.problems


SPANS = len(merged(b"")[0])


@given(st.data())
def test_no_damage_of_one_file_costs_another_file_anything(data):
    """Whatever bytes are changed, cut out or put into a trace file, the merge ends well with the other file whole."""
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(content) - 1))
        until = at + data.draw(st.integers(0, 40))
        content[at:until] = data.draw(st.binary(max_size=20))
    spans, _ = merged(bytes(content))
    assert sum(1 for span in spans if span.get("args", {}).get("kind") == "client") >= 1
    assert len(spans) >= SPANS


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_never_fatal(content):
    """A file of any bytes is reported or empty of events, and no more."""
    assert len(merged(content)[0]) >= SPANS


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_json_value_in_any_place_of_an_event_is_survived(value):
    """An event whose keys hold values of the wrong type is repaired or dropped, and the output is valid."""
    event = {"name": "a", "ph": "X", "ts": 1, "dur": 1, "pid": 1, "tid": 1, "cat": "c", "args": {"k": 1}, "id": 1}
    lines = [json.dumps({**event, key: value}).encode() for key in (*event, "bind_id", "track", "s", "flow_out")]
    assert len(merged(b"\n".join(lines))[0]) >= SPANS


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([]) | st.just({"a": 1}))
def test_any_json_value_in_any_place_of_the_metadata_is_survived(value):
    """A header, loss or end whose fields hold anything does not stop the merge."""
    metadata = [json.loads(line) for line in GOOD.splitlines() if b'"zbus_' in line]
    args = {"reason": "x", "lost": 1, "since_us": 1.0, "until_us": 2.0}
    metadata.append({"name": "zbus_loss", "ph": "M", "ts": 1.0, "pid": metadata[0]["pid"], "args": args})
    lines = []
    for event in metadata:
        lines += [json.dumps({**event, "args": {**event["args"], key: value}}).encode() for key in event["args"]]
        lines.append(json.dumps({**event, "args": value}).encode())
    for start in range(len(lines)):
        if b"zbus_meta" in lines[start]:
            assert len(merged(b"\n".join(lines[start:]))[0]) >= SPANS


MERGE_BIG = """
    import gzip, json, sys
    from pathlib import Path
    from traceview.merge import merge
    root, packed = Path(sys.argv[1]), sys.argv[2] == "True"
    report = merge([str(root)], root / "out.json.gz")
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    print(json.dumps([report.events, int(peak.split()[1]) // 1024]))
"""


@pytest.mark.ci
@pytest.mark.parametrize("gz", [False, True])
def test_memory_does_not_grow_with_the_input(tmp_path, gz):
    """One file of a million overlapping events merges within 256 MB of memory."""
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", 1) if gz else (tmp_path / "a.jsonl").open("wb") as file:
        for n in range(1_000_000):
            file.write(
                b'{"name":"step","ph":"X","ts":%d.125,"dur":%d.5,"pid":1,"tid":%d,"track":"t%d",'
                b'"args":{"n":%d,"pad":"xxxxxxxxxxxxxxxx"}}\n' % (n, n % 40, n % 4, n % 16, n)
            )
    # The peak of a process that was forked holds its parent's, so a fresh one reads its own high-water mark.
    command = [sys.executable, "-c", textwrap.dedent(MERGE_BIG), str(tmp_path), str(gz)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    events, peak_mb = json.loads(done.stdout)
    assert events == 1_000_000
    assert peak_mb <= 256
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_all_processes_of_a_merge_stay_within_the_memory_together(tmp_path):
    """A merge of large files by two processes takes less than 256 MB in all three, at their high-water marks."""
    for rank in range(4):
        with (tmp_path / f"traces_{rank}.jsonl").open("wb") as file:
            for n in range(300_000):
                file.write(
                    b'{"name":"step","ph":"X","ts":%d.125,"dur":%d.5,"pid":1,"tid":%d,"args":{"n":%d}}\n'
                    % (n, n % 40, n % 4, n)
                )
    command = [sys.executable, "-m", "traceview", "merge", "-q", "--jobs", "2", "-o", "out.json", "."]
    peaks: dict[int, int] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path) as process:
        while process.poll() is None:
            for pid in (process.pid, *children_of(process.pid)):
                peaks[pid] = max(peaks.get(pid, 0), high_water_mb(pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
    assert process.returncode == 0
    assert len(peaks) == 3
    assert sum(peaks.values()) <= 256
