"""Errors as a person reads them: one code, one sentence, aligned facts, one hint; the root cause first.

::

    error[ZB0301]: actor/3 died during `train_batch` (batch 118)
      where    host b, pid 24117, start 0
      exit     killed by SIGKILL
      outcome  the call may have run: it was running
      peers    actor/0-2, 4-7 finished this call; nothing was re-run
      log      logs/actor/3.0.log, last 2 lines:
                 step 42 micro 6/8
                 allocating logits 8.1 GiB
      saved    crash/actor.3.0.json
    hint: raise roles.actor.mem or lower the micro batch
    more: zbus-controller explain ZB0301

Text from workers is foreign: control characters are shown, never sent to the terminal.
"""

from __future__ import annotations

import linecache
import re
import signal
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from controller.console import Style, clean, clip, shown
from zbus.errors import BatchError, CallError, ConfigError, RemoteError, RolloutError, WorkerLost, ZbusError

__all__ = ["Block", "block_of", "error_json", "exit_code_of", "render_block", "render_error", "root_cause"]

_PACKAGES: Final = ("zbus", "controller", "workers", "traceview")
_HERE: Final = Path(__file__).resolve().parent.parent
_FRAME: Final = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<name>.+))?$')
_KEY_WIDTH: Final = 8
_MAX_FRAMES: Final = 12
_MAX_TAIL: Final = 20
_SHOWN_TAIL: Final = 3
_MAX_FATAL: Final = 8


Fact = tuple[str, str, list[str]]
"""A key, its text, and lines that follow below, indented."""


@dataclass(slots=True)
class Block:
    """An error taken apart, in display order."""

    code: str
    message: str
    facts: list[Fact] = field(default_factory=list)
    frames: list[str] = field(default_factory=list)
    hint: str | None = None
    more: str | None = None


def root_cause(error: BaseException) -> BaseException:
    """Return the failure to show: the root of a batch, the first of any other group, else the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.root if isinstance(error, BatchError) else error.exceptions[0]
    return error


def exit_code_of(error: BaseException) -> int:
    """Return the exit code a command ends with because of ``error``."""
    cause = root_cause(error)
    if isinstance(cause, RolloutError) and getattr(cause.rollout, "outcome", None) == "lost":
        return WorkerLost.exit_code
    if isinstance(cause, ZbusError):
        return cause.exit_code
    if isinstance(cause, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 1


def render_error(
    error: BaseException, *, style: Style | None = None, width: int = 100, verbose: bool = False, target: str = ""
) -> str:
    """Return the error block.

    Args:
        error: Any exception; a group shows its root cause, the others folded unless ``verbose``.
        style: Colours; none by default.
        width: Columns to wrap facts and the hint to.
        verbose: Show zbus frames and every folded failure.
        target: What was run, for failures of the user's own code.
    """
    style = style or Style()
    others = list(_others(error))
    block = block_of(root_cause(error), verbose=verbose, target=target)
    if others:
        block.facts.append(("also", _fold(others, verbose=verbose), []))
    text = render_block(block, style, width)
    if verbose:
        for other in others:
            text += "\n\n" + render_block(block_of(other, verbose=True, target=target), style, width)
    return text


def block_of(error: BaseException, *, verbose: bool = False, target: str = "") -> Block:
    """Return the parts of the block of one exception (not of a group)."""
    if not isinstance(error, ZbusError):
        return _foreign_block(error, verbose=verbose, target=target)
    # What the facts say is not said twice.
    message = error.message if isinstance(error, WorkerLost) else str(error)
    block = Block(error.code, message, hint=error.hint, more=f"zbus-controller explain {error.code}")
    facts = dict(error.facts)
    if isinstance(error, CallError):
        facts = _call_facts(error, facts)
    log = facts.pop("log", None)
    stacks = facts.pop("stacks", None)
    if text := facts.pop("traceback", None):
        block.frames = _remote_frames(str(text), verbose=verbose)
    block.facts = [(key, str(value), []) for key, value in facts.items()]
    if isinstance(error, CallError):
        if tail := _tail(error.log_tail, verbose=verbose):
            count = f"last {len(tail)} lines:" if len(tail) > 1 else "last line:"
            block.facts.append(("log", f"{log}, {count}" if log else count, tail))
        elif log:
            block.facts.append(("log", f"{log} (empty)", []))
        if saved := ", ".join(filter(None, (error.crash_file, stacks))):
            block.facts.append(("saved", saved, []))
        if error.remote_traceback:
            block.frames = _remote_frames(error.remote_traceback, verbose=verbose)
    elif log:
        block.facts.append(("log", log, []))
    if isinstance(error, ConfigError) and not isinstance(error, RemoteError):
        block.more = None
    if verbose and error.__traceback__ is not None and not block.frames:
        block.frames = _local_frames(error, verbose=True)
    return block


_OUTCOMES: Final = {
    "NOT_EXECUTED": "the call did not start",
    "UNKNOWN": "the call may have run",
    "CANCELLED": "the call was cancelled before it started",
}


def error_json(error: BaseException, *, target: str = "") -> dict[str, Any]:
    """Return the error as data for ``--json``: the root cause, with the others under ``also``."""
    cause = root_cause(error)
    block = block_of(cause, target=target)
    data: dict[str, Any] = {
        "code": block.code or None,
        "type": type(cause).__name__,
        "message": block.message,
        "exit_code": exit_code_of(error),
        "facts": {key: text for key, text, _ in block.facts},
        "hint": block.hint,
    }
    if isinstance(cause, CallError):
        data |= {
            "role": cause.role,
            "rank": cause.rank,
            "host": cause.host,
            "pid": cause.pid,
            "method": cause.method,
            "batch": cause.batch,
            "attempts": cause.attempts,
            "outcome": cause.outcome or None,
            "reason": cause.reason or None,
            "worker_exit_code": cause.exit_code_of_worker,
            "worker_signal": cause.signal_of_worker,
            "log_tail": cause.log_tail,
            "crash_file": cause.crash_file,
            "remote_traceback": cause.remote_traceback,
        }
    if others := list(_others(error)):
        data["also"] = [
            {"code": getattr(other, "code", None), "who": _who(other), "message": _sentence(other)} for other in others
        ]
    return data


# -- groups ------------------------------------------------------------------------------------------------------------


def _others(error: BaseException) -> Iterator[BaseException]:
    """Yield every leaf of a group but its root cause."""
    cause = root_cause(error)

    def leaves(node: BaseException) -> Iterator[BaseException]:
        if isinstance(node, BaseExceptionGroup):
            for child in node.exceptions:
                yield from leaves(child)
        elif node is not cause:
            yield node

    yield from leaves(error)


def _fold(others: Sequence[BaseException], *, verbose: bool) -> str:
    named = [who for who in map(_who, others) if who]
    whom = f" ({', '.join(named[:8])}{', …' if len(named) > 8 else ''})" if named else ""
    count = f"{len(others)} more rank{'s' if len(others) > 1 else ''} failed after it{whom}"
    return count if verbose else f"{count}; show with -v"


def _who(error: BaseException) -> str:
    if isinstance(error, CallError) and error.role is not None:
        return f"{error.role}/{error.rank}" if error.rank is not None else error.role
    return ""


# -- calls -------------------------------------------------------------------------------------------------------------


def _call_facts(error: CallError, told: dict[str, str]) -> dict[str, str]:
    """Return all facts of a call's error in display order: where, exit, outcome, peers, then the rest."""
    facts = {}
    where = [f"{what} {value}" for what, value in (("host", error.host), ("pid", error.pid)) if value is not None]
    if (start := told.pop("start", None)) is not None:
        where.append(f"start {start}")
    if error.attempts > 1:
        where.append(f"sent {error.attempts} times")
    if where:
        facts["where"] = ", ".join(where)
    if error.signal_of_worker is not None:
        facts["exit"] = f"killed by {_signal_name(error.signal_of_worker)}"
    elif error.exit_code_of_worker is not None:
        facts["exit"] = f"exited with code {error.exit_code_of_worker}"
    if error.outcome in _OUTCOMES and not isinstance(error, RemoteError):
        facts["outcome"] = _OUTCOMES[error.outcome]
    facts |= told
    return {key: facts[key] for key in sorted(facts, key=lambda key: _FIRST.get(key, len(_FIRST)))}


_FIRST: Final = {
    key: place for place, key in enumerate(("where", "exit", "evidence", "outcome", "late", "at", "peers", "peers at"))
}


def _tail(lines: Sequence[str], *, verbose: bool) -> list[str]:
    """Return the last lines of a log worth a screen: three, or the interpreter's own report of a crash."""
    kept = [line.rstrip("\n") for line in lines][-_MAX_TAIL:]
    if verbose:
        return kept
    fatal = next((n for n, line in enumerate(kept) if line.startswith("Fatal Python error")), None)
    if fatal is not None:
        frames = [line for line in kept[fatal:] if not ((match := _FRAME.match(line)) and _is_own(match["file"]))]
        return frames[:_MAX_FATAL]
    return kept[-_SHOWN_TAIL:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- foreign exceptions and frames -------------------------------------------------------------------------------------


def _foreign_block(error: BaseException, *, verbose: bool, target: str) -> Block:
    """Return the block of an exception of the user's own code."""
    raised = f"{target} raised " if target else ""
    block = Block("", f"{raised}{_sentence(error)}")
    block.frames = _local_frames(error, verbose=verbose)
    if isinstance(error, MemoryError):
        block.hint = "the controller itself ran out of memory"
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and cause is not error:
        block.facts.append(("because", _sentence(cause), []))
    return block


def _sentence(error: BaseException) -> str:
    """Return ``Type: text``; an exception whose text raises is named all the same."""
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - the user's __str__ may raise anything
        text = f"<its text raised {type(broken).__name__}>"
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _is_own(file: str) -> bool:
    """Return whether a frame is zbus's own and not the user's."""
    try:
        parts = (_HERE / file).resolve().relative_to(_HERE).parts  # a compiled module's frames name it from here
    except ValueError:
        # An interpreter's helpers that start scripts say nothing to a user.
        return file.startswith("<frozen ") or Path(file).name == "runpy.py"
    return bool(parts) and parts[0] in _PACKAGES


def _is_zbus(file: str) -> bool:
    return _is_own(file) and not file.startswith("<frozen ") and Path(file).name != "runpy.py"


def _local_frames(error: BaseException, *, verbose: bool) -> list[str]:
    found = traceback.extract_tb(error.__traceback__)
    shown = [f for f in found if verbose or not _is_own(f.filename)]
    if found and _is_zbus(found[-1].filename) and not isinstance(error, ZbusError) and not verbose:
        # What zbus itself raised so is a fault of zbus: its place must be in the report.
        shown.append(found[-1])
    lines = []
    for frame in shown[-_MAX_FRAMES:] if not verbose else shown:
        lines.append(f"{_short(frame.filename)}:{frame.lineno} in {frame.name}")
        source = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
        if source:
            lines.append(f"  {source}")
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{_short(error.filename)}:{error.lineno}")
        if error.text:
            lines.append(f"  {error.text.strip()}")
    return lines


def _short(file: str) -> str:
    return shown(file) if file.startswith("/") else file


def _remote_frames(text: str, *, verbose: bool) -> list[str]:
    """Return the frames of a traceback's text, zbus's own left out; all of it where it has another form."""
    if verbose:
        return text.rstrip("\n").splitlines()
    lines: list[str] = []
    keep = False
    for line in text.splitlines():
        if match := _FRAME.match(line):
            keep = not _is_own(match["file"])
            if keep:
                lines.append(f"{match['file']}:{match['line']} in {match['name'] or '?'}")
        elif keep and line.startswith("    ") and set(line.strip()) - set("^~ "):
            lines.append(f"  {line.strip()}")
        elif not line.startswith("    "):
            keep = False
    return lines[-2 * _MAX_FRAMES :]


# -- layout ------------------------------------------------------------------------------------------------------------


def render_block(block: Block, style: Style, width: int) -> str:
    """Return a block as text."""
    head = f"error[{block.code}]:" if block.code else "error:"
    first, *rest = clip(block.message).split("\n")
    lines = [f"{style(head, 'red', 'bold')} {style(clean(first), 'bold')}"]
    lines += [f"  {clean(line)}" for line in rest]
    wide = max([_KEY_WIDTH, *(len(key) for key, _, _ in block.facts)])
    if [key for key, _, _ in block.facts] == ["from"] and not block.frames:
        lines += _wrap(f"  {style('from:', 'cyan')} ", "  from: ", block.facts[0][1], width)
    else:
        for fact in block.facts:
            lines += _fact(fact, wide, style, width)
    if block.frames:
        lines.append(f"  {style('in'.ljust(wide), 'cyan')} {clean(clip(block.frames[0]))}")
        lines += [f"  {'':{wide}} {clean(clip(frame))}" for frame in block.frames[1:]]
    if block.hint:
        lines += _wrap(f"{style('hint:', 'green', 'bold')} ", "hint: ", block.hint, width)
    if block.more:
        lines.append(f"{style('more:', 'dim')} {block.more}")
    return "\n".join(lines)


def _fact(fact: Fact, wide: int, style: Style, width: int) -> list[str]:
    key, text, below = fact
    plain = f"  {clean(key).ljust(wide)} "
    lines = _wrap(plain.replace(clean(key), style(clean(key), "cyan"), 1), plain, text, width)
    return lines + [f"{'':{len(plain) + 2}}{clean(clip(line))}" for line in below]


def _wrap(shown: str, plain: str, text: str, width: int) -> list[str]:
    """Return ``text`` behind a label, wrapped at spaces only, so that paths and commands can be copied."""
    indent = " " * len(plain)
    paragraphs = [clean(part) for part in clip(text).split("\n")]
    lines: list[str] = []
    for part in paragraphs:
        lines += textwrap.wrap(part, max(20, width - len(plain)), break_long_words=False, break_on_hyphens=False) or [
            ""
        ]
    return [f"{shown}{lines[0]}", *(f"{indent}{line}" for line in lines[1:])]
