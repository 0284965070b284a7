"""Small values of the standard library: complex, slices, dates, decimals, paths.

Time zones are carried when they are fixed offsets; a named zone would have to be looked up by its name on arrival.
"""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import pathlib
import uuid
from typing import Any, Final

from zbus.codec.decoder import BUILD, Build, Decoder, exactly
from zbus.codec.encoder import PREPARE, SCALARS, Encoder, Prepare
from zbus.codec.hints import name_of
from zbus.codec.wire import Kind, marker
from zbus.errors import CodecError

__all__ = ["install"]

_PATHS: Final[dict[str, type[pathlib.PurePath]]] = {
    "PosixPath": pathlib.PosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
_MICROSECOND: Final = dt.timedelta(microseconds=1)
_MAX_DIGITS: Final = 100_000


def install() -> None:
    """Add these types to the tables of the codec; safe to repeat."""
    _add(complex, Kind.COMPLEX, lambda value: (value.real, value.imag), _complex)
    _add(range, Kind.RANGE, lambda value: (value.start, value.stop, value.step), _range)
    _add(type(...), Kind.ELLIPSIS, lambda _value: (), _ellipsis)
    _add(dt.date, Kind.DATE, lambda value: (value.year, value.month, value.day), _date)
    _add(dt.timedelta, Kind.TIMEDELTA, lambda value: (value.days, value.seconds, value.microseconds), _timedelta)
    _add(decimal.Decimal, Kind.DECIMAL, lambda value: (str(value),), _decimal)
    _add(fractions.Fraction, Kind.FRACTION, lambda value: (value.numerator, value.denominator), _fraction)
    _add(uuid.UUID, Kind.UUID, lambda value: (value.bytes,), _uuid)
    for name, cls in _PATHS.items():
        _add(cls, Kind.PATH, lambda value, name=name: (name, str(value)), _path)
    PREPARE[slice] = _prepare_slice
    PREPARE[dt.timezone] = _prepare_timezone
    PREPARE[dt.datetime] = _prepare_datetime
    PREPARE[dt.time] = _prepare_time
    BUILD.update(
        {Kind.SLICE: _slice, Kind.TIMEZONE: _timezone, Kind.DATETIME: _datetime, Kind.TIME: _time},
    )


def _add(cls: type, kind: Kind, operands: Any, build: Build) -> None:
    mark = marker(kind)
    function: Prepare = lambda value, _state: [mark, *operands(value)]  # noqa: E731  # a def would need a name
    PREPARE[cls] = function
    BUILD[kind] = build


# -- to the wire ---------------------------------------------------------------------------------------------------

_SLICE: Final = marker(Kind.SLICE)
_TIMEZONE: Final = marker(Kind.TIMEZONE)
_DATETIME: Final = marker(Kind.DATETIME)
_TIME: Final = marker(Kind.TIME)


def _prepare_slice(value: slice, _state: Encoder) -> list[Any]:
    parts = [value.start, value.stop, value.step]
    if not SCALARS.issuperset(map(type, parts)):
        msg = "a slice is carried with plain bounds only"
        raise CodecError(msg, hint="use int bounds")
    return [_SLICE, *parts]


def _prepare_timezone(value: dt.timezone, _state: Encoder) -> list[Any]:
    # ``timezone`` gives no access to its optional name but this.
    arguments = value.__getinitargs__()  # type: ignore[attr-defined]
    return [_TIMEZONE, arguments[0] // _MICROSECOND, arguments[1] if len(arguments) > 1 else None]


def _zone(value: dt.tzinfo | None, state: Encoder) -> Any:
    if value is None:
        return None
    if type(value) is not dt.timezone:
        msg = f"the time zone {name_of(type(value))} cannot be carried"
        raise CodecError(msg, hint="send value.astimezone(datetime.timezone.utc)")
    return _prepare_timezone(value, state)


def _prepare_datetime(value: dt.datetime, state: Encoder) -> list[Any]:
    day = [value.year, value.month, value.day]
    return [_DATETIME, *day, *_clock(value), _zone(value.tzinfo, state)]


def _prepare_time(value: dt.time, state: Encoder) -> list[Any]:
    return [_TIME, *_clock(value), _zone(value.tzinfo, state)]


def _clock(value: dt.datetime | dt.time) -> list[int]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold]


# -- from the wire: constructors refuse what is out of range, and ``decode`` turns that into a CodecError ------------


def _complex(items: list[Any], _state: Decoder) -> complex:
    return complex(*exactly(items, float, float))


def _slice(items: list[Any], _state: Decoder) -> slice:
    plain = tuple(SCALARS)
    return slice(*exactly(items, plain, plain, plain))


def _range(items: list[Any], _state: Decoder) -> range:
    return range(*exactly(items, int, int, int))


def _ellipsis(items: list[Any], _state: Decoder) -> Any:
    exactly(items)
    return ...


def _timezone(items: list[Any], _state: Decoder) -> dt.timezone:
    offset, name = exactly(items, int, (str, type(None)))
    if offset == 0 and name is None:
        return dt.UTC
    delta = dt.timedelta(microseconds=offset)
    return dt.timezone(delta) if name is None else dt.timezone(delta, name)


def _datetime(items: list[Any], _state: Decoder) -> dt.datetime:
    *_, fold, zone = exactly(items, *(int,) * 8, (dt.timezone, type(None)))
    year, month, day, hour, minute, second, microsecond = items[:7]
    return dt.datetime(year, month, day, hour, minute, second, microsecond, tzinfo=zone, fold=fold)


def _date(items: list[Any], _state: Decoder) -> dt.date:
    return dt.date(*exactly(items, int, int, int))


def _time(items: list[Any], _state: Decoder) -> dt.time:
    hour, minute, second, microsecond, fold, zone = exactly(items, *(int,) * 5, (dt.timezone, type(None)))
    return dt.time(hour, minute, second, microsecond, tzinfo=zone, fold=fold)


def _timedelta(items: list[Any], _state: Decoder) -> dt.timedelta:
    return dt.timedelta(*exactly(items, int, int, int))


def _decimal(items: list[Any], _state: Decoder) -> decimal.Decimal:
    (text,) = exactly(items, str)
    if len(text) > _MAX_DIGITS:
        msg = f"a decimal of {len(text):,} digits came; the limit is {_MAX_DIGITS:,}"
        raise CodecError(msg)
    return decimal.Decimal(text)


def _fraction(items: list[Any], _state: Decoder) -> fractions.Fraction:
    return fractions.Fraction(*exactly(items, int, int))


def _uuid(items: list[Any], _state: Decoder) -> uuid.UUID:
    return uuid.UUID(bytes=exactly(items, bytes)[0])


def _path(items: list[Any], _state: Decoder) -> pathlib.PurePath:
    name, text = exactly(items, str, str)
    if name not in _PATHS:
        msg = "an unknown kind of path came"
        raise CodecError(msg)
    return _PATHS[name](text)
