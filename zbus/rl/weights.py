"""What both sides of a weight update agree on: which tensors there are, how they lie in one buffer, what they hash to.

Weights travel as a ``Manifest`` (name, dtype and shape of each tensor) and one flat buffer of bytes, in which each
tensor begins at a multiple of 64 bytes. So a model is one slot of shared memory, whatever its dtypes, and numpy need
not know them: all here are views of bytes.

The digest of a model does not depend on the order of its tensors, and is made of one digest per tensor, so that an
update of some tensors hashes only these. A tensor's digest covers its name, dtype, shape and bytes; it is SHA-256, of
which processors have instructions, over pieces that several threads may hash at once.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zbus.errors import ConfigError

__all__ = [
    "ALIGNMENT",
    "Bytes",
    "Manifest",
    "TensorInfo",
    "combine",
    "digest",
    "digests",
    "manifest_of",
    "nbytes_of",
    "offsets",
    "triples_of",
    "views",
]

ALIGNMENT: Final = 64
"""Each tensor of a buffer begins at a multiple of this, in bytes."""

_ITEM_SIZES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1
    ),
}
_PIECE: Final = 8 << 20
_THREADS: Final = 8

Bytes = npt.NDArray[np.uint8]
"""Flat bytes of a tensor, or of all of them."""


class TensorInfo(NamedTuple):
    """One tensor of a model.

    Attributes:
        name: As in the state dict.
        dtype: Bare torch name, such as ``bfloat16``.
        shape: Sizes of its dimensions.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return _ITEM_SIZES[self.dtype] * math.prod(self.shape)


Manifest = tuple[TensorInfo, ...]
"""Tensors in the order in which they travel; no name twice."""


def triples_of(manifest: Manifest) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return a manifest as it travels in calls; ``manifest_of`` reads it."""
    return [(info.name, info.dtype, info.shape) for info in manifest]


def manifest_of(entries: Iterable[Sequence[Any]]) -> Manifest:
    """Check (name, dtype, shape) triples, such as came in a call, and return them as a manifest.

    Raises:
        ConfigError: A dtype is unknown, a shape is none, or a name stands twice.
    """
    found: dict[str, TensorInfo] = {}
    for name, dtype, shape in entries:
        info = TensorInfo(name, dtype, tuple(shape))
        sizes: tuple[object, ...] = info.shape
        if dtype not in _ITEM_SIZES or not all(type(size) is int and size >= 0 for size in sizes):
            msg = f"weights: tensor {name!r} of dtype {dtype!r} and shape {list(sizes)} cannot be"
            raise ConfigError(msg, hint=f"dtypes are bare torch names: {', '.join(_ITEM_SIZES)}")
        if name in found:
            msg = f"weights: tensor {name!r} stands twice in the manifest"
            raise ConfigError(msg, hint="leave out tensors that share their memory with another one")
        found[name] = info
    return tuple(found.values())


# -- one buffer ------------------------------------------------------------------------------------------------------


def offsets(manifest: Manifest) -> list[int]:
    """Return where each tensor begins in the buffer, and at the end how long the buffer is, in bytes."""
    at = [0]
    for info in manifest:
        at.append(at[-1] + -(-info.nbytes // ALIGNMENT) * ALIGNMENT)
    return at


def nbytes_of(manifest: Manifest) -> int:
    """Return the size of the buffer, in bytes."""
    return offsets(manifest)[-1]


def views(manifest: Manifest, data: Bytes) -> Iterator[tuple[TensorInfo, Bytes]]:
    """Yield each tensor and its bytes in the buffer, without a copy.

    Raises:
        ConfigError: The buffer has not the size that the manifest says.
    """
    at = offsets(manifest)
    if data.dtype != np.uint8 or data.shape != (at[-1],):
        msg = f"weights: the manifest is of {at[-1]:,} bytes, the buffer is {data.dtype} {list(data.shape)}"
        raise ConfigError(msg, hint="publish the weights anew")
    for info, (start, _) in zip(manifest, pairwise(at), strict=True):
        yield info, data[start : start + info.nbytes]


# -- digests ---------------------------------------------------------------------------------------------------------


def digests(tensors: Iterable[tuple[TensorInfo, Any]]) -> dict[str, bytes]:
    """Return the digest of each tensor by name; large ones are hashed by several threads.

    Args:
        tensors: Each with its bytes: any contiguous buffer of ``nbytes``.

    Raises:
        ConfigError: A buffer has another size than its tensor, or a name came twice.
    """
    found: dict[str, bytes] = {}
    with ExitStack() as open_:
        pool: ThreadPoolExecutor | None = None
        for info, buffer in tensors:
            data = memoryview(buffer)
            data = data.cast("B") if data.nbytes else data  # no view without items can be cast
            if data.nbytes != info.nbytes or info.name in found:
                msg = f"weights: tensor {info.name!r} has {info.nbytes:,} bytes, {data.nbytes:,} came"
                raise ConfigError(msg, hint="each name once, with its bytes")
            whole = hashlib.sha256(f"{info.name}\0{info.dtype}\0{list(info.shape)}\0".encode())
            if data.nbytes > _PIECE:
                pool = pool or open_.enter_context(_pool())
                pieces = [data[at : at + _PIECE] for at in range(0, data.nbytes, _PIECE)]
                for piece in pool.map(_hash, pieces):
                    whole.update(piece)
            elif data.nbytes:
                whole.update(_hash(data))
            found[info.name] = whole.digest()
    return found


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="zbus-digest")


def _hash(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def combine(parts: Mapping[str, bytes]) -> str:
    """Return the digest of a model from those of all its tensors by name, whatever their order: 32 hex digits."""
    whole = hashlib.sha256(b"zbus.rl.weights/1")
    for name in sorted(parts):
        encoded = name.encode()
        whole.update(struct.pack("<I", len(encoded)) + encoded + parts[name])
    return whole.hexdigest()[:32]


def digest(tensors: Mapping[str, npt.NDArray[Any]] | Iterable[tuple[TensorInfo, Any]]) -> str:
    """Return the digest of a model: numpy arrays by name, or (info, bytes) pairs where numpy has no such dtype."""
    if isinstance(tensors, Mapping):
        tensors = (
            (TensorInfo(name, array.dtype.name, array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            for name, array in tensors.items()
        )
    return combine(digests(tensors))
