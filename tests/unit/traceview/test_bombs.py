"""Inputs made to exhaust the reader: bounded memory, no traceback, and the rest of the data kept."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from traceview.cli import main

GOOD = '{"name":"good","ph":"X","ts":9,"dur":1,"pid":1,"tid":1}\n'


def run(*args: object) -> str:
    """Run a command that must end well; its stdout."""
    done = CliRunner().invoke(main, [str(arg) for arg in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code in (0, 10), done.output
    return done.stdout


def nested(depth: int, kind: str) -> str:
    """Return a JSON value nested so deep."""
    return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("depth", [40, 500, 980, 100_000])
def test_deeply_nested_values_cost_at_most_themselves(tmp_path, depth, kind):
    """Args nested however deep, in lines, documents and sessions, end no command; their neighbours are kept."""
    event = '{"name":"a","ph":"X","ts":%s,"dur":5,"pid":1,"tid":1,"args":{"x":%s}}'
    deep = [event % (ts, nested(depth, kind)) for ts in ("1", '"2"')]
    (tmp_path / "a.jsonl").write_text("\n".join(deep) + "\n" + GOOD)
    (tmp_path / "b.json").write_text(f'{{"traceEvents":[{deep[0]},{GOOD}]}}')
    session = {"task_id": 1, "session_id": 1, "submit_ts": 1.0, "finalized_ts": 2.0, "phases": "X"}
    text = json.dumps(session).replace('"X"', nested(depth, kind))
    (tmp_path / "sessions_0.jsonl").write_text(f"{text}\n{json.dumps(session)}\n")
    out = tmp_path / "out.json"
    run("merge", tmp_path / "a.jsonl", tmp_path / "b.json", "-o", out)
    names = [e["name"] for e in json.loads(out.read_bytes())["traceEvents"] if e["ph"] == "X"]
    assert names.count("good") == 2
    assert depth > 900 or names.count("a") == 3
    run("merge", tmp_path / "a.jsonl", tmp_path / "b.json", "-o", tmp_path / "out.pftrace")
    for command in ("stats", "stragglers", "validate", "sessions"):
        run(command, tmp_path)
    run("report", tmp_path, "-o", tmp_path / "report.html")
    run("convert", tmp_path / "a.jsonl", "-o", tmp_path / "spans.otlp.json")


def test_numbers_beyond_every_type_do_not_cost_their_neighbours(tmp_path):
    """A number too large for floating point takes no other argument with it."""
    (tmp_path / "a.jsonl").write_text(GOOD.replace("}", ',"args":{"x":1e999,"y":"kept"}}'))
    run("convert", tmp_path / "a.jsonl", "-o", tmp_path / "spans.otlp.json")
    assert "kept" in Path(tmp_path / "spans.otlp.json").read_text()


LIMIT_MB = 256
MARK = b'{"name":"good","ph":"X","ts":9,"dur":1,"pid":1,"tid":1}'


def gz_line(path: Path) -> None:
    """A line of 300 MB in a gzip file of 300 kB, between two good ones."""
    with gzip.open(path, "wb", 1) as file:
        file.write(MARK + b"\n" + b'{"name":"')
        for _ in range(300):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n' + MARK + b"\n")


def gz_document(path: Path) -> None:
    """A Chrome document whose second event has a name of 300 MB."""
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"traceEvents":[' + MARK + b',{"name":"')
        for _ in range(300):
            file.write(b"x" * 1_000_000)
        file.write(b'"},' + MARK + b"]}")


def gz_blanks(path: Path) -> None:
    """300 MB of blanks before a document."""
    with gzip.open(path, "wb", 1) as file:
        for _ in range(300):
            file.write(b" " * 1_000_000)
        file.write(b"[" + MARK + b"," + MARK + b"]")


def hole(path: Path) -> None:
    """A line of 1 GB, a hole in the file, that begins behind two good ones."""
    path.write_bytes(MARK + b"\n" + MARK + b"\n{")
    os.truncate(path, 1_000_000_000)


def small_values(path: Path) -> None:
    """A document of a million empty objects between two events."""
    path.write_bytes(b"[" + MARK + b"," + b"{}," * 1_100_000 + MARK + b"]")


def threads(path: Path) -> None:
    """Two hundred thousand threads of one span each."""
    text = '{"name":"good","ph":"X","ts":%d,"dur":1,"pid":1,"tid":%d}\n'
    path.write_text("".join(text % (n, n) for n in range(200_000)))


def text_threads(path: Path) -> None:
    """As many whose ids are words."""
    text = '{"name":"good","ph":"X","ts":%d,"dur":1,"pid":1,"tid":"t%d"}\n'
    path.write_text("".join(text % (n, n) for n in range(200_000)))


def processes(path: Path) -> None:
    """As many processes."""
    text = '{"name":"good","ph":"X","ts":%d,"dur":1,"pid":%d,"tid":1}\n'
    path.write_text("".join(text % (n, n) for n in range(200_000)))


def overlaps(path: Path) -> None:
    """As many spans at once on one thread."""
    text = '{"name":"good","ph":"X","ts":%d,"dur":%d,"pid":1,"tid":1}\n'
    path.write_text("".join(text % (n, 400_000 + n) for n in range(200_000)))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (threads, "many_threads"),
        (text_threads, "many_threads"),
        (processes, "many_processes"),
        (overlaps, "many_overlaps"),
    ],
)
def test_any_number_of_rows_is_merged_in_bounded_memory(tmp_path, make, kind):
    """More processes, threads or overlapping spans than anyone can look at share rows; all are kept, and it is said."""
    make(tmp_path / "bomb.jsonl")
    report, peak_mb = bounded_merge(tmp_path / "bomb.jsonl", tmp_path / "o.json")
    assert peak_mb <= LIMIT_MB
    assert report["spans"] == 200_000
    assert report["problems"][kind] > 0
    assert not report["incomplete"]


@pytest.mark.ci
@pytest.mark.parametrize("make", [gz_line, gz_document, gz_blanks, hole, small_values])
def test_a_bomb_is_merged_in_bounded_memory(tmp_path, make):
    """Whatever a file unfolds to, the merge stays in 256 MB, keeps the good events around it, and says so."""
    make(tmp_path / "bomb.json")
    report, peak_mb = bounded_merge(tmp_path / "bomb.json", tmp_path / "o.json")
    assert peak_mb <= LIMIT_MB
    assert report["spans"] == 2
    assert make is gz_blanks or report["incomplete"]


def bounded_merge(source: Path, output: Path) -> tuple[dict, float]:
    """Merge in 2 GiB of address space: the report, and the peak of memory in MB."""
    # The kernel's usage of a child begins with the peak of whoever forked it; what it says of itself does not.
    script = "from traceview.cli import main; main(standalone_mode=False); print(open('/proc/self/status').read())"
    command = [sys.executable, "-c", script, "merge", str(source), "-o", str(output), "--json"]
    limit = (2 << 30, 2 << 30)

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_AS, limit)

    with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=bounded) as process:  # noqa: PLW1509
        assert process.stdout is not None
        said, _, status = process.stdout.read().decode().partition("\n")
    assert process.returncode == 0
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return json.loads(said), peak / 1024
