"""Statistics of a training job: recorded in scopes, handed over as plain data, merged over ranks without rounding.

::

    stats = Stats()
    with stats.scope("actor"):
        stats.scalar(loss=0.3, lr=1e-3)
        stats.denominator("tokens", mask)                        # [rows, longest] bool
        stats.stat("ratio", ratios, denominator="tokens")        # over the places where the mask is true
        with stats.timing("forward"):
            ...
    values(merge([stats.export() for stats in every_rank]))      # {"actor/loss": 0.3, "actor/ratio/avg": …}

What each key means when parts of it meet is declared where it is recorded and travels with it; parts that disagree are
refused. Needs numpy; torch tensors are taken without importing torch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from zbus.clock import Clock, SystemClock
from zbus.rl.exact import Exact

__all__ = ["Dump", "Reduction", "Stats", "merge", "values"]

Reduction = Literal["avg", "min", "max", "sum", "avg_min_max"]
"""How numbers of one key become one (``avg_min_max``: three: ``key/avg``, ``key/min``, ``key/max``)."""

Dump = dict[str, dict[str, Any]]
"""By key: ``kind`` (scalar, stat, denominator, timing), ``reduce``, ``sum`` (exact: an integer and a power of two),
``count``, ``min``, ``max``, ``nan``, ``inf``, ``ninf`` (how many of each) and ``parts`` (how many recorders had it)."""

_KINDS: Final = ("scalar", "stat", "denominator", "timing")
_REDUCTIONS: Final = (*get_args(Reduction), "per_part")
_COUNTS: Final = ("count", "nan", "inf", "ninf", "parts")


@dataclass(slots=True)
class _Entry:
    """What is known of one key. Numbers that are not finite are counted, so that the rest stays exact."""

    kind: str
    reduce: str
    sum: Exact = field(default_factory=Exact)
    count: int = 0
    min: float = math.inf
    max: float = -math.inf
    nan: int = 0
    inf: int = 0
    ninf: int = 0
    parts: int = 1

    @classmethod
    def of(cls, kind: str, reduce: str, numbers: npt.NDArray[np.float64]) -> _Entry:
        entry = cls(kind, reduce, count=numbers.size)
        finite = np.isfinite(numbers)
        if not finite.all():
            entry.nan = int(np.isnan(numbers).sum())
            entry.inf = int((numbers == np.inf).sum())
            entry.ninf = int((numbers == -np.inf).sum())
        if entry.nan < entry.count:
            entry.min, entry.max = float(np.nanmin(numbers)), float(np.nanmax(numbers))
        entry.sum = Exact.of(numbers[finite])
        return entry

    @classmethod
    def of_one(cls, kind: str, reduce: str, number: float) -> _Entry:
        """Take one number: what ``of`` does, for what is recorded most."""
        if not math.isfinite(number):
            return cls.of(kind, reduce, np.array([number]))
        return cls(kind, reduce, Exact.of_one(number), 1, number, number)

    @classmethod
    def of_plain(cls, plain: Any) -> _Entry:
        """Read an entry of a dump; ``ValueError`` says what is wrong with it."""
        wanted = {"kind", "reduce", "sum", "min", "max", *_COUNTS}
        if not isinstance(plain, Mapping) or plain.keys() != wanted:
            msg = f"it is no entry of a dump, which has {', '.join(sorted(wanted))}"
            raise ValueError(msg)
        if plain["kind"] not in _KINDS or plain["reduce"] not in _REDUCTIONS:
            msg = f"kind {plain['kind']!r} with reduce {plain['reduce']!r} is not known"
            raise ValueError(msg)
        if any(type(plain[name]) is not int or plain[name] < 0 for name in _COUNTS):
            msg = f"one of {', '.join(_COUNTS)} is not a count"
            raise ValueError(msg)
        return cls(**{**plain, "sum": Exact.of_pair(plain["sum"])})

    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"sum": self.sum.pair()}

    def add(self, other: _Entry) -> None:
        """Take further numbers of the same recorder."""
        self.sum += other.sum
        for name in ("count", "nan", "inf", "ninf"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)

    def join(self, other: _Entry) -> None:
        """Take the numbers of another recorder."""
        self.add(other)
        self.parts += other.parts

    def handed_over(self) -> _Entry:
        """Return it as one part: of a timing, what counts for others is the total."""
        if self.reduce == "per_part":
            self.min = self.max = self.total()
        return self

    def total(self) -> float:
        return self._odd(self.sum.over())

    def mean(self, among: int) -> float:
        return self._odd(self.sum.over(among)) if among else math.nan

    def _odd(self, finite: float) -> float:
        if self.nan or (self.inf and self.ninf):
            return math.nan
        return math.inf if self.inf else -math.inf if self.ninf else finite

    def values(self, key: str) -> dict[str, float]:
        """Return what it comes to, by the names it is shown under; NaN where there is no number or one is NaN."""
        known = bool(self.count) and not self.nan
        least, most = (self.min, self.max) if known else (math.nan, math.nan)
        match self.reduce:
            case "avg":
                return {key: self.mean(self.count)}
            case "sum":
                return {key: self.total()}
            case "min":
                return {key: least}
            case "max":
                return {key: most}
            case "per_part":
                return {key: self.mean(self.parts), f"{key}/max": most}
            case _:
                return {f"{key}/avg": self.mean(self.count), f"{key}/min": least, f"{key}/max": most}


class _Frame(NamedTuple):
    """Where recording stands in one thread or task. Never changed, only replaced: others may stand on the same one."""

    path: str
    masks: Mapping[str, npt.NDArray[np.bool_]]


_OUTSIDE: Final = _Frame("", MappingProxyType({}))


class Stats:
    """Records statistics of one process. Any thread and task may record; each has a scope of its own.

    A task starts in the scope it was created in, a thread starts in none. Numbers may be floats, integers, booleans,
    numpy arrays or torch tensors; tensors are copied to the host at once and hold no graph.

    Args:
        clock: For timings.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._frame: ContextVar[_Frame] = ContextVar("frame", default=_OUTSIDE)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put ``name/`` before the keys recorded inside, by this thread or task and by tasks that it starts inside.

        Masks named inside are forgotten at its end, which also comes by an exception.

        Raises:
            ValueError: ``name`` is empty or begins or ends with a slash.
        """
        frame = self._frame.get()
        token = self._frame.set(_Frame(f"{frame.path}{_checked(name)}/", frame.masks))
        try:
            yield
        finally:
            self._frame.reset(token)

    def scalar(self, numbers: Mapping[str, Any] | None = None, /, *, reduce: Reduction = "avg", **named: Any) -> None:
        """Record one number per key, such as ``scalar(loss=0.3)``.

        Args:
            numbers: Keys that are no Python names.
            reduce: What several of them come to, of one rank or of all; by default the mean of all recorded.
            named: Further keys.

        Raises:
            ValueError: One is not a single number, or its key was recorded in another way.
        """
        for name, number in {**(numbers or {}), **named}.items():
            key = self._key(name)
            self._record(key, _Entry.of_one("scalar", _known(key, reduce), _float(key, number)))

    def scalars(self, name: str, numbers: Any, *, reduce: Reduction = "avg") -> None:
        """Record several numbers of one key: what ``scalar`` called once for each comes to, at once.

        Args:
            name: Key.
            numbers: Of any shape; none at all records nothing.
            reduce: As ``scalar``.

        Raises:
            ValueError: They are no numbers, or the key was recorded in another way.
        """
        key = self._key(name)
        array = _floats(key, numbers)
        if array.size:
            self._record(key, _Entry.of("scalar", _known(key, reduce), array))

    def denominator(self, name: str, mask: Any) -> None:
        """Name the places that count, for ``stat`` calls of this thread or task in this scope, until named anew.

        Their number is a statistic of its own: ``name`` is their sum over all masks and ranks.

        Args:
            name: Key, in this scope.
            mask: Booleans (or zeros and ones) of any shape.

        Raises:
            ValueError: The mask holds something else.
        """
        key = self._key(name)
        numbers = _floats(key, mask)
        chosen = numbers == 1
        if not (chosen | (numbers == 0)).all():
            msg = f"statistic {key!r}: a mask holds true and false, or ones and zeros, nothing else"
            raise ValueError(msg)
        count = int(chosen.sum())
        least, most = (1.0, 1.0) if count else (math.inf, -math.inf)
        self._record(key, _Entry("denominator", "sum", Exact.of_one(count), count, least, most))
        frame = self._frame.get()
        self._frame.set(frame._replace(masks={**frame.masks, name: chosen}))

    def stat(self, name: str, numbers: Any, *, denominator: str, reduce: Reduction = "avg_min_max") -> None:
        """Record the numbers at the places that a mask names.

        Args:
            name: Key, in this scope.
            numbers: Of the shape of the mask.
            denominator: Name of the mask, in this scope or one around it.
            reduce: What they come to, those of all masks and ranks together.

        Raises:
            ValueError: There is no such mask or it has another shape; the key was recorded in another way.
        """
        key = self._key(name)
        masks = self._frame.get().masks
        if denominator not in masks:
            known = ", ".join(masks) or "none"
            msg = f"statistic {key!r}: no denominator {denominator!r} was recorded in this scope (there: {known})"
            raise ValueError(msg)
        array, mask = _floats(key, numbers), masks[denominator]
        if array.shape != mask.shape:
            msg = f"statistic {key!r} has shape {array.shape}, its denominator {denominator!r} {mask.shape}"
            raise ValueError(msg)
        self._record(key, _Entry.of("stat", _known(key, reduce), array[mask]))

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to ``time/<scope>/<phase>``, in seconds; also when left by an exception.

        Over ranks, ``time/…`` is the mean of their totals and ``time/…/max`` the total of the slowest.
        """
        key = f"time/{self._key(phase)}"
        began = self._clock.monotonic_ns()
        try:
            yield
        finally:
            took_s = (self._clock.monotonic_ns() - began) / 1e9
            self._record(key, _Entry.of_one("timing", "per_part", took_s))

    def export(self, key: str | None = None, *, reset: bool = True) -> Dump:
        """Hand over what was recorded since the last time, as data that travels and that ``merge`` takes.

        Args:
            key: Only this one, in full, such as ``actor/loss``.
            reset: Forget what is handed over.

        Raises:
            KeyError: Nothing was recorded under ``key``.
        """
        with self._lock:
            if key is not None and key not in self._entries:
                known = ", ".join(sorted(self._entries)) or "nothing"
                msg = f"no statistic {key!r} was recorded since the last export; there is: {known}"
                raise KeyError(msg)
            chosen = self._entries if key is None else {key: self._entries[key]}
            dump = {name: _Entry(**_fields(entry)).handed_over().plain() for name, entry in sorted(chosen.items())}
            if reset:
                for name in dump:
                    del self._entries[name]
        return dump

    def _key(self, name: str) -> str:
        return self._frame.get().path + _checked(name)

    def _record(self, key: str, entry: _Entry) -> None:
        with self._lock:
            known = self._entries.setdefault(key, entry)
            if known is entry:
                return
            if complaint := _differ(known, entry):
                msg = f"statistic {key!r} is recorded {complaint}"
                raise ValueError(msg)
            known.add(entry)


def merge(dumps: Iterable[Mapping[str, Mapping[str, Any]]]) -> Dump:
    """Return one dump for those of many ranks or steps: every key of every one, exactly, whatever their order.

    Raises:
        ValueError: Two declare a key differently, or one is not a dump; key and place in ``dumps`` are named.
    """
    merged: dict[str, tuple[int, _Entry]] = {}
    for place, dump in enumerate(dumps):
        for key, plain in dump.items():
            try:
                entry = _Entry.of_plain(plain)
            except ValueError as error:
                msg = f"statistic {key!r} of dump {place}: {error}"
                raise ValueError(msg) from error
            first, known = merged.setdefault(key, (place, entry))
            if known is entry:
                continue
            if complaint := _differ(known, entry):
                msg = f"statistic {key!r} is recorded {complaint} (dumps {first} and {place})"
                raise ValueError(msg)
            known.join(entry)
    return {key: merged[key][1].plain() for key in sorted(merged)}


def values(dump: Mapping[str, Mapping[str, Any]], *, counts: bool = False) -> dict[str, float]:
    """Return what a dump comes to: one number per key, three under ``avg_min_max``, two of a timing.

    A key with nothing to count, or with a NaN among its numbers, is NaN; ``key__nan`` and ``key__inf`` tell how many
    were not finite.

    Args:
        dump: Of one recorder, or merged.
        counts: Also ``key__count``, the number of numbers behind each scalar and stat.

    Raises:
        ValueError: It is not a dump.
    """
    found: dict[str, float] = {}
    for key, plain in merge([dump]).items():
        entry = _Entry.of_plain(plain)
        found |= entry.values(key)
        odd = {"nan": entry.nan, "inf": entry.inf + entry.ninf}
        found |= {f"{key}__{name}": number for name, number in odd.items() if number}
        if counts and entry.kind in ("scalar", "stat"):
            found[f"{key}__count"] = entry.count
    return found


def _fields(entry: _Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__dataclass_fields__}


def _differ(known: _Entry, entry: _Entry) -> str:
    if (known.kind, known.reduce) == (entry.kind, entry.reduce):
        return ""
    return f"as {known.kind} ({known.reduce}) and as {entry.kind} ({entry.reduce}); give one of them another name"


def _checked(name: str) -> str:
    if not name or name != name.strip("/"):
        msg = f"{name!r} is no name of a statistic or scope: text that neither begins nor ends with a slash"
        raise ValueError(msg)
    return name


def _known(key: str, reduce: str) -> str:
    if reduce not in get_args(Reduction):
        msg = f"statistic {key!r}: there is no reduction {reduce!r}; choose one of {', '.join(get_args(Reduction))}"
        raise ValueError(msg)
    return reduce


def _float(key: str, number: Any) -> float:
    """Return one number."""
    if isinstance(number, float | int):
        try:
            return float(number)
        except OverflowError as error:
            msg = f"statistic {key!r} is made of numbers, not of int: {error}"
            raise ValueError(msg) from error
    array = _floats(key, number)
    if array.size != 1:
        msg = f"statistic {key!r}: a scalar is one number, not {array.size}; record arrays with stat()"
        raise ValueError(msg)
    return float(array.item())


def _floats(key: str, numbers: Any) -> npt.NDArray[np.float64]:
    """Return numbers as float64 on the host."""
    if callable(getattr(numbers, "detach", None)):  # a torch tensor, bfloat16 too, which numpy does not have
        numbers = numbers.detach().cpu().double().numpy()
    try:
        array = np.asarray(numbers)
        if array.dtype.kind in "biuf":
            return array.astype(np.float64)
        what = f"{array.dtype} values"
    except (TypeError, ValueError) as error:
        what = str(error)
    msg = f"statistic {key!r} is made of numbers, not of {type(numbers).__name__}: {what}"
    raise ValueError(msg)
