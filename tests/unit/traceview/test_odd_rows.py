"""Inputs of other tools and of broken runs, merged: the result a user would want."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from traceview.align import Anchor, ClockPoint, align
from traceview.cli import main
from traceview.merge import MergeReport, merge


def span(name: str, ts: float, dur: float = 1.0, **more) -> dict:
    """Return a span."""
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 7, "tid": 7, **more}


def put(path: Path, *records: dict | str) -> Path:
    """Write JSON lines, or texts as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def header(role: str = "actor", rank: int = 0, **more) -> dict:
    """Return an opening metadata event."""
    args = {"format": 1, "run": "e/t", "role": role, "rank": rank, "boot_id": "b", "time_ns": 1, "pid": 7}
    args |= {"mono_ns": 1000, "wall_ns": 1_796_000_000_000_000_000, "epoch_mono_ns": 0, **more}
    return {"name": "zbus_meta", "ph": "M", "ts": 0.0, "pid": 7, "args": args}


END = {"name": "zbus_end", "ph": "M", "ts": 9.0, "pid": 7, "args": {"lost": {}}}


def run(root: Path, **kwargs) -> tuple[MergeReport, list[dict]]:
    """Merge a directory to Chrome JSON."""
    inputs = [str(p) for p in sorted(root.iterdir()) if not p.name.startswith("out")]
    report = merge(inputs, root / "out.json", **kwargs)
    return report, json.loads((root / "out.json").read_text())["traceEvents"]


def slices(events: list[dict]) -> dict[str, dict]:
    """Return the spans by name."""
    return {e["name"]: e for e in events if e["ph"] == "X"}


def test_epoch_times_keep_their_fraction(tmp_path):
    """Times in µs since 1970 with decimals lose nothing to floating point (row 10)."""
    text = '{{"name":"{}","ph":"X","ts":17960000000000{},"dur":0.5,"pid":1,"tid":1}}'
    lines = [text.format("a", "00.123"), text.format("b", "01.377")]
    for name, content in (("a.jsonl", "\n".join(lines) + "\n"), ("b.json", f'{{"traceEvents":[{",".join(lines)}]}}')):
        root = tmp_path / name.partition(".")[2]
        put(root / name, content)
        found = slices(run(root)[1])
        assert found["b"]["ts"] - found["a"]["ts"] == pytest.approx(1.254, abs=1e-9)


def test_a_display_unit_is_no_unit(tmp_path):
    """A document that says displayTimeUnit ns still counts in µs (row 11)."""
    put(tmp_path / "a.json", json.dumps({"displayTimeUnit": "ns", "traceEvents": [span("a", 5, 7)]}))
    assert slices(run(tmp_path)[1])["a"]["dur"] == 7


def test_a_rank_that_counts_nanoseconds_is_told_and_put_right(tmp_path):
    """Times stay µs by the format; a rank 1,000 times slower than its peers is named, ``--unit`` mends it (row 11)."""
    for rank in range(4):
        scale = 1000 if rank == 2 else 1
        spans = [span("step", 100 * n * scale, (40 + n % 3) * scale, args={"rank": rank}) for n in range(20)]
        put(tmp_path / "run" / "actor" / f"traces_{rank}.jsonl", *spans)
    done = CliRunner().invoke(main, ["stats", str(tmp_path / "run"), "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["problems"]["unit_doubt"] == 1
    done = CliRunner().invoke(main, ["stats", str(tmp_path / "run")])
    assert "actor/2" in done.stderr
    assert "--unit ns" in done.stderr
    bad = tmp_path / "run" / "actor" / "traces_2.jsonl"
    done = CliRunner().invoke(
        main, ["convert", str(bad), "-o", str(tmp_path / "good"), "--unit", "ns", "--to", "jsonl"]
    )
    assert done.exit_code == 0, done.stderr
    (made,) = (tmp_path / "good").rglob("*.jsonl")
    bad.write_bytes(made.read_bytes())
    done = CliRunner().invoke(main, ["stats", str(tmp_path / "run"), "--json"])
    assert "unit_doubt" not in json.loads(done.stdout)["problems"]
    done = CliRunner().invoke(main, ["convert", str(bad), "-o", str(tmp_path / "x.json"), "--unit", "ns"])
    assert done.exit_code == 2
    assert "--to jsonl" in done.stderr


def test_a_rank_that_does_other_things_has_no_doubtful_unit(tmp_path):
    """Only spans of one name are compared, and a slow rank is no rank in another unit."""
    for rank in range(3):
        name, dur = ("load", 50_000) if rank == 1 else ("step", 50 if rank else 5_000)
        spans = [span(name, 100 * n, dur, args={"rank": rank}) for n in range(20)]
        put(tmp_path / "run" / "actor" / f"traces_{rank}.jsonl", *spans)
    done = CliRunner().invoke(main, ["stats", str(tmp_path / "run"), "--json"])
    assert "unit_doubt" not in json.loads(done.stdout)["problems"]


def test_measured_offsets_move_a_host_and_its_bound_is_written(tmp_path):
    """A clock 11 s off with 50 ppm drift is put right by the offsets the run measured; the error is stated (row 21)."""
    put(tmp_path / "controller" / "traces_0.jsonl", header("controller"), span("c", 1000), END)
    boot = {"ref_boot_id": "b", "ref_time_ns": 1, "bound_ns": 4000}
    clocks = [
        {"name": "zbus_clock", "ph": "M", "pid": 7, "args": {"at_ns": at, "offset_ns": round(11e9 + at * 5e-5), **boot}}
        for at in range(0, 10_000_000_001, 1_000_000_000)
    ]
    mono = 5_000_000_000  # own clock at the span; the reference shows 16.00025 s then
    put(
        tmp_path / "actor" / "traces_0.jsonl",
        header(boot_id="x"),
        *clocks[:6],
        span("w", mono / 1000),
        *clocks[6:],
        END,
    )
    report, events = run(tmp_path)
    assert slices(events)["w"]["ts"] == pytest.approx((mono + 11e9 + mono * 5e-5) / 1000, abs=0.01)
    worker = report.processes[1]
    assert worker.clock == "measured"
    assert 4.0 <= worker.clock_bound_us < 4.1
    assert report.problems == {}


def test_offsets_are_straight_lines_between_points_and_beyond():
    """Between two measurements the offset is a straight line; beyond the ends the outer line goes on, within reason."""
    points = [ClockPoint(0, 100, 5, ("b", 1)), ClockPoint(1_000_000, 150, 9, ("b", 1))]
    anchors = [Anchor(0, "controller", clock=("b", 1)), Anchor(0, "actor", clock=("x", 1), points=points)]
    shift = align(anchors)[1]
    assert [shift.moved(ns) - ns for ns in (0, 500_000, 1_000_000, 2_000_000, -1_000_000)] == [100, 125, 150, 200, 50]
    assert (shift.how, shift.bound_ns) == ("measured", 9)


def test_clocks_can_be_matched_otherwise(tmp_path):
    """--align start puts each file's first event to 0, none leaves times as they are, wall asks the wall clocks."""
    put(tmp_path / "controller" / "traces_0.jsonl", span("a", 100), END)
    put(tmp_path / "actor" / "traces_0.jsonl", span("b", 700), END)
    times = {how: {n: e["ts"] for n, e in slices(run(tmp_path, clocks=how)[1]).items()} for how in ("start", "none")}
    assert times == {"start": {"a": 0, "b": 0}, "none": {"a": 100, "b": 700}}


def flow(phase: str, ts: float, ident: object, **more) -> dict:
    """Return an arrow's end."""
    return {"name": "rpc", "cat": "flow", "ph": phase, "id": ident, "ts": ts, "pid": 7, "tid": 7, **more}


def test_arrows_of_other_tools_join_the_right_spans(tmp_path):
    """Where calls overlap, an s and an f go to the span that names their call, across files (rows 23 and 25)."""
    args = [{"args": {"call": f"{n:x}"}} for n in range(3)]
    calls = [span(f"call {n}", 10 + n, 50 + n, **args[n]) for n in range(3)]
    put(tmp_path / "controller" / "traces_0.jsonl", *calls, *[flow("s", 20, f"{n:x}") for n in range(3)])
    runs = [span(f"run {n}", 30 + n, 5 + n, **args[n]) for n in range(3)]
    put(tmp_path / "actor" / "traces_0.jsonl", *runs, *[flow("f", 34, f"{n:x}", bp="e") for n in range(3)])
    report, events = run(tmp_path)
    found = slices(events)
    for n in range(3):
        assert found[f"call {n}"]["bind_id"] == found[f"run {n}"]["bind_id"]
        assert found[f"call {n}"]["flow_out"]
        assert found[f"run {n}"]["flow_in"]
    assert len({found[f"run {n}"]["bind_id"] for n in range(3)}) == 3
    assert report.arrows == {"out": 3, "in": 3, "joined": 3}
    assert not [e for e in events if e["ph"] in "sf"]


def test_arrow_ids_of_one_file_mean_nothing_in_another(tmp_path):
    """Two ranks that count their arrows from 1 are not joined (row 23)."""
    for rank in range(2):
        events = [span("a", 1, 5), flow("s", 2, 1), span("b", 10, 5), flow("f", 11, 1, bp="e")]
        put(tmp_path / "actor" / f"traces_{rank}.jsonl", *events)
    report, events = run(tmp_path)
    assert report.arrows == {"out": 2, "in": 2, "joined": 2}
    assert len({e["bind_id"] for e in events if e["ph"] == "X"}) == 2


def test_an_arrow_outside_of_any_span_is_counted(tmp_path):
    """An s that no span encloses is dropped and told (row 25)."""
    put(tmp_path / "a.jsonl", span("a", 1, 5), flow("s", 50, 1))
    report, events = run(tmp_path)
    assert report.problems == {"arrow_without_span": 1}
    assert [e["ph"] for e in events if e["ph"] != "M"] == ["X"]


def test_arrows_on_begin_and_end_pairs(tmp_path):
    """A flow inside a B/E pair goes to the span made of the pair (row 26)."""
    pair = [
        {"name": "p", "ph": "B", "ts": 1, "pid": 7, "tid": 7},
        flow("s", 2, 1),
        {"ph": "E", "ts": 9, "pid": 7, "tid": 7},
    ]
    put(tmp_path / "a.jsonl", *pair, span("q", 20, 5), flow("f", 21, 1, bp="e"))
    found = slices(run(tmp_path)[1])
    assert found["p"]["bind_id"] == found["q"]["bind_id"]


def test_a_span_with_two_arrows_keeps_both(tmp_path):
    """A second arrow of one span stays an s/f pair with an id of this file."""
    events = [span("a", 1, 9), flow("s", 2, 1), flow("s", 3, 2), span("b", 20, 5), flow("f", 21, 1), span("c", 30, 5)]
    put(tmp_path / "a.jsonl", *events, flow("f", 31, 2))
    report, found = run(tmp_path)
    assert report.arrows == {"out": 2, "in": 2, "joined": 2}
    kept = [e for e in found if e["ph"] in "sf"]
    assert len(kept) in (2, 4)
    assert len({e["id"] for e in kept}) == len(kept) / 2


@pytest.mark.parametrize(("rank", "kept"), [('"0"', 0), ("0.0", 0), ("true", None), ("-1", None), ('"x"', None)])
def test_ranks_of_odd_types(tmp_path, rank, kept):
    """A rank in quotes or with a fraction of 0 is read; anything else is not believed (row 31)."""
    put(
        tmp_path / "x.jsonl",
        '{"name":"process_name","ph":"M","pid":7,"args":{"name":"p","rank":RANK}}\n'.replace("RANK", rank),
        span("a", 1),
    )
    assert run(tmp_path)[0].processes[0].rank == kept


def test_roles_are_trimmed_and_near_equal_ones_told(tmp_path):
    """Blanks around a role go; two roles that differ by case stay apart with a warning (row 32)."""
    put(tmp_path / "a" / "traces_0.jsonl", header(" actor "), span("a", 1), END)
    put(tmp_path / "b" / "traces_1.jsonl", header("Actor", 1), span("b", 1), END)
    report, _ = run(tmp_path)
    assert [p.role for p in report.processes] == ["actor", "Actor"]
    assert report.problems == {"near_equal_roles": 1}


def test_zstandard_is_read_where_the_package_is(tmp_path):
    """A .zst file is read, or named with what to install (row 33)."""
    zstandard = pytest.importorskip("zstandard", reason="pip install zstandard")
    good = (json.dumps(span("a", 1)) + "\n").encode()
    (tmp_path / "traces_0.jsonl.zst").write_bytes(zstandard.compress(good) + zstandard.compress(good))
    assert run(tmp_path)[0].spans == 2
    (tmp_path / "traces_0.jsonl.zst").write_bytes(zstandard.compress(good * 1000)[:-10])
    assert run(tmp_path)[0].spans <= 1000


def test_gz_output_is_one_member(tmp_path):
    """A merge of many files to .gz is a single gzip member, whatever number of processes made it (row 33)."""
    for rank in range(5):
        put(tmp_path / "actor" / f"traces_{rank}.jsonl", *[span(f"s{n}", n * 2) for n in range(500)])
    for jobs in (1, 2):
        merge([str(tmp_path / "actor")], tmp_path / "out.json.gz", jobs=jobs)
        data = (tmp_path / "out.json.gz").read_bytes()
        import zlib

        inflate = zlib.decompressobj(31)
        text = inflate.decompress(data)
        assert inflate.eof
        assert inflate.unused_data == b""
        assert len([e for e in json.loads(text)["traceEvents"] if e["ph"] == "X"]) == 2500


def test_any_number_of_processes_gives_the_same(tmp_path):
    """One process or three: the same output byte for byte, the same report but for the time."""
    for rank in range(6):
        events = [span(f"s{n}", n * 2, 3, tid=n % 3, track=f"t{n % 4}") for n in range(300)]
        put(tmp_path / "actor" / f"traces_{rank}.jsonl", header(rank=rank), *events, '{"torn', END if rank else "")
    outputs, reports = [], []
    for jobs in (1, 3):
        report = merge([str(tmp_path / "actor")], tmp_path / "out.json", jobs=jobs)
        outputs.append((tmp_path / "out.json").read_bytes())
        reports.append((report.problems, report.arrows, report.lanes, report.spans))
    assert outputs[0] == outputs[1]
    assert reports[0] == reports[1]


@pytest.mark.parametrize("segment", [50, 333])
def test_a_file_in_many_segments_has_all_spans_and_no_overlap(tmp_path, segment):
    """A file larger than what is laid out at once loses nothing, and nothing overlaps on a row."""
    events = [span(f"s{n}", n * 2, 3 + (n % 50) * 9, tid=n % 3) for n in range(1000)]
    put(tmp_path / "a.jsonl", *sorted(events, key=lambda e: e["ts"] + e["dur"]))
    report, merged = run(tmp_path, segment=segment, run_events=20)
    assert report.spans == 1000
    rows: dict[int, list[tuple[int, int]]] = {}
    for e in merged:
        if e["ph"] == "X":
            start = round(e["ts"] * 1000)
            rows.setdefault(e["tid"], []).append((start, -start - round(e["dur"] * 1000)))
    for row in rows.values():
        stack: list[int] = []
        for start, minus_end in sorted(row):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or -minus_end <= stack[-1]
            stack.append(-minus_end)


def test_large_outputs_are_told_and_filters_make_them_small(tmp_path, monkeypatch):
    """Above what viewers like there is a warning; --min-dur, --since, --until and --category cut it down (row 37)."""
    monkeypatch.setattr("traceview.merge._BIG_EVENTS", 10)
    events = [span(f"s{n}", n * 10, n, cat="a" if n % 2 else "b") for n in range(20)]
    put(tmp_path / "a.jsonl", *events, {"name": "q", "ph": "C", "ts": 1, "pid": 7, "args": {"n": 1}})
    put(tmp_path / "b.jsonl", span("zero", 0))
    assert run(tmp_path)[0].problems["large"] == 1
    out = tmp_path / "out.json"

    def kept(*options: str) -> set[str]:
        done = CliRunner().invoke(main, ["merge", str(tmp_path / "a.jsonl"), "-o", str(out), "-q", *options])
        assert done.exit_code == 0, done.stderr
        return set(slices(json.loads(out.read_text())["traceEvents"]))

    assert kept("--min-dur", "15us") == {f"s{n}" for n in range(15, 20)}
    assert kept("--since", "150us", "--until", "171us") == {"s14", "s15", "s16", "s17"}
    assert kept("--category", "a") == {f"s{n}" for n in range(1, 20, 2)}
    assert CliRunner().invoke(main, ["merge", str(tmp_path), "--min-dur", "x"]).exit_code == 2


def test_a_renamed_thread_has_its_last_name_first(tmp_path):
    """Of two names of one thread the last wins and the other stays readable (row 39)."""
    names = [{"name": "thread_name", "ph": "M", "pid": 7, "tid": 7, "args": {"name": n}} for n in ("old", "new")]
    put(tmp_path / "a.jsonl", names[0], span("a", 1), names[1])
    _, events = run(tmp_path)
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["new ← old"]


def test_a_spill_belongs_to_its_process_and_blocks_count_once(tmp_path):
    """A process's spill is read with its file; a block that both hold is taken once."""
    source = {"source": "ab", "boot_id": "b"}
    line = json.dumps(span("one", 1)) + "\n"

    def block(seq: int) -> dict:
        args = {"source": "ab", "seq": seq, "records": 1, "bytes": len(line)}
        return {"name": "zbus_block", "ph": "M", "pid": 7, "args": args}

    two = line.replace("one", "two")
    put(tmp_path / "actor" / "traces_0.jsonl", header(**source), block(0), line, END)
    put(tmp_path / "actor" / "traces_0.spill.jsonl", header(**source), block(0), line, block(1), two)
    report, events = run(tmp_path)
    assert sorted(e["name"] for e in events if e["ph"] == "X") == ["one", "two"]
    assert len(report.processes) == 1


def test_a_tree_with_loops_and_doubles_is_walked_once(tmp_path):
    """A symbolic link to a parent folder does not go round; a file with two names is read once (row 36)."""
    put(tmp_path / "t" / "actor" / "traces_0.jsonl", header(), span("a", 1), END)
    (tmp_path / "t" / "actor" / "loop").symlink_to(tmp_path / "t")
    os.link(tmp_path / "t" / "actor" / "traces_0.jsonl", tmp_path / "t" / "actor" / "traces_9.jsonl")
    assert run(tmp_path)[0].spans == 1


def test_the_report_is_written_where_asked(tmp_path):
    """--report writes the JSON report; --add takes a file of another tool in."""
    put(tmp_path / "t" / "actor" / "traces_0.jsonl", header(), span("a", 1), END)
    other = put(tmp_path / "torch.json", json.dumps({"traceEvents": [span("op", 3)]}))
    args = ["merge", str(tmp_path / "t"), "--add", str(other), "-o", str(tmp_path / "o.pftrace")]
    done = CliRunner().invoke(main, [*args, "--report", str(tmp_path / "r.json")])
    report = json.loads((tmp_path / "r.json").read_text())
    assert (done.exit_code, report["format"], report["spans"]) == (0, "perfetto", 2)


# -- validate and convert ------------------------------------------------------------------------------------------


def test_repair_writes_what_is_good_and_leaves_the_input(tmp_path):
    """A repair gives files that validate without damage; inputs stay, nothing is overwritten."""
    torn = '{"name":"x","ph":"X","ts'
    path = put(
        tmp_path / "in" / "actor" / "traces_0.jsonl",
        header(),
        span("a", 1),
        '{"to{"bad\n',
        span("b", -5, -1),
        END,
        torn,
    )
    before = path.read_bytes()
    fixed = tmp_path / "fixed"
    call = CliRunner().invoke
    assert call(main, ["validate", str(tmp_path / "in")]).exit_code == 10
    done = call(main, ["validate", str(tmp_path / "in"), "--repair", "-o", str(fixed)])
    assert done.exit_code == 0, done.stderr
    assert path.read_bytes() == before
    assert call(main, ["validate", str(fixed)]).exit_code == 0
    names = [json.loads(line)["name"] for line in (fixed / "actor" / "traces_0.jsonl").read_text().splitlines()]
    assert names == ["zbus_meta", "a", "b", "zbus_end"]
    assert call(main, ["validate", str(tmp_path / "in"), "--repair", "-o", str(fixed)]).exit_code == 5
    assert call(main, ["validate", str(tmp_path / "in"), "--repair"]).exit_code == 2


def test_a_missing_rank_is_named(tmp_path):
    """A hole in the ranks of a role is a finding."""
    for rank in (0, 2):
        put(tmp_path / "actor" / f"traces_{rank}.jsonl", header(rank=rank), span("a", 1), END)
    done = CliRunner().invoke(main, ["validate", str(tmp_path), "--json"])
    assert json.loads(done.stdout)["problems"] == {"missing_rank": 1}


AREAL = [
    {"name": "process_name", "ph": "M", "pid": 9, "args": {"name": "[actor] Rank 0, Process"}},
    {
        "name": "train",
        "ph": "X",
        "ts": 100,
        "dur": 50,
        "pid": 9,
        "tid": 9,
        "cat": "compute",
        "args": {"rank": 0, "role": "actor"},
    },
    {
        "name": "fwd",
        "ph": "X",
        "ts": 110,
        "dur": 20,
        "pid": 9,
        "tid": 9,
        "cat": "compute",
        "args": {"rank": 0, "role": "actor"},
    },
]
KINETO = {
    "schemaVersion": 1,
    "distributedInfo": {"rank": 3, "world_size": 4},
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 50, "tid": 50, "ts": 1796000000000000.5, "dur": 3.25},
        {"ph": "M", "name": "process_name", "pid": 50, "args": {"name": "python"}},
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "PyTorch",
            "ts": 1796000000000000,
            "dur": 9,
        },
        {"ph": "s", "id": 1, "pid": 50, "tid": 50, "ts": 1796000000000001, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 1, "pid": 0, "tid": 7, "ts": 1796000000000006, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1796000000000006, "dur": 2},
    ],
}
VIZTRACER = {
    "traceEvents": [
        {"ph": "M", "pid": 5, "tid": 5, "name": "process_name", "args": {"name": "MainProcess"}},
        {"ph": "X", "cat": "FEE", "name": "f (a.py:1)", "pid": 5, "tid": 5, "ts": 10.5, "dur": 7.25},
        {"ph": "X", "cat": "FEE", "name": "g (a.py:5)", "pid": 5, "tid": 5, "ts": 11.0, "dur": 1.0},
    ],
    "viztracer_metadata": {"version": "1.1.1"},
}


def foreign(root: Path, kind: str) -> Path:
    """Write a small trace as another tool does."""
    if kind == "areal":
        return put(root / "perf_tracer" / "actor" / "traces-r0.jsonl", *AREAL)
    if kind == "kineto":
        path = root / "rank3.pt.trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps(KINETO, indent=2).encode()))
        return path
    return put(root / "viz.json", json.dumps(VIZTRACER))


@pytest.mark.parametrize(("kind", "spans"), [("areal", 2), ("kineto", 3), ("viztracer", 2)])
@pytest.mark.parametrize("form", ["chrome", "perfetto", "jsonl", "otlp"])
def test_traces_of_other_tools_convert(tmp_path, kind, spans, form):
    """Files as AReaL, torch.profiler and VizTracer write them convert to every format, with all their spans."""
    source = foreign(tmp_path, kind)
    output = tmp_path / "out"
    done = CliRunner().invoke(main, ["convert", str(source), "-o", str(output), "--to", form, "--json"])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["spans"], report["format"]) == ("zbus.traceview.convert/1", spans, form)
    if form == "jsonl":
        again = merge([str(output)], tmp_path / "again.json")
        assert again.spans == spans
        assert all("text_id" not in path.read_text() for path in output.rglob("*.jsonl"))
    elif form == "otlp":
        found = [
            s for r in json.loads(output.read_text())["resourceSpans"] for x in r["scopeSpans"] for s in x["spans"]
        ]
        assert len(found) == spans
        assert all(int(s["endTimeUnixNano"]) >= int(s["startTimeUnixNano"]) for s in found)
        assert len({s["spanId"] for s in found}) == spans
        assert {len(s["traceId"]) for s in found} == {32}
        inner = next((s for s in found if s["name"] in ("fwd", "g (a.py:5)")), None)
        assert kind == "kineto" or (inner is not None and "parentSpanId" in inner)


def test_args_spread_over_lines_stay_on_one(tmp_path):
    """A pretty-printed document becomes JSON lines, converted or repaired, that are read whole again."""
    put(
        tmp_path / "p.json",
        json.dumps({"traceEvents": [span("a", 1, args={"x": [1, {"y": "l\nm"}]}), span("b", 9)]}, indent=2),
    )
    call = CliRunner().invoke
    assert (
        call(main, ["convert", str(tmp_path / "p.json"), "-o", str(tmp_path / "lines"), "--to", "jsonl"]).exit_code == 0
    )
    assert call(main, ["validate", str(tmp_path / "p.json"), "--repair", "-o", str(tmp_path / "fixed")]).exit_code == 0
    for made in ("lines", "fixed"):
        report = merge([str(tmp_path / made)], tmp_path / "again.json")
        assert (report.spans, report.problems) == (2, {})
        args = slices(json.loads((tmp_path / "again.json").read_text())["traceEvents"])["a"]["args"]
        assert args == {"x": [1, {"y": "l\nm"}]}


def test_no_name_in_a_trace_leads_out_of_the_output(tmp_path):
    """Roles, ranks, process names and sessions full of ``..`` and ``/`` write below the directory that was named."""
    evil = ["../../escape", "/etc/escape", "..", "a/../../escape", "nul\u0000x", "C:\\escape"]
    for at, name in enumerate(evil):
        process = {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": name, "role": name, "rank": at}}
        put(tmp_path / "in" / "deep" / f"traces_{at}.jsonl", header(name, at), process, span(name, 1), END)
        put(tmp_path / "in" / "deep" / f"sessions_{at}.jsonl", {"task_id": name, "role": name, "submit_ts": 0.0})
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    call = CliRunner().invoke
    out = tmp_path / "a" / "b" / "c"
    out.mkdir(parents=True)
    for args in (
        ["convert", "-o", str(out / "lines"), "--to", "jsonl"],
        ["validate", "--repair", "-o", str(out / "fixed")],
        ["merge", "-o", str(out / "merged.json")],
        ["report", "-o", str(out / "report.html")],
        ["sessions", "-o", str(out / "sessions.html"), "--csv", str(out / "sessions.csv")],
    ):
        done = call(main, [args[0], str(tmp_path / "in"), *args[1:]])
        assert done.exit_code in (0, 10), done.output
    made = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert len(made) >= 2 * len(evil) + 4
    assert [path for path in made if not path.resolve().is_relative_to(out)] == []
    assert not Path("/etc/escape").exists()


def test_an_unknown_suffix_asks_for_the_format(tmp_path):
    """A conversion does not guess."""
    done = CliRunner().invoke(main, ["convert", str(foreign(tmp_path, "viztracer")), "-o", str(tmp_path / "x.bin")])
    assert done.exit_code == 2
    assert "--to" in done.stderr
