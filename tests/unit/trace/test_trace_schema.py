from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from waiting import scaled
from zbus import trace
from zbus.trace.schema import _BUS_ARGS, _META_ARGS, SESSION_LINE, TRACE_LINE, schema_file

GOLDEN = Path(__file__).parents[2] / "golden" / "trace"
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Judge a value by the part of JSON Schema that the two schemas use."""
    known = {
        "$schema", "title", "type", "required", "properties", "additionalProperties", "patternProperties", "allOf",
        "oneOf", "if", "then", "const", "enum", "pattern", "minimum", "minProperties", "items",
    }  # fmt: skip
    assert set(schema) <= known
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, TYPES[k]) and not isinstance(value, bool) for k in kinds):
        return False
    checks = [
        "const" not in schema or value == schema["const"],
        "enum" not in schema or value in schema["enum"],
        not isinstance(value, str) or re.search(schema.get("pattern", ""), value) is not None,
        not isinstance(value, (int, float)) or value >= schema.get("minimum", value),
        all(fits(value, part) for part in schema.get("allOf", ())),
        "oneOf" not in schema or sum(fits(value, part) for part in schema["oneOf"]) == 1,
        "if" not in schema or not fits(value, schema["if"]) or fits(value, schema["then"]),
        not isinstance(value, list) or all(fits(item, schema.get("items", {})) for item in value),
        not isinstance(value, dict) or fits_object(value, schema),
    ]
    return all(checks)


def fits_object(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Judge an object's members."""
    if len(value) < schema.get("minProperties", 0) or not set(schema.get("required", ())) <= set(value):
        return False
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, item in value.items():
        parts = [named[key]] if key in named else []
        parts += [part for pattern, part in patterns.items() if re.search(pattern, key)]
        if not parts:
            other = schema.get("additionalProperties", {})
            if other is False:
                return False
            parts = [other]
        if not all(fits(item, part) for part in parts):
            return False
    return True


def test_the_golden_files_fit_the_schemas():
    """Every line of every golden file is a line by its own schema, and none by the other."""
    found = sorted(GOLDEN.glob("*.jsonl"))
    assert [file.name for file in found] == ["bus_0.jsonl", "sessions_1.jsonl", "traces_0.jsonl"]
    for file in found:
        own, other = (SESSION_LINE, TRACE_LINE) if file.name.startswith("sessions") else (TRACE_LINE, SESSION_LINE)
        for line in map(json.loads, file.read_text().splitlines()):
            assert fits(line, own), line
            assert not fits(line, other), line


def test_the_golden_files_show_all_there_is():
    """Every kind of metadata and of the bus's spans, every phase and every key stands in some golden file."""
    lines = [json.loads(line) for file in GOLDEN.glob("*.jsonl") for line in file.read_text().splitlines()]
    metadata = {line["name"] for line in lines if line.get("ph") == "M"}
    assert metadata == set(_META_ARGS)
    assert {line["args"]["kind"] for line in lines if line.get("cat") == "rpc"} == set(_BUS_ARGS)
    assert {line["ph"] for line in lines if "ph" in line} == {"X", "i", "C", "M"}
    assert {key for line in lines if "ph" in line for key in line} == set(TRACE_LINE["properties"])
    sessions = [line for line in lines if "session_id" in line]
    keys = {key for line in sessions for key in line if not key.endswith("_s") or key == "total_s"}
    assert keys == set(SESSION_LINE["oneOf"][2]["properties"])


def test_what_is_written_fits_the_schemas(tmp_path: Path):
    """Trace and sessions files of a process that does everything are lines by the schemas."""
    trace.configure({"root": str(tmp_path), "run": "e/t", "ring_size": 16}, role="rollout", rank=1)
    tracer = trace.get_tracer()
    with trace.session_context(), trace.trace_session_phase("generate"), trace.span("zbus_meta", x=object()):
        trace.trace_session_event("increment_counter", name="turns")
        trace.instant("here", scope="g")
        trace.counter("depth", 3, other=1.5)
        trace.flow("key")
    trace.save_perf_tracer(1)
    at = tracer.now()
    ids = (bytes(16), "actor/0", 1, "main", 0, 1, "train")
    tracer.bus_client(*ids, at, at, at, at, at, 1, 1, "OK", 1)
    tracer.bus_server(*ids, at, at, at, at, at, "OK")
    tracer.bus_server(*ids, at, at, at, at, at, "OK", at)
    tracer.bus_sent(*ids[:5], 2, 1)
    tracer.bus_sent(*ids[:5], 2, 2)
    tracer.bus_batch("train", 1, "main", 1, 1, at, at, at, "OK", at, at)
    trace.save_perf_tracer(force=True)
    for _ in range(100):
        trace.instant("too many")
    open_session = trace.register_session()
    assert open_session is not None
    trace.reset()
    directory = tmp_path / "rollout"
    traced = [json.loads(line) for line in (directory / "traces_1.jsonl").read_text().splitlines()]
    assert {"zbus_meta", "zbus_loss", "zbus_end", "zbus_step"} <= {line["name"] for line in traced}
    for line in traced:
        assert fits(line, TRACE_LINE), line
    for text in (directory / "sessions_1.jsonl").read_text().splitlines():
        assert fits(json.loads(text), SESSION_LINE), text


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"name": "x", "ph": "X", "pid": 1, "ts": 1.0},
        {"name": "x", "ph": "B", "pid": 1, "ts": 1.0},
        {"name": "x", "ph": "C", "pid": 1, "ts": 1.0, "args": {"a": "b"}},
        {"name": "zbus_end", "ph": "M", "pid": 1, "args": {}},
        {"name": "x", "ph": "i", "pid": "1", "ts": 1.0, "s": "t"},
        {"name": "x", "ph": "i", "pid": 1, "ts": 1.0, "s": "t", "unknown": 1},
        {"name": "x", "ph": "X", "pid": 1, "ts": 1.0, "dur": 1.0, "cat": "rpc"},
        {"name": "x", "ph": "X", "pid": 1, "ts": 1.0, "dur": 1.0, "cat": "rpc", "args": {"kind": "other"}},
        {"name": "x", "ph": "X", "pid": 1, "ts": 1.0, "dur": 1.0, "cat": "rpc", "args": {"kind": "run"}},
    ],
)
def test_other_lines_do_not_fit(line):
    """The schema refuses what the page does not allow."""
    assert not fits(line, TRACE_LINE)


def test_the_schemas_can_be_printed_and_are_shipped():
    """``python -m zbus.trace.schema`` prints both as JSON, and the same text is installed as a file."""
    command = [sys.executable, "-m", "zbus.trace.schema"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=scaled(30), check=True).stdout
    assert json.loads(out) == {"trace_line": TRACE_LINE, "session_line": SESSION_LINE}
    if os.environ.get("ZBUS_TEST_GOLDEN") == "write":
        schema_file().write_text(out)
    assert schema_file().read_text() == out
    assert schema_file() == Path(str(files("zbus.trace") / "trace-format.schema.json"))


def test_a_common_validator_agrees():
    """The schemas are valid ones of their dialect, and a validator of its own finds the golden files valid."""
    jsonschema = pytest.importorskip("jsonschema")
    for schema, pattern in ((TRACE_LINE, "[bt]*.jsonl"), (SESSION_LINE, "sessions*.jsonl")):
        jsonschema.Draft202012Validator.check_schema(schema)
        judge = jsonschema.Draft202012Validator(schema)
        for file in GOLDEN.glob(pattern):
            for line in map(json.loads, file.read_text().splitlines()):
                judge.validate(line)
