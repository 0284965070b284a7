"""The bytes of an input file, inflated: in pieces, so that memory is bounded whatever its size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Final

from traceview.problems import Problems

if TYPE_CHECKING:
    from traceview.reader import Source

__all__ = ["CHUNK", "GZIP", "ZSTD", "read_bytes"]

CHUNK: Final = 1 << 17
"""Bytes of a piece: the events in it fit a processor's cache."""

GZIP: Final = b"\x1f\x8b"
ZSTD: Final = b"\x28\xb5\x2f\xfd"


def read_bytes(source: Source, problems: Problems) -> Iterator[bytes]:
    """Yield the content in pieces; compression is told by its first bytes, never by the name.

    Raises:
        OSError: The file cannot be read.
    """
    with source.path.open("rb", buffering=0) as file:
        data = file.read(CHUNK)
        if data.startswith(ZSTD):
            yield from _inflate_zstd(source, file, problems)
        elif data.startswith(GZIP):
            yield from _inflate_gz(source, data, file, problems)
        else:
            left = source.size
            while data and (left is None or left > 0):
                yield data if left is None else data[:left]
                left = None if left is None else left - len(data)
                data = file.read(CHUNK)


def _inflate_gz(source: Source, data: bytes, file: IO[bytes], problems: Problems) -> Iterator[bytes]:
    inflate = zlib.decompressobj(31)
    try:
        while data:
            out = inflate.decompress(data, CHUNK)
            if out:
                yield out
            data = inflate.unconsumed_tail or inflate.unused_data
            if inflate.eof:
                data = (data or file.read(CHUNK)).lstrip(b"\0")
                inflate = zlib.decompressobj(31)
            elif not data:
                data = file.read(CHUNK)
                if not data:
                    yield inflate.flush()
                    problems.add("ZT0107", "truncated_gz", f"{source.label} cut off inside its gzip stream")
    except zlib.error as error:
        problems.add("ZT0107", "bad_gz", f"{source.label} has a damaged gzip stream ({error}), rest ignored")


def _inflate_zstd(source: Source, file: IO[bytes], problems: Problems) -> Iterator[bytes]:
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        text = f"{source.label} is zstd-compressed: install the package zstandard, or decompress it first"
        problems.add("ZT0102", "zstd", text)
        return
    file.seek(0)
    try:
        with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as reader:
            while data := reader.read(CHUNK):
                yield data
    except zstandard.ZstdError as error:
        problems.add("ZT0107", "bad_zstd", f"{source.label} has a damaged zstd stream ({error}), rest ignored")
