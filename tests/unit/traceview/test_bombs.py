"""Inputs made to exhaust the reader: bounded memory, no traceback, and the rest of the data kept."""

from __future__ import annotations

import json
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
