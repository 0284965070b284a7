"""numpy arrays, scalars and dtypes. Imported with the first of them, never before.

On the wire a dtype is its ``str`` (byte order, kind, size): ``<f4``, ``>i8``, ``<M8[ns]``, ``<U5``. Object, structured
and foreign (``ml_dtypes``) dtypes are refused: their text would not bring them back.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, Final

import numpy as np

from zbus.codec.decoder import BUILD, Decoder, exactly
from zbus.codec.encoder import PREPARE, Encoder
from zbus.codec.limits import INLINE_BELOW
from zbus.codec.wire import Kind, marker
from zbus.errors import CodecError, ConfigError
from zbus.ragged import Ragged

__all__ = ["install", "shape_of"]

_MAX_DIMENSIONS: Final = 64
_MAX_DIMENSION: Final = (1 << 63) - 1
_MOST_AT_ONCE: Final = 1 << 31
"""So many items need no look at overflow: no dtype has items of twice as many bytes."""
_PLAIN: Final = re.compile(r"[<>|][biufc]\d{1,2}|[<>][mM]8(\[\d{0,9}[a-zA-Z]{1,7}\])?|[<>|][US]\d{1,9}")
_UNKNOWN: Final = "an array came with an unknown dtype"
_ARRAY: Final = marker(Kind.NDARRAY)
_ARRAY_F: Final = marker(Kind.NDARRAY_F)
_SCALAR: Final = marker(Kind.NPSCALAR)
_TEXT: Final = marker(Kind.NPTEXT)
_DTYPE: Final = marker(Kind.NPDTYPE)


def install() -> None:
    """Add numpy's types to the tables of the codec; safe to repeat."""
    PREPARE[np.ndarray] = PREPARE[np.memmap] = _array
    for scalar in set(np.sctypeDict.values()) - {np.object_, np.void}:
        PREPARE[scalar] = _scalar
        if scalar not in {np.str_, np.bytes_}:
            PREPARE[type(np.dtype(scalar))] = _dtype
    PREPARE[np.str_] = PREPARE[np.bytes_] = _text
    PREPARE[type(np.dtype("U1"))] = PREPARE[type(np.dtype("S1"))] = _dtype
    BUILD.update(
        {
            Kind.NDARRAY: _build_array,
            Kind.NDARRAY_F: _build_array_f,
            Kind.NPSCALAR: _build_scalar,
            Kind.NPTEXT: _build_text,
            Kind.NPDTYPE: _build_dtype,
            Kind.RAGGED: _build_ragged,
        }
    )


def shape_of(dimensions: list[Any], itemsize: int) -> int:
    """Return the number of bytes of an array, with every dimension checked.

    Raises:
        CodecError: A dimension is not an int in 0..2**63-1, or there are more than 64.
    """
    if len(dimensions) == 1 and type(dimensions[0]) is int and 0 <= dimensions[0] <= _MOST_AT_ONCE:
        size: int = dimensions[0] * itemsize  # nearly all small arrays are so
        return size
    if len(dimensions) > _MAX_DIMENSIONS:
        msg = f"an array of {len(dimensions)} dimensions came; the limit is {_MAX_DIMENSIONS}"
        raise CodecError(msg)
    for dimension in dimensions:
        if type(dimension) is not int or not 0 <= dimension <= _MAX_DIMENSION:
            msg = "an array came with a dimension that is not a size"
            raise CodecError(msg)
    # Zeros may hide a product that overflows in the library below.
    if math.prod(dimension or 1 for dimension in dimensions) * itemsize > _MAX_DIMENSION:
        msg = "an array came with a shape that no memory can hold"
        raise CodecError(msg)
    return int(math.prod(dimensions)) * itemsize


# -- to the wire ---------------------------------------------------------------------------------------------------


@functools.lru_cache(256)  # a look at each part of a dtype costs as much as the rest of a small array's encoding
def _name(dtype: np.dtype[Any]) -> str:
    """Return the text of a dtype that brings the same dtype back."""
    name = dtype.str
    if dtype.hasobject:
        msg = "a numpy array of objects cannot be carried"
        raise CodecError(msg, hint="send value.tolist(), or give the array a number type")
    if dtype.fields is not None or dtype.subdtype is not None:
        msg = f"a structured numpy dtype cannot be carried: {dtype}"
        raise CodecError(msg, hint="send a dict with one array per field")
    if not _PLAIN.fullmatch(name) or np.dtype(name) != dtype or not dtype.itemsize:
        msg = f"numpy dtype {dtype} cannot be carried exactly"
        raise CodecError(msg, hint="convert with value.astype(...), or send a torch tensor (bfloat16, float8)")
    return name


def _array(value: np.ndarray[Any, Any], state: Encoder) -> list[Any]:
    name = _name(value.dtype)
    mark = _ARRAY
    if not value.flags.c_contiguous:
        if value.flags.f_contiguous:
            mark = _ARRAY_F
            return [mark, name, _operand(value.T, state), *value.shape]
        return [mark, name, _operand(np.ascontiguousarray(value), state), *value.shape]
    return [mark, name, _operand(value, state), *value.shape]


def _operand(contiguous: np.ndarray[Any, Any], state: Encoder) -> int | bytes:
    if contiguous.nbytes < INLINE_BELOW:
        return contiguous.tobytes()
    # Not memoryview(array): the buffer protocol has no word for datetime64.
    return state.place(contiguous.view(np.ndarray).reshape(-1).view(np.uint8).data)


def _scalar(value: np.generic, _state: Encoder) -> list[Any]:
    return [_SCALAR, _name(value.dtype), value.tobytes()]


def _text(value: np.str_ | np.bytes_, _state: Encoder) -> list[Any]:
    # numpy's own ``__str__`` drops trailing zeros.
    return [_TEXT, str.__str__(value) if isinstance(value, np.str_) else bytes(value)]


def _dtype(value: np.dtype[Any], _state: Encoder) -> list[Any]:
    return [_DTYPE, _name(value)]


# -- from the wire -------------------------------------------------------------------------------------------------


def _parse(name: Any) -> np.dtype[Any]:
    if type(name) is not str:
        raise CodecError(_UNKNOWN)
    return _dtype_called(name)


@functools.lru_cache(256)
def _dtype_called(name: str) -> np.dtype[Any]:
    if not _PLAIN.fullmatch(name):
        raise CodecError(_UNKNOWN)
    dtype = np.dtype(name)
    if not dtype.itemsize or dtype.hasobject:
        msg = f"an array came with dtype {name}"
        raise CodecError(msg)
    return dtype


def _build_array(items: list[Any], state: Decoder) -> np.ndarray[Any, Any]:
    return _build(items, state, "C")


def _build_array_f(items: list[Any], state: Decoder) -> np.ndarray[Any, Any]:
    return _build(items, state, "F")


def _build(items: list[Any], state: Decoder, order: Any) -> np.ndarray[Any, Any]:
    if len(items) < 2:  # dtype and operand
        msg = "an array came without dtype or data"
        raise CodecError(msg)
    dtype = _parse(items[0])
    shape = items[2:]
    nbytes = shape_of(shape, dtype.itemsize)
    data = state.view(items[1], nbytes)
    if not nbytes:
        return np.empty(shape, dtype, order=order)
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=data, order=order)
    return array if array.flags.aligned else array.copy(order=order)


def _build_scalar(items: list[Any], _state: Decoder) -> np.generic:
    name, data = exactly(items, str, bytes)
    dtype = _parse(name)
    if len(data) != dtype.itemsize:
        msg = "a numpy scalar came with the wrong number of bytes"
        raise CodecError(msg)
    holder: Any = np.ndarray((), dtype, buffer=data)
    scalar: np.generic = holder[()]
    return scalar


def _build_text(items: list[Any], _state: Decoder) -> np.str_ | np.bytes_:
    (text,) = exactly(items, (str, bytes))
    return np.str_(text) if isinstance(text, str) else np.bytes_(text)


def _build_dtype(items: list[Any], _state: Decoder) -> np.dtype[Any]:
    return _parse(exactly(items, str)[0])


def _build_ragged(items: list[Any], _state: Decoder) -> Ragged:
    if len(items) != 2 or type(items[1]) is not np.ndarray or items[1].dtype != np.int64:
        msg = "sequences came without values or offsets"
        raise CodecError(msg)
    try:
        return Ragged(*items)
    except ConfigError as error:
        raise CodecError(error.message) from error
