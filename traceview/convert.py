"""Between formats: anything ``merge`` reads to Chrome JSON, Perfetto, our JSON lines, or OTLP JSON."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from traceview.arrows import arrow_number
from traceview.choose import read_heads
from traceview.event import Event, args_of, encode_event, one_line
from traceview.leftovers import find_sources
from traceview.merge import MergeReport, merge
from traceview.output import OutputFile
from traceview.problems import InputError, OutputError, Problems, Warned
from traceview.reader import Source, read_batches
from traceview.units import UNITS

__all__ = ["FORMS", "convert", "form_of"]

FORMS: Final = ("chrome", "perfetto", "jsonl", "otlp")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def form_of(output: Path, asked: str | None) -> str:
    """Return the format to write: as asked for, else by the output's name.

    Raises:
        InputError: The name tells none.
    """
    if asked:
        return asked
    name = output.name.removesuffix(".gz")
    if name.endswith((".otlp.json", ".otlp")):
        return "otlp"
    if name.endswith((".pftrace", ".perfetto-trace")):
        return "perfetto"
    if name.endswith(".json"):
        return "chrome"
    if not output.suffix or output.is_dir():
        return "jsonl"
    msg = f"{output} does not tell the format to write"
    raise InputError(msg, hint="name it with --to chrome|perfetto|jsonl|otlp")


def convert(
    inputs: Collection[str],
    output: Path,
    form: str,
    *,
    unit: str = "us",
    on_warning: Callable[[Warned], None] | None = None,
) -> MergeReport:
    """Convert traces of any kind that ``merge`` reads.

    Args:
        inputs: Files, directories or globs.
        output: A file; for ``jsonl`` a directory that gets ``{role}/traces_{rank}.jsonl``.
        form: One of ``FORMS``.
        unit: In which the input counts, a key of ``units.UNITS``; only for ``jsonl``.
        on_warning: Told of problems.

    Raises:
        InputError: No input, or a unit with another form.
        OutputError: The output cannot be written, or the directory already has such files.
    """
    if unit != "us" and form != "jsonl":
        msg = f"times in {unit} are put right in JSON lines only, not in {form}"
        raise InputError(msg, hint="write a directory first: -o DIR --to jsonl; then convert or merge that")
    if form in ("chrome", "perfetto"):
        return merge(inputs, output, form=form, all_runs=True, on_warning=on_warning)
    directory = output if form == "jsonl" else output.parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".traceview-") as temporary:
            path = Path(temporary) / "merged.json"
            report = merge(inputs, path, form="chrome", all_runs=True, on_warning=on_warning)
            if form == "jsonl":
                _write_lines(path, output, UNITS[unit])
            else:
                _write_otlp(path, output, _wall_epoch(inputs))
    except OSError as error:
        msg = f"{output} cannot be written: {error.strerror}"
        raise OutputError(msg, hint="choose another place with -o") from error
    report.output, report.format = str(output), form
    return report


def _wall_epoch(inputs: Collection[str]) -> int:
    """Return the wall clock in ns at time 0 of the merged trace; 0 where nothing tells."""
    heads = read_heads(find_sources(inputs, Problems()))
    named = [head.epoch_wall for head in heads if head.epoch_wall > 0]
    absolute = [head.anchor.first_ns for head in heads if head.anchor.is_absolute()]
    return max(named) if named else min(absolute, default=0)


@dataclass(slots=True)
class _Who:
    name: str = ""
    role: str = "trace"
    rank: int = 0


def _events(path: Path) -> Iterator[tuple[Event, dict[int, _Who]]]:
    """Yield the events of a merged file with what is known of its processes; names come first there."""
    who: dict[int, _Who] = {}
    for batch in read_batches(Source(path, path.name), Problems()):
        for event in batch:
            if event.ph == "M" and event.name == "process_name":
                args = args_of(event)
                name = str(args.get("name", ""))
                rank = args.get("rank")
                role = str(args.get("role") or _UNSAFE.sub("_", name) or "trace")
                who[event.pid] = _Who(name, role, rank if type(rank) is int else 0)
            yield event, who


def _write_lines(path: Path, output: Path, scale: float) -> None:
    files: dict[int, Any] = {}
    made: dict[str, int] = {}
    try:
        for event, who in _events(path):
            file = files.get(event.pid)
            if file is None:
                one = who.get(event.pid, _Who())
                file = files[event.pid] = _new_file(output, one, made)
            if scale != 1.0:
                event.ts, event.dur = (None if time is None else time * scale for time in (event.ts, event.dur))
            file.write(one_line(event))
    finally:
        for file in files.values():
            file.close()


def _new_file(output: Path, who: _Who, made: dict[str, int]) -> Any:
    role = _UNSAFE.sub("_", who.role).strip(".") or "trace"
    key = f"{role}/traces_{who.rank}"
    count = made[key] = made.get(key, -1) + 1
    path = output / f"{key}{f'.{count}' if count else ''}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", 1 << 16)


# -- OTLP ----------------------------------------------------------------------------------------------------------


def _write_otlp(path: Path, output: Path, epoch_ns: int) -> None:
    """Write spans as OTLP JSON: one trace for the run, parents by nesting, arrows as links."""
    trace = f"{arrow_number('trace', str(epoch_ns)):016x}{arrow_number('run', str(path.stat().st_size)):016x}"
    leaving = {e.bind_id: _span_id(e, n) for n, (e, _) in enumerate(_events(path)) if e.ph == "X" and e.flow_out}
    open_spans: dict[int, list[tuple[float, str]]] = {}
    with OutputFile(output) as out:
        out.write(b'{"resourceSpans":[')
        pid, first = None, True
        for number, (event, who) in enumerate(_events(path)):
            if event.ph != "X" or event.ts is None:
                continue
            if event.pid != pid:
                if pid is not None:
                    out.write(b"]}]},")
                pid, first = event.pid, True
                out.write(_resource(who.get(event.pid, _Who()), event.pid))
            end = event.ts + (event.dur or 0.0)
            stack = open_spans.setdefault(event.tid, [])
            while stack and stack[-1][0] <= event.ts:
                stack.pop()
            span = _span(event, trace, _span_id(event, number), epoch_ns, stack[-1][1] if stack else "")
            if event.flow_in and event.bind_id in leaving:
                span["links"] = [{"traceId": trace, "spanId": leaving[event.bind_id]}]
            stack.append((end, span["spanId"]))
            out.write((b"" if first else b",") + encode_event(span))
            first = False
        out.write(b"]}]}]}\n" if pid is not None else b"]}\n")
        out.commit()


def _span_id(event: Event, number: int) -> str:
    return f"{arrow_number('span', str(number), str(event.pid)):016x}"


def _resource(who: _Who, pid: int) -> bytes:
    facts = {
        "service.name": who.role,
        "service.instance.id": str(who.rank),
        "process.pid": pid,
        "zbus.process": who.name,
    }
    resource = encode_event({"attributes": [_attribute(k, v) for k, v in facts.items()]})
    return b'{"resource":' + resource + b',"scopeSpans":[{"scope":{"name":"zbus.traceview"},"spans":['


def _span(event: Event, trace: str, ident: str, epoch_ns: int, parent: str) -> dict[str, Any]:
    start = epoch_ns + round((event.ts or 0.0) * 1000)
    attributes = [_attribute(k, v) for k, v in args_of(event).items()]
    if event.cat:
        attributes.append(_attribute("category", event.cat))
    span: dict[str, Any] = {"traceId": trace, "spanId": ident, "name": event.name, "kind": 1, "attributes": attributes}
    if parent:
        span["parentSpanId"] = parent
    end = start + round((event.dur or 0.0) * 1000)
    return {**span, "startTimeUnixNano": str(max(0, start)), "endTimeUnixNano": str(max(0, end))}


def _attribute(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"key": key, "value": {"boolValue": value}}
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": key, "value": {"doubleValue": value}}
    text = value if isinstance(value, str) else encode_event(value).decode()
    return {"key": key, "value": {"stringValue": text}}
