from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from traceview.event import Event
from traceview.problems import InputError, Problems
from traceview.reader import Source, find_sources, read_events, source_identity

GOOD = b'{"name":"good","ph":"X","ts":1,"dur":2,"pid":1,"tid":1}\n'


def read(tmp_path: Path, data: bytes, name: str = "traces_0.jsonl") -> tuple[list[Event], dict[str, int]]:
    """Read one file with this content: its events and the problems by kind."""
    path = tmp_path / name
    path.write_bytes(data)
    problems = Problems()
    events = list(read_events(Source(path, name), problems))
    return events, problems.by_kind()


def names(events: list[Event]) -> list[str]:
    """Return the names of events."""
    return [event.name for event in events]


def args_of(event: Event) -> dict:
    """Return an event's args, which must be strict JSON."""

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(bytes(event.args), parse_constant=refuse)


@pytest.mark.parametrize("cut", range(1, len(GOOD) - 2))
def test_a_last_line_cut_anywhere_costs_only_itself(tmp_path, cut):
    """All before a torn last line is kept, and the line is counted (rows 1 and B72)."""
    events, problems = read(tmp_path, GOOD + GOOD[:cut])
    assert (names(events), problems) == (["good"], {"truncated_tail": 1})


def test_a_whole_last_line_without_newline_is_kept(tmp_path):
    """A missing newline alone is no damage."""
    assert read(tmp_path, GOOD + GOOD.strip())[1] == {}


def test_a_torn_line_with_a_good_object_behind_it_gives_the_good_one(tmp_path):
    """What a restarted process appended to its predecessor's torn line is recovered (row 2)."""
    events, problems = read(tmp_path, b'{"name":"a","p' + GOOD + GOOD)
    assert (names(events), problems) == (["good", "good"], {"bad_line": 1})


def test_nul_bytes_are_skipped(tmp_path):
    """A block of NULs left by a host crash is skipped and counted, the line behind it kept (row 4)."""
    events, problems = read(tmp_path, GOOD + b"\0" * 64 + GOOD)
    assert (names(events), problems) == (["good", "good"], {"nul_bytes": 1})


def test_invalid_utf8_is_replaced(tmp_path):
    """A byte that is no UTF-8 becomes U+FFFD, in names and in args (row 5)."""
    line = b'{"name":"a\xff","ph":"i","ts":1,"args":{"k":"b\xfe"}}\n'
    [event], problems = read(tmp_path, line)
    assert (event.name, args_of(event), problems) == ("a\ufffd", {"k": "b\ufffd"}, {"bad_utf8": 1})


def test_raw_control_characters_are_kept_escaped(tmp_path):
    """A raw control character inside a string does not cost the event (row 6)."""
    [event], _ = read(tmp_path, b'{"name":"a\x01b","ph":"i","ts":1,"args":{"k":"\t"}}\n')
    assert (event.name, args_of(event)) == ("a\x01b", {"k": "\t"})


def test_nan_in_args_is_null_and_in_ts_drops_the_event(tmp_path):
    """Bare NaN and Infinity become null in args; an event without a time is dropped (rows 7 and B81)."""
    line = b'{"name":"a","ph":"i","ts":1,"args":{"x":NaN,"y":-Infinity}}\n'
    [event], problems = read(tmp_path, line + b'{"name":"b","ph":"X","ts":NaN,"dur":1}\n')
    assert args_of(event) == {"x": None, "y": None}
    assert problems == {"nan": 3, "no_ts": 1}


def test_a_huge_integer_is_kept_as_text(tmp_path):
    """An integer that no 64-bit reader takes is kept as text; one that fits stays a number (row 8)."""
    text = b'{"name":"a","ph":"i","ts":1,"args":{"x":%d,"y":%d,"z":%d,"s":"%d"}}'
    line = text % (1 << 80, -(1 << 70), (1 << 64) - 1, 1 << 80)
    kept = {"x": str(1 << 80), "y": str(-(1 << 70)), "z": (1 << 64) - 1, "s": str(1 << 80)}
    assert args_of(read(tmp_path, line + b"\n" + GOOD)[0][0]) == kept
    assert args_of(read(tmp_path, b'{"traceEvents":[%b]}' % line, "a.json")[0][0]) == kept


@pytest.mark.parametrize(
    ("ts", "kept", "kind"),
    [(b'"5"', 5.0, "text_ts"), (b"null", None, "no_ts"), (b'"x"', None, "no_ts"), (b"true", None, "no_ts")],
)
def test_a_time_of_the_wrong_type_is_read_or_dropped(tmp_path, ts, kept, kind):
    """A number in quotes is read; anything else without a time is dropped (row 9)."""
    events, problems = read(tmp_path, b'{"name":"a","ph":"X","ts":%b,"dur":1}\n' % ts + GOOD)
    assert [e.ts for e in events if e.name == "a"] == ([] if kept is None else [kept])
    assert problems[kind] == 1
    assert names(events)[-1] == "good"


@pytest.mark.parametrize("line", [b"{}", b"null", b"[1,2]", b"7", b'"x"', b'{"name":"a","ph":"Q","ts":1}'])
def test_a_line_that_is_no_event_is_skipped_and_counted(tmp_path, line):
    """Empty objects, other JSON values and unknown phases never abort (rows 28 and B72)."""
    events, problems = read(tmp_path, line + b"\n" + GOOD)
    assert (names(events), sum(problems.values())) == (["good"], 1)


def test_textual_pids_and_tids_get_numbers_and_keep_their_text(tmp_path):
    """A pid such as "Spans" or a tid such as "cuda:0" becomes a number with a name (row 29)."""
    line = b'{"name":"a","ph":"X","ts":1,"dur":1,"pid":"Spans","tid":"cuda:0"}\n'
    events, _ = read(tmp_path, line + line)
    first, second, *metadata = events
    assert (first.pid, first.tid) == (second.pid, second.tid)
    assert isinstance(first.pid, int)
    named = {args_of(event)["name"] for event in metadata}
    assert named == {"Spans", "cuda:0"}


@pytest.mark.parametrize("name", ["traces_0.jsonl.gz", "traces_0.jsonl"])
def test_gzip_is_told_by_its_bytes_and_may_have_several_members(tmp_path, name):
    """Compressed input is read whatever its name, also of several members (row 33)."""
    events, problems = read(tmp_path, gzip.compress(GOOD) + gzip.compress(GOOD * 2), name)
    assert (len(events), problems) == (3, {})


def test_a_cut_gzip_gives_what_inflates(tmp_path):
    """A gzip stream that ends early is read to its end and reported (row 33)."""
    data = gzip.compress(b"".join(b'{"name":"%d","ph":"i","ts":%d}\n' % (n, n) for n in range(20_000)))
    events, problems = read(tmp_path, data[: len(data) // 2])
    assert 5_000 < len(events) < 20_000
    assert problems["truncated_gz"] == 1


def test_garbage_after_a_gzip_is_reported(tmp_path):
    """Damage in the compressed stream ends the file, not the merge."""
    events, problems = read(tmp_path, gzip.compress(GOOD) + b"garbage")
    assert (names(events), problems) == (["good"], {"bad_gz": 1})


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents":[%s,%s],"displayTimeUnit":"ns","other":1}',
        '{"schemaVersion": 1, "x": [1],\n "traceEvents": [\n%s,\n%s\n]}',
        "[%s,%s]",
        "[%s,%s",
        "[%s,%s,",
        "[ ,%s,%s,]",
        '{\n  "traceEvents": [\n    %s,\n    %s\n  ]\n}',
        "\ufeff[%s,%s]",
    ],
)
def test_chrome_documents_of_every_form_are_streamed(tmp_path, text):
    """Object and array forms, pretty or not, closed or not, give their events (row 34)."""
    good = GOOD.decode().strip()
    events, problems = read(tmp_path, (text % (good, good)).encode(), "a.json")
    assert (names(events), problems) == (["good", "good"], {})


def test_a_chrome_document_larger_than_a_piece_is_read_whole(tmp_path):
    """Events that span the borders of what is read at once are not lost."""
    events = [{"name": f"n{n}", "ph": "X", "ts": n, "dur": 1, "args": {"pad": "x" * 100}} for n in range(20_000)]
    found, problems = read(tmp_path, json.dumps({"traceEvents": events}).encode(), "a.json")
    assert (len(found), problems) == (20_000, {})


def test_a_cut_chrome_document_gives_what_is_whole(tmp_path):
    """A document cut inside an event gives the events before it (row 34)."""
    good = GOOD.decode().strip()
    events, problems = read(tmp_path, f"[{good},{good},{good[:20]}".encode(), "a.json")
    assert (names(events), problems) == (["good", "good"], {"truncated_tail": 1})


def test_session_records_are_told_by_shape(tmp_path):
    """A file of records without phases adds no event and is named once (rows 35 and B74)."""
    record = b'{"task_id":1,"session_id":2,"rank":0,"status":"accepted","submit_ts":1.0}\n'
    events, problems = read(tmp_path, record * 3)
    assert (events, problems) == ([], {"other_records": 1})


def test_an_empty_file_is_reported_as_without_events(tmp_path):
    """An empty file is named, not fatal (row 36)."""
    assert read(tmp_path, b"") == ([], {"no_events": 1})


def test_json_of_another_kind_is_no_trace(tmp_path):
    """A JSON document without trace events is named and skipped."""
    assert read(tmp_path, b'{"a": {"b": 1},\n "c": 2}', "a.json")[1] == {"other_records": 1}


def test_a_line_beyond_all_bounds_is_skipped(tmp_path, monkeypatch):
    """A line longer than the bound is skipped without being held."""
    monkeypatch.setattr("traceview.reader._MAX_LINE", 1000)
    monkeypatch.setattr("traceview.content.CHUNK", 512)
    events, problems = read(tmp_path, GOOD + b'{"ph":"X' + b"x" * 5000 + b"\n" + GOOD)
    assert names(events) == ["good", "good"]
    assert problems["bad_line"] >= 1


# -- finding -------------------------------------------------------------------------------------------------------


def tree(root: Path) -> None:
    """Make a trial directory with three ranks and some other files."""
    for role, rank in (("actor", 0), ("actor", 1), ("controller", 0)):
        path = root / "traces" / role / f"traces_{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(GOOD)
    (root / "traces" / "actor" / "sessions_0.jsonl").write_text("{}")
    (root / "traces" / "merged.json.gz").write_bytes(gzip.compress(b'{"traceEvents":[]}'))
    (root / "config.yaml").write_text("x: 1")


def labels(inputs: list[str], **kwargs) -> list[str]:
    """Return the labels of the files found."""
    return [source.label for source in find_sources(inputs, Problems(), **kwargs)]


def test_a_trial_directory_stands_for_its_rank_files(tmp_path):
    """Of a trial only its rank files are read: no earlier merge, no sessions; the controller comes first."""
    tree(tmp_path)
    expected = ["traces/controller/traces_0.jsonl", "traces/actor/traces_0.jsonl", "traces/actor/traces_1.jsonl"]
    assert labels([str(tmp_path)]) == expected
    assert len(labels([str(tmp_path / "traces")])) == 3
    assert len(labels([str(tmp_path / "traces" / "*" / "traces_*.jsonl")])) == 3
    assert len(labels([str(tmp_path / "traces" / "actor" / "traces_0.jsonl")])) == 1


def test_a_file_named_twice_is_read_once(tmp_path):
    """Overlapping inputs, hard links and symbolic links to one file count once (row 36)."""
    tree(tmp_path)
    one = tmp_path / "traces" / "actor" / "traces_0.jsonl"
    os.link(one, tmp_path / "traces" / "actor" / "hard.jsonl")
    (tmp_path / "traces" / "actor" / "soft.jsonl").symlink_to(one)
    (tmp_path / "traces" / "loop").symlink_to(tmp_path / "traces")
    (tmp_path / "traces" / "self.jsonl").symlink_to(tmp_path / "traces" / "self.jsonl")
    problems = Problems()
    assert len(find_sources([str(tmp_path), str(one)], problems)) == 3
    assert problems.by_kind() == {"unreadable": 1}


@pytest.mark.parametrize("what", ["", "nothing", "no*such"])
def test_input_that_leads_nowhere_is_an_error_with_its_name(tmp_path, what):
    """An empty tree, a missing path and an unmatched glob exit 2 and name the input (row 36)."""
    with pytest.raises(InputError, match=what.replace("*", r"\*") or "no trace files") as error:
        find_sources([str(tmp_path / what)], Problems())
    assert error.value.exit_code == 2


def test_role_and_rank_are_told_by_the_path():
    """The founding layout, restarts and the older spelling name role and rank (row 30)."""
    told = [source_identity(Path(p)) for p in ("r/actor/traces_3.jsonl", "r/actor/traces_3.1.jsonl")]
    told += [source_identity(Path(p)) for p in ("r/actor/traces-r3.jsonl", "r/actor/traces_3.jsonl.gz")]
    assert set(told) == {("actor", 3)}
    assert source_identity(Path("r/actor/other.json")) == (None, None)
