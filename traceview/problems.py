"""What was wrong with the input: counted by kind, the first of each kind named by file and line.

No problem here stops a merge. The ``ZT`` codes are stable; ``CODES`` says what each means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final

from zbus.errors import ZbusError

__all__ = ["CODES", "ChangedError", "IncompleteTraceError", "InputError", "OutputError", "Problems", "Warned"]

CODES: Final = {
    "ZT0101": "no trace data was found in the input",
    "ZT0102": "a file cannot be read",
    "ZT0103": "a file holds no events",
    "ZT0104": "a file holds records that are not trace events",
    "ZT0105": "a file belongs to another run",
    "ZT0106": "a file has a newer format version than this program",
    "ZT0107": "a line is cut off or is not a JSON object",
    "ZT0108": "a value was repaired",
    "ZT0109": "an event was dropped because it has no meaning",
    "ZT0110": "a process or a span has no end, as after a crash",
    "ZT0111": "the recording process reported lost records",
    "ZT0112": "clocks could not be matched exactly",
    "ZT0113": "two processes wrote one file",
    "ZT0114": "the output cannot be written",
    "ZT0115": "the trace data is incomplete and --strict was given",
    "ZT0116": "the output is larger than viewers like",
    "ZT0117": "a span grew by more than --fail-over allows",
    "ZT0118": "blocks of records are missing: nobody counted what was in them",
    "ZT0119": "a sidecar did not end in order: what it left in its spool was read",
    "ZT0120": "there are more processes, threads or overlapping spans than a viewer can show as rows",
    "ZT0121": "the times of a rank look like another unit",
}
"""Every code of traceview with its meaning."""

_INCOMPLETE: Final = frozenset(
    {"ZT0102", "ZT0103", "ZT0106", "ZT0107", "ZT0109", "ZT0110", "ZT0111", "ZT0113", "ZT0118"}
)


class InputError(ZbusError):
    """The input named nothing that can be read."""

    code: ClassVar[str] = "ZT0101"
    exit_code: ClassVar[int] = 2


class OutputError(ZbusError):
    """The output cannot be written; nothing of it stays behind."""

    code: ClassVar[str] = "ZT0114"
    exit_code: ClassVar[int] = 5


class IncompleteTraceError(ZbusError):
    """Trace data is incomplete and ``--strict`` was given."""

    code: ClassVar[str] = "ZT0115"
    exit_code: ClassVar[int] = 7


class ChangedError(ZbusError):
    """A span of the second run takes longer than ``--fail-over`` allows."""

    code: ClassVar[str] = "ZT0117"
    exit_code: ClassVar[int] = 10


@dataclass(frozen=True, slots=True)
class Warned:
    """One kind of problem at its first place: ``text`` starts with the path."""

    code: str
    kind: str
    text: str


@dataclass(slots=True)
class Problems:
    """The ledger of one run of a command.

    Attributes:
        counts: How often each kind came, by ``(code, kind)``.
        first: The first places of each kind, at most ``keep``.
        on_warning: Told of each place that is kept, at once.
    """

    keep: int = 3
    on_warning: Callable[[Warned], None] | None = None
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: list[Warned] = field(default_factory=list)

    def add(self, code: str, kind: str, text: str, count: int = 1, *, shown: bool = True) -> None:
        """Count a problem; keep and tell its place if it is among the first of its kind (``shown``: may be)."""
        seen = self.counts[code, kind]
        self.counts[code, kind] = seen + count
        if not shown:
            return
        places = sum(1 for w in self.first if w.kind == kind and w.code == code)
        if places < self.keep:
            warned = Warned(code, kind, text)
            self.first.append(warned)
            if self.on_warning is not None:
                self.on_warning(warned)

    def incomplete(self) -> bool:
        """Return whether anything is missing from the data (what ``--strict`` refuses)."""
        return any(code in _INCOMPLETE for code, _ in self.counts)

    def by_kind(self) -> dict[str, int]:
        """Return the counts by kind, for reports."""
        return {kind: count for (_, kind), count in sorted(self.counts.items())}
