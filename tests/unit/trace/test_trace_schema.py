from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from waiting import scaled
from zbus import trace
from zbus.trace.schema import SESSION_LINE, TRACE_LINE

GOLDEN = Path(__file__).parents[2] / "golden" / "trace" / "traces_0.jsonl"
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


def test_the_golden_file_fits_the_schema():
    """Every line of the golden file is a line by the schema, and no session."""
    for line in map(json.loads, GOLDEN.read_text().splitlines()):
        assert fits(line, TRACE_LINE), line
        assert not fits(line, SESSION_LINE)


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
    tracer.bus_batch("train", 1, "main", 1, 1, at, at, at, "OK")
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
    ],
)
def test_other_lines_do_not_fit(line):
    """The schema refuses what the page does not allow."""
    assert not fits(line, TRACE_LINE)


def test_the_schemas_can_be_printed():
    """``python -m zbus.trace.schema`` prints both as JSON."""
    command = [sys.executable, "-m", "zbus.trace.schema"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=scaled(30), check=True).stdout
    assert set(json.loads(out)) == {"trace_line", "session_line"}
