"""The byte layout of a body: plain msgpack, plus two ext types of which user data can hold neither.

========  ==============================================================================================
ext code  payload
========  ==============================================================================================
1         mark: one byte, a ``Kind``. Only ever the first entry of an array; the rest of the array are its operands.
2         integer outside int64/uint64: big-endian two's complement, at least one byte
-1        msgpack timestamp: read as an aware UTC ``datetime``, never written
========  ==============================================================================================

A marked array says what a plain one cannot: ``(1, 2)`` is ``[mark TUPLE, 1, 2]``. A mark anywhere else is an error.
"""

from __future__ import annotations

import enum
from typing import Final

import msgpack

__all__ = ["BIGINT", "MARK", "Kind", "Mark", "marker"]

MARK: Final = 1
BIGINT: Final = 2


class Kind(enum.IntEnum):
    """What a marked array stands for, with its operands; numbers are wire format."""

    TUPLE = 1  # items
    SET = 2  # items
    FROZENSET = 3  # items
    DICT = 4  # key, value, key, value, … (a dict with keys that are not plain scalars)
    ORDERED_DICT = 5  # key, value, …
    DEQUE = 6  # maxlen or nil, items
    BYTES = 7  # buffer index
    BYTEARRAY = 8  # bin, or buffer index
    COMPLEX = 9  # real, imaginary
    SLICE = 10  # start, stop, step
    RANGE = 11  # start, stop, step
    ELLIPSIS = 12  # none
    DATETIME = 13  # year … microsecond, fold, zone
    DATE = 14  # year, month, day
    TIME = 15  # hour … microsecond, fold, zone
    TIMEDELTA = 16  # days, seconds, microseconds
    TIMEZONE = 17  # offset in microseconds, name or nil
    DECIMAL = 18  # text
    UUID = 19  # 16 bytes
    PATH = 20  # class name, text
    FRACTION = 21  # numerator, denominator
    OBJECT = 32  # tag, {field: value}
    ENUM = 33  # tag, member name
    FLAG = 34  # tag, integer
    NAMEDTUPLE = 35  # tag, items
    REF = 40  # see zbus.codec.refs
    KEPT = 41  # chosen rows, body, buffer indices
    REF_JOINED = 42  # order of rows or nil, REFs
    NDARRAY = 48  # dtype, bin or buffer index, dimensions
    NDARRAY_F = 49  # the same in column-major order
    NPSCALAR = 50  # dtype, bytes
    NPTEXT = 51  # str or bytes
    NPDTYPE = 52  # dtype
    RAGGED = 53  # values (an array or a tensor), offsets (an array)
    TENSOR = 64  # dtype, bin or buffer index, dimensions
    SIZE = 65  # dimensions
    TORCH_DTYPE = 66  # dtype
    DEVICE = 67  # type, index or nil


class Mark:
    """A decoded mark. One object per kind, private to the codec, so that no user value can be mistaken for it."""

    __slots__ = ("kind", "library")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.library = kind >= Kind.NDARRAY


def marker(kind: Kind) -> msgpack.ExtType:
    """Return what the encoder puts first in a marked array."""
    return msgpack.ExtType(MARK, bytes((kind,)))
