"""JSON Schemas (draft 2020-12) of the lines of a trace file and of a sessions file; ``python -m`` prints both.

The same text is shipped as ``trace-format.schema.json`` beside this module, for programs that are not in Python:
``schema_file()`` says where.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

__all__ = ["SESSION_LINE", "TRACE_LINE", "schema_file", "schemas_text"]

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_INT: Final = {"type": "integer"}
_TIME: Final = {"type": "number"}
_NUMBERS: Final = {"type": "object", "additionalProperties": {"type": "number"}, "minProperties": 1}
_LOST: Final = {"type": "object", "additionalProperties": _COUNT}
_HEX: Final = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
_FLOW: Final = {"type": "string", "pattern": "^0x[0-9a-f]{16}$"}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


_FACTS: Final = _object(
    {
        "format": {"const": 1},
        "run": _TEXT,
        "role": _TEXT,
        "rank": _COUNT,
        "start": _COUNT,
        "incarnation": _HEX,
        "source": _HEX,
        "host": _TEXT,
        "pid": _COUNT,
        "boot_id": _TEXT,
        "time_ns": _COUNT,
        "run_epoch_wall_ns": _INT,
        "epoch_mono_ns": _INT,
        "epoch_clock": {"enum": ["shared", "wall"]},
        "mono_ns": _INT,
        "wall_ns": _INT,
        "level": {"enum": ["off", "rpc", "full"]},
    }
)

_COUNTS: Final = _object({"recorded": _COUNT, "written": _COUNT, "pending": _COUNT, "lost": _LOST}, {"by": _TEXT})

_META_ARGS: Final = {
    "zbus_meta": _FACTS,
    "zbus_end": _COUNTS,
    "zbus_loss": _object({"reason": _TEXT, "lost": _COUNT, "since_us": _TIME, "until_us": _TIME}),
    "zbus_block": _object({"source": _HEX, "seq": _COUNT, "records": _COUNT, "bytes": _COUNT}),
    "zbus_clock": _object(
        {
            "at_ns": _INT,
            "offset_ns": _INT,
            "bound_ns": _COUNT,
            "rtt_ns": _COUNT,
            "n": _COUNT,
            "drift_ppb": _INT,
            "ref_boot_id": _TEXT,
            "ref_time_ns": _COUNT,
        }
    ),
    "process_name": _object({"name": _TEXT}),
    "process_sort_index": _object({"sort_index": _INT}),
    "thread_name": _object({"name": _TEXT}),
    "thread_sort_index": _object({"sort_index": _INT}),
}


# What the args of the bus's own spans hold, by their kind.
_ATTEMPT: Final = {"call": _HEX, "attempt": _COUNT}
_PLACE: Final = {"method": _TEXT, "lane": _TEXT, "seq": _COUNT}
_BUS_ARGS: Final = {
    "client": _object(
        {**_ATTEMPT, **_PLACE, "worker": _TEXT, "outcome": _TEXT, "bytes_out": _COUNT, "bytes_in": _COUNT},
        {"batch": _COUNT, "attempts": _COUNT},
    ),
    "encode": _object({"call": _HEX}),
    "send": _object(_ATTEMPT),
    "sent": _object(_ATTEMPT),
    "wire": _object(_ATTEMPT),
    "return": _object(_ATTEMPT),
    "queue": _object({**_ATTEMPT, **_PLACE, "worker": _TEXT, "outcome": _TEXT}),
    "decode": _object({"call": _HEX}),
    "run": _object({**_ATTEMPT, **_PLACE, "outcome": _TEXT}),
    "encode_result": _object(_ATTEMPT),
    "reply": _object(_ATTEMPT),
    "batch": _object(
        {"batch": _COUNT, "method": _TEXT, "lane": _TEXT, "members": _COUNT, "calls": _COUNT, "outcome": _TEXT}
    ),
    "decode_results": _object({"batch": _COUNT}),
    "merge": _object({"batch": _COUNT}),
}


def _when(then: dict[str, Any], **values: str) -> dict[str, Any]:
    chosen = {"required": list(values), "properties": {key: {"const": value} for key, value in values.items()}}
    return {"if": chosen, "then": then}


def _bus() -> dict[str, Any]:
    """Return what a span of the bus must be: an id that the others of its call share, by its kind."""
    kinds = {"required": ["kind"], "properties": {"kind": {"enum": list(_BUS_ARGS)}}}
    args = {**kinds, "allOf": [_when(then, kind=kind) for kind, then in _BUS_ARGS.items()]}
    return {"required": ["ts", "dur", "args"], "properties": {"args": args}}


TRACE_LINE: Final[dict[str, Any]] = {
    "$schema": _DIALECT,
    "title": "A line of traces_{rank}.jsonl",
    **_object(
        {"name": _TEXT, "ph": {"enum": ["X", "i", "C", "M"]}, "pid": _COUNT},
        {
            "ts": _TIME,
            "dur": {"type": "number", "minimum": 0},
            "tid": _COUNT,
            "cat": _TEXT,
            "s": {"enum": ["t", "p", "g"]},
            "track": _TEXT,
            "bind_id": _FLOW,
            "flow_out": {"const": True},
            "flow_in": {"const": True},
            "args": {"type": "object"},
        },
    ),
    "additionalProperties": False,
    "allOf": [
        _when({"required": ["ts", "dur"]}, ph="X"),
        _when({"required": ["ts", "s"]}, ph="i"),
        _when({"required": ["ts", "args"], "properties": {"args": _NUMBERS}}, ph="C"),
        _when({"required": ["args"], "properties": {"name": {"enum": list(_META_ARGS)}}}, ph="M"),
        _when(_bus(), cat="rpc"),
        *(_when({"properties": {"args": args}}, ph="M", name=name) for name, args in _META_ARGS.items()),
    ],
}
"""One line of a trace file."""

_PHASE: Final = _object({"start_ts": _TIME, "end_ts": {"type": ["number", "null"]}})

_SESSION: Final = {
    **_object(
        {
            "task_id": _COUNT,
            "session_id": _COUNT,
            "rank": _COUNT,
            "role": _TEXT,
            "status": _TEXT,
            "submit_ts": _TIME,
        },
        {
            "reason": _TEXT,
            "finalized_ts": _TIME,
            "total_s": _TIME,
            "phases": {"type": "object", "additionalProperties": {"type": "array", "items": _PHASE}},
            "counters": {"type": "object", "additionalProperties": {"type": "number"}},
            "payload": {"type": "object"},
        },
    ),
    "patternProperties": {"_s$": {"type": "number", "minimum": 0}},
}

SESSION_LINE: Final[dict[str, Any]] = {
    "$schema": _DIALECT,
    "title": "A line of sessions_{rank}.jsonl",
    "oneOf": [
        _object({"zbus_sessions": _FACTS}),
        _object({"zbus_sessions_end": _COUNTS}),
        _SESSION,
    ],
}
"""One line of a sessions file."""


def schemas_text() -> str:
    """Return both schemas as one JSON text: ``{"trace_line": …, "session_line": …}``."""
    return json.dumps({"trace_line": TRACE_LINE, "session_line": SESSION_LINE}, indent=1) + "\n"


def schema_file() -> Path:
    """Return where that text is installed."""
    return Path(__file__).with_name("trace-format.schema.json")


if __name__ == "__main__":
    sys.stdout.write(schemas_text())
