from __future__ import annotations

import errno
import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from traceview.merge import MergeReport, merge
from traceview.problems import InputError, OutputError
from traceview.reader import default_output
from zbus import trace
from zbus.trace.tracer import Tracer
from zbus.trace.writer import TraceWriter


def event(name: str, ts: float, dur: float = 1.0, **more) -> dict:
    """Return a span."""
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 7, "tid": 7, **more}


def header(role: str = "actor", rank: int = 0, **more) -> dict:
    """Return an opening metadata event."""
    args = {"format": 1, "run": "e/t", "role": role, "rank": rank, "boot_id": "b", "time_ns": 1, "pid": 7}
    args |= {"mono_ns": 1000, "wall_ns": 1_796_000_000_000_000_000, "epoch_mono_ns": 0, **more}
    return {"name": "zbus_meta", "ph": "M", "ts": 0.0, "pid": 7, "args": args}


END = {"name": "zbus_end", "ph": "M", "ts": 9.0, "pid": 7, "args": {"recorded": 1, "written": 1, "lost": {}}}


def put(path: Path, *events: dict | bytes) -> Path:
    """Write a trace file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(e if isinstance(e, bytes) else json.dumps(e).encode() + b"\n" for e in events))
    return path


def load(path: Path) -> list[dict]:
    """Return the events of a merged file, which must be strict JSON."""

    def refuse(constant):
        raise AssertionError(constant)

    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return json.loads(text, parse_constant=refuse)["traceEvents"]


def run(root: Path, *more, **kwargs) -> tuple[MergeReport, list[dict]]:
    """Merge a directory."""
    output = root / "out.json"
    report = merge([str(root)], output, *more, **kwargs)
    return report, load(output)


def slices(events: list[dict]) -> list[dict]:
    """Return the spans."""
    return [e for e in events if e["ph"] == "X"]


def thread_names(events: list[dict]) -> dict[int, str]:
    """Return the thread names by tid."""
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def process_names(events: list[dict]) -> dict[int, str]:
    """Return the process names by pid."""
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}


def overlaps(events: list[dict]) -> int:
    """Count spans on one tid that overlap an earlier one without being inside it, as a viewer would drop them."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for e in slices(events):
        start = round(e["ts"] * 1000)
        rows.setdefault(e["tid"], []).append((start, -round(e["dur"] * 1000)))
    bad = 0
    for row in rows.values():
        stack: list[int] = []
        for start, minus in sorted(row):
            while stack and stack[-1] <= start:
                stack.pop()
            bad += bool(stack) and start - minus > stack[-1]
            stack.append(start - minus)
    return bad


def test_pids_and_tids_become_unique_and_names_stay(tmp_path):
    """Ranks that share a pid get rows of their own, with their own process and thread names (rows 18 and B71)."""
    name = {"name": "thread_name", "ph": "M", "pid": 7, "tid": 7, "args": {"name": "EngineWorker"}}
    for rank in range(3):
        process = {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": f"actor/{rank} (host)"}}
        put(tmp_path / "actor" / f"traces_{rank}.jsonl", header(rank=rank), process, name, event("a", 1), END)
    report, events = run(tmp_path)
    assert len({e["pid"] for e in slices(events)}) == len({e["tid"] for e in slices(events)}) == 3
    assert sorted(process_names(events).values()) == [f"actor/{rank} (host)" for rank in range(3)]
    assert set(thread_names(events).values()) == {"EngineWorker"}
    assert not report.incomplete


def test_events_without_any_metadata_get_a_row_named_by_their_file(tmp_path):
    """Role and rank from the path, else the file's name, name a process that says nothing (rows 30 and B76)."""
    put(tmp_path / "actor" / "traces_4.jsonl", event("a", 1))
    put(tmp_path / "odd.jsonl", event("b", 1))
    _, events = run(tmp_path)
    assert sorted(process_names(events).values()) == ["actor/4", "odd.jsonl"]


def test_a_restarted_process_in_the_same_file_gets_a_row_of_its_own(tmp_path):
    """A second header in a file begins a new process, though the pid is the same (rows 19 and B75)."""
    path = tmp_path / "actor" / "traces_0.jsonl"
    put(path, header(), event("a", 5), header(), event("b", 1), END)
    report, events = run(tmp_path)
    assert len({e["pid"] for e in slices(events)}) == 2
    assert sorted(process_names(events).values()) == ["actor/0", "actor/0 #2"]
    assert report.problems == {"no_end": 1}


def test_overlapping_spans_of_one_thread_are_laid_out_in_lanes(tmp_path):
    """Nothing overlaps on a tid afterwards; added rows are named after the thread (rows 15 and B70)."""
    calls = [event(f"call {n}", n, 10, track=f"c{n}") for n in range(5)]
    parts = [event(f"part {n}", n, 3, track=f"c{n}") for n in range(5)]
    put(tmp_path / "actor" / "traces_0.jsonl", *calls, *parts)
    report, events = run(tmp_path)
    assert overlaps(events) == 0
    assert len(slices(events)) == 10
    assert report.lanes == 4
    assert sorted(thread_names(events).values()) == ["thread 7", *(f"thread 7 ({n})" for n in range(2, 6))]
    rows = {e["name"]: e["tid"] for e in slices(events)}
    assert all(rows[f"call {n}"] == rows[f"part {n}"] for n in range(5))


def test_an_enclosing_span_comes_before_what_it_encloses(tmp_path):
    """At equal starts the parent is written first, though it ended later (row B76)."""
    put(tmp_path / "actor" / "traces_0.jsonl", event("child", 5, 1), event("parent", 5, 9))
    assert [e["name"] for e in slices(run(tmp_path)[1])] == ["parent", "child"]


def test_a_child_never_leaves_its_parent_by_rounding(tmp_path):
    """Ends are rounded, not durations, so that nesting survives (row B82)."""
    put(tmp_path / "actor" / "traces_0.jsonl", event("p", 0.0004, 10.0003), event("c", 5.0006, 5.0001))
    _, events = run(tmp_path)
    parent, child = slices(events)
    assert child["ts"] + child["dur"] <= parent["ts"] + parent["dur"] + 1e-9
    assert parent["tid"] == child["tid"]


def test_clocks_of_one_boot_are_joined_exactly(tmp_path):
    """The same instant in two processes that began at different times is shown at one time (row B61)."""
    put(tmp_path / "controller" / "traces_0.jsonl", header("controller"), event("a", 100.0), END)
    put(tmp_path / "actor" / "traces_0.jsonl", header(epoch_mono_ns=60_000), event("b", 40.0), END)
    report, events = run(tmp_path)
    assert [e["ts"] for e in slices(events)] == [100.0, 100.0]
    assert [(p.clock, p.shift_us) for p in report.processes] == [("reference", 0.0), ("shared", 60.0)]


def test_another_hosts_clock_is_a_stated_doubt(tmp_path):
    """A rank matched by wall clock is kept and marked; that is doubt, not missing data (row 21)."""
    put(tmp_path / "controller" / "traces_0.jsonl", header("controller"), event("a", 100.0), END)
    put(tmp_path / "actor" / "traces_0.jsonl", header(boot_id="other"), event("b", 40.0), END)
    report, _ = run(tmp_path)
    assert report.problems == {"clock_by_wall": 1}
    assert not report.incomplete


def test_files_of_an_older_run_are_left_out_unless_asked_for(tmp_path):
    """An old run left in the tree is skipped with its name, or kept apart (row 20)."""
    put(tmp_path / "actor" / "traces_0.jsonl", header(run="new", wall_ns=2_000), event("a", 1), END)
    put(tmp_path / "critic" / "traces_0.jsonl", header(run="old", wall_ns=1_000), event("b", 1), END)
    report, events = run(tmp_path)
    assert ([e["name"] for e in slices(events)], report.problems) == (["a"], {"other_run": 1})
    assert len(slices(run(tmp_path, all_runs=True)[1])) == 2


def test_begin_and_end_become_spans_and_unmatched_ones_are_told(tmp_path):
    """B/E pairs nest; an end without begin is dropped; an open begin is closed as unfinished (rows 16 and 17)."""
    path = tmp_path / "actor" / "traces_0.jsonl"
    put(
        path,
        {"name": "x", "ph": "E", "ts": 1, "pid": 7, "tid": 7},
        {"name": "outer", "ph": "B", "ts": 2, "pid": 7, "tid": 7, "args": {"a": 1}},
        {"name": "inner", "ph": "B", "ts": 3, "pid": 7, "tid": 7},
        {"ph": "E", "ts": 5, "pid": 7, "tid": 7, "args": {"b": 2}},
        event("later", 8, 2),
    )
    report, events = run(tmp_path)
    found = {e["name"]: (e["ts"], e["dur"], e.get("args")) for e in slices(events)}
    assert found["inner"] == (3, 2, {"b": 2})
    assert found["outer"] == (2, 8, {"a": 1, "unfinished": True})
    assert report.problems["end_without_begin"] == report.problems["unfinished_span"] == 1


def test_durations_are_repaired_and_zero_stays_zero(tmp_path):
    """A negative or missing duration is 0 and counted; 0 is not made longer (rows 13 and 14)."""
    missing = {"name": "c", "ph": "X", "ts": 3, "pid": 7, "tid": 7}
    put(tmp_path / "actor" / "traces_0.jsonl", event("a", 1, -5), event("b", 2, 0), missing)
    report, events = run(tmp_path)
    assert [e["dur"] for e in slices(events)] == [0, 0, 0]
    assert report.problems == {"negative_dur": 1, "no_dur": 1}


def test_counters_keep_their_numbers_only(tmp_path):
    """Texts and rank tags in a counter are no series; one without numbers is dropped (row 27)."""

    def count(name, **args):
        return {"name": name, "ph": "C", "ts": 1, "pid": 7, "args": args}

    put(tmp_path / "actor" / "traces_0.jsonl", count("q", rank=3, role="a", n=5), count("none", role="a"))
    report, events = run(tmp_path)
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"n": 5}]
    assert report.problems == {"counter_without_numbers": 1}


def test_no_time_is_negative_after_shifting(tmp_path):
    """A file that begins before the reference moves the whole run (row 12)."""
    put(tmp_path / "controller" / "traces_0.jsonl", header("controller", epoch_mono_ns=90_000), event("a", 1), END)
    put(tmp_path / "actor" / "traces_0.jsonl", header(), event("b", 1), END)
    _, events = run(tmp_path)
    assert {e["name"]: e["ts"] for e in slices(events)} == {"a": 91.0, "b": 1.0}


def test_two_processes_in_one_file_are_told(tmp_path):
    """Interleaved writers of one file are kept apart and the file is suspected (row 3)."""
    other = header(rank=1)
    other["pid"] = 8
    put(tmp_path / "a.jsonl", header(), other, event("a", 1), event("b", 2, pid=8), END, {**END, "pid": 8})
    report, events = run(tmp_path)
    assert len({e["pid"] for e in slices(events)}) == 2
    assert report.problems == {"shared_file": 2}


def test_a_reported_loss_is_a_visible_slice(tmp_path):
    """Lost records are shown where they were lost and counted in the report (row 40)."""
    args = {"reason": "ring_full", "lost": 1200, "since_us": 10.0, "until_us": 30.0}
    loss = {"name": "zbus_loss", "ph": "M", "ts": 30.0, "pid": 7, "args": args}
    put(tmp_path / "actor" / "traces_0.jsonl", header(), event("a", 1), loss, END)
    report, events = run(tmp_path)
    [shown] = [e for e in slices(events) if e["name"].startswith("lost")]
    assert (shown["name"], shown["ts"], shown["dur"]) == ("lost 1200 records (ring_full)", 10, 20)
    assert report.problems["lost"] == 1200
    assert report.incomplete


def test_a_newer_format_is_read_as_far_as_known(tmp_path):
    """A file of a later format version is merged with a warning."""
    put(tmp_path / "actor" / "traces_0.jsonl", header(format=99), event("a", 1), END)
    report, events = run(tmp_path)
    assert (len(slices(events)), report.problems) == (1, {"newer_format": 1})


def test_one_bad_file_never_aborts_the_rest(tmp_path):
    """Torn, empty, foreign and binary files beside a good one cost nothing of it (row B72)."""
    put(tmp_path / "a" / "traces_0.jsonl", header(), event("good", 1), END)
    put(tmp_path / "a" / "traces_1.jsonl", header(), b'{"name":"b","ph":"X","ts')
    put(tmp_path / "a" / "traces_2.jsonl")
    put(tmp_path / "a" / "traces_3.jsonl", b'{"task_id":1}\n')
    put(tmp_path / "a" / "traces_4.jsonl", os.urandom(1000))
    put(tmp_path / "a" / "traces_5.jsonl.gz", gzip.compress(b"x" * 1000)[:20])
    report, events = run(tmp_path)
    assert [e["name"] for e in slices(events)] == ["good"]
    assert report.incomplete
    assert any(text.startswith("a/traces_1.jsonl:2 cut off") for _, text in report.warnings)


def test_only_the_roles_and_ranks_asked_for(tmp_path):
    """Filters by role and rank keep what they name; a filter that keeps nothing is an error."""
    for role in ("actor", "critic"):
        for rank in range(2):
            path = tmp_path / role / f"traces_{rank}.jsonl"
            put(path, header(role, rank), event(f"{role}{rank}", 1), END)
    names = [e["name"] for e in slices(run(tmp_path, roles=["actor"], ranks=[1])[1])]
    assert names == ["actor1"]
    with pytest.raises(InputError, match="roles and ranks"):
        run(tmp_path, roles=["nobody"])


def test_the_output_is_never_an_input(tmp_path):
    """An output that is one of the inputs, under any name, is refused and left as it was (row B73)."""
    one = put(tmp_path / "traces_0.jsonl", event("a", 1))
    two = put(tmp_path / "traces_1.jsonl", event("b", 1))
    link = tmp_path / "link.json"
    link.symlink_to(two)
    before = two.read_bytes()
    for output in (two, link):
        with pytest.raises(InputError):
            merge([str(one), str(two)], output)
    with pytest.raises(InputError, match="looks like a trace of one rank"):
        merge([str(one)], two)
    assert two.read_bytes() == before


def test_a_merge_again_replaces_the_merge_before(tmp_path):
    """Merging a tree twice gives the same, although the first result lies in the tree."""
    put(tmp_path / "actor" / "traces_0.jsonl", header(), event("a", 1), END)
    output = default_output([str(tmp_path)])
    assert output == tmp_path / "merged.json.gz"
    first = merge([str(tmp_path)], output).events
    assert merge([str(tmp_path)], output).events == first == 1


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, monkeypatch):
    """When the output cannot be written the temporary file is gone, an older output stays (row 38)."""
    put(tmp_path / "actor" / "traces_0.jsonl", header(), event("a", 1), END)
    (tmp_path / "out.json").write_text("older")

    def write(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("traceview.output.os.write", write)
    with pytest.raises(OutputError, match="No space left") as error:
        run(tmp_path)
    monkeypatch.undo()
    assert error.value.exit_code == 5
    assert (tmp_path / "out.json").read_text() == "older"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["actor", "out.json"]


def test_spilled_runs_give_the_same_order_as_memory(tmp_path):
    """Sorting in several runs on disk equals sorting in memory, so a file may have any size."""
    count = 1000
    mixed = [event(f"e{n}", (n * 7919) % count, n % 13, args={"n": n}) for n in range(count)]
    put(tmp_path / "actor" / "traces_0.jsonl", *mixed)
    whole = run(tmp_path)[1]
    spilled = run(tmp_path, run_events=64)[1]
    assert spilled == whole
    assert len(slices(whole)) == count
    assert sorted(p.name for p in tmp_path.iterdir()) == ["actor", "out.json"]
    assert overlaps(whole) == 0


def test_async_ids_stay_within_their_process(tmp_path):
    """Two ranks that use the same async id are not joined into one track."""
    for rank in range(2):
        begin = {"name": "a", "cat": "c", "ph": "b", "ts": 1, "pid": 7, "tid": 7, "id": 5}
        put(tmp_path / "a" / f"traces_{rank}.jsonl", begin, {**begin, "ph": "e", "ts": 2})
    _, events = run(tmp_path)
    found = [e for e in events if e["ph"] in "be"]
    assert all(e["id2"] == {"local": "5"} and "id" not in e for e in found)
    assert len({e["pid"] for e in found}) == 2


def record_run(root: Path, calls: int) -> None:
    """Write what a controller and two workers record of overlapping calls, one of them retried."""
    config = trace.TraceConfig(root=str(root), level="rpc", run="e/t", flush_period_s=10)
    session = bytes(16)
    writers = {}
    for role, rank in (("controller", 0), ("actor", 0), ("actor", 1)):
        tracer = Tracer(role, rank)
        writers[role, rank] = TraceWriter(tracer, config)
        tracer.set_level("rpc")
        writers[role, rank].open()
    start = writers["controller", 0].tracer.now()
    for n in range(calls):
        for rank in range(2):
            at = start + n * 1000
            for attempt in (1, 2) if n == 3 else (1,):
                ids = (session, f"actor/{rank}", 9, "main", n, attempt, "train")
                done = (at + 5000, at + 5100, 10, 20, "OK")
                writers["controller", 0].tracer.bus_client(*ids, at, at + 100, at + 200, *done)
                writers["actor", rank].tracer.bus_server(*ids, at + 300, at + 400, at + 450, at + 490, at + 499, "OK")
                at += 50
    for writer in writers.values():
        writer.close()


def test_arrows_from_the_controller_to_its_workers_survive_the_merge(tmp_path):
    """Every attempt has a request and a reply arrow, each with both ends, in different processes (row B76)."""
    record_run(tmp_path, 20)
    report, events = run(tmp_path)
    out = {e["bind_id"]: e for e in slices(events) if e.get("flow_out")}
    into = {e["bind_id"]: e for e in slices(events) if e.get("flow_in")}
    assert set(out) == set(into)
    assert len(out) == 2 * 2 * 21
    for bind_id, source in out.items():
        target = into[bind_id]
        assert source["pid"] != target["pid"]
        assert source["args"]["call"] == target["args"]["call"]
        assert source["ts"] <= target["ts"]
    assert report.arrows == {"out": 84, "in": 84, "joined": 84}


def test_overlapping_calls_do_not_overlap_on_any_row(tmp_path):
    """A merged run of pipelined calls has all its spans and no overlap; each call keeps its phases together."""
    record_run(tmp_path, 20)
    report, events = run(tmp_path)
    assert overlaps(events) == 0
    kinds = Counter(e["args"]["kind"] for e in slices(events))
    assert set(kinds.values()) == {42}
    for call in {e["args"]["call"] for e in slices(events)}:
        own = [e for e in slices(events) if e["args"]["call"] == call and e["args"]["kind"] in ("client", "wire")]
        assert len({e["pid"] for e in own}) == 1
    assert not report.incomplete
    assert [p.name.partition(" ")[0] for p in report.processes] == ["controller/0", "actor/0", "actor/1"]
