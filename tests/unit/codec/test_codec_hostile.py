from __future__ import annotations

import resource
import struct
import sys
import tracemalloc

import msgpack
import numpy as np
import pytest

from zbus.codec import Limits, decode, encode
from zbus.errors import CodecError


def _mark(kind):
    return b"\xd4\x01" + bytes((kind,))


def _array(*items):
    return bytes((0x90 | len(items),)) + b"".join(items)


def _pack(value):
    return msgpack.packb(value, use_bin_type=True)


def _ndarray(dtype, operand, *shape):
    return _array(_mark(48), _pack(dtype), _pack(operand), *map(_pack, shape))


def _tensor(dtype, operand, *shape):
    return _array(_mark(64), _pack(dtype), _pack(operand), *map(_pack, shape))


BODIES = {
    "empty": b"",
    "reserved byte": b"\xc1",
    "trailing byte": b"\xc0\xc0",
    "trailing value": _pack([1]) + _pack([2]),
    "short string": b"\xdb\xff\xff\xff\xffabc",
    "short bin": b"\xc6\xff\xff\xff\xff",
    "short ext": b"\xc9\xff\xff\xff\xff\x01",
    "four giga items": b"\xdd\xff\xff\xff\xff",
    "four giga pairs": b"\xdf\xff\xff\xff\xff",
    "nested claims": (b"\xdd" + struct.pack(">I", 100_000)) * 1000 + b"\xc0" * 100_000,
    "nested claims of maps": (b"\xdf" + struct.pack(">I", 100_000) + b"\x01") * 1000 + b"\xc0" * 100_000,
    "depth 65": b"\x91" * 65 + b"\xc0",
    "depth 512": b"\x91" * 512 + b"\xc0",
    "depth 100000": b"\x91" * 100_000 + b"\xc0",
    "depth in maps": b"\x81\xa1k" * 65 + b"\xc0",
    "depth in tuples": (b"\x92" + _mark(1)) * 65 + b"\xc0",
    "not utf-8": b"\xa2\xff\xfe",
    "surrogate in utf-8": b"\xa3\xed\xa0\x80",
    "duplicate key": b"\x82\xa1a\x01\xa1a\x02",
    "equal keys of two types": b"\x82\x01\x01\xcb" + struct.pack(">d", 1.0) + b"\x02",
    "list as key": b"\x81\x91\x01\x01",
    "unknown ext": b"\xd4\x05\x00",
    "unknown mark": _mark(200),
    "long mark": b"\xd5\x01\x01\x01",
    "mark alone": _mark(1),
    "mark as item": _array(_pack(1), _mark(1)),
    "mark twice": _array(_mark(1), _mark(1)),
    "mark as key": b"\x81" + _mark(1) + b"\x01",
    "mark as value": b"\x81\x01" + _mark(1),
    "empty big integer": b"\xc7\x00\x02",
    "bad timestamp": b"\xd7\xff" + b"\xff" * 8,
    "timestamp beyond years": b"\xc7\x0c\xff" + b"\x00" * 4 + b"\x7f" * 8,
    "set with twins": _array(_mark(2), _pack(1), _pack(1)),
    "set of lists": _array(_mark(2), _pack([])),
    "odd dict": _array(_mark(4), _pack(1)),
    "dict with twins": _array(_mark(4), _pack(1), _pack(1), _pack(1), _pack(1)),
    "deque beyond maxlen": _array(_mark(6), _pack(1), _pack(1), _pack(1)),
    "deque of nothing": _array(_mark(6)),
    "bytes without buffer": _array(_mark(7), _pack(0)),
    "complex of text": _array(_mark(9), _pack("a"), _pack(1.0)),
    "range without step": _array(_mark(11), _pack(1), _pack(2), _pack(0)),
    "month 13": _array(_mark(14), _pack(2000), _pack(13), _pack(1)),
    "huge timedelta": _array(_mark(16), _pack(2**62), _pack(0), _pack(0)),
    "zone of 48 hours": _array(_mark(17), _pack(48 * 3600 * 10**6), _pack(None)),
    "not a decimal": _array(_mark(18), _pack("1.2.3")),
    "short uuid": _array(_mark(19), _pack(b"abc")),
    "unknown path": _array(_mark(20), _pack("os"), _pack("x")),
    "fraction of zero": _array(_mark(21), _pack(1), _pack(0)),
    "class by name": _array(_mark(32), _pack("os.system"), _pack({"cmd": "true"})),
    "enum by name": _array(_mark(33), _pack("enum.Enum"), _pack("X")),
    "named tuple without tag": _array(_mark(35)),
    "object dtype": _ndarray("|O", b"\x00" * 8, 1),
    "object dtype by name": _ndarray("object", b"\x00" * 8, 1),
    "structured dtype": _ndarray("f4,f4", b"\x00" * 8, 1),
    "dtype of no size": _ndarray("<U0", b"", 1 << 40),
    "dtype that is none": _ndarray("<f3", b"\x00" * 3, 1),
    "dtype with a comma": _ndarray("<f4\n", b"\x00" * 4, 1),
    "dtype as int": _ndarray(4, b"\x00" * 4, 1),
    "huge text dtype": _ndarray("<U999999999", b"", 1),
    "shape beyond data": _ndarray("<f8", b"\x00" * 8, 2),
    "shape of a terabyte": _ndarray("<f8", b"\x00" * 8, 1 << 37),
    "shape that overflows": _ndarray("<f8", b"", 1 << 32, 1 << 32),
    "shape that overflows to zero": _ndarray("<f8", b"", 1 << 61, 8),
    "zero hides an overflow": _ndarray("<f8", b"", 0, 1 << 62, 1 << 62),
    "negative shape": _ndarray("<f8", b"\x00" * 8, -1),
    "two negative shapes": _ndarray("<f8", b"\x00" * 8, -1, -1),
    "bool as shape": _ndarray("<f8", b"\x00" * 8, True),
    "text as shape": _ndarray("<f8", b"\x00" * 8, "1"),
    "float as shape": _ndarray("<f8", b"\x00" * 8, 1.0),
    "65 dimensions": b"\xdc\x00\x44" + _mark(48) + _pack("<f8") + _pack(b"\x00" * 8) + _pack(1) * 65,
    "buffer that did not come": _ndarray("<f8", 0, 1),
    "negative buffer": _ndarray("<f8", -1, 1),
    "buffer as text": _ndarray("<f8", "0", 1),
    "array without operands": _array(_mark(48)),
    "mark inside an array": _array(_mark(48), _mark(48), _pack(b""), _pack(0)),
    "scalar of wrong size": _array(_mark(50), _pack("<f8"), _pack(b"\x00")),
    "object scalar": _array(_mark(50), _pack("|O"), _pack(b"\x00" * 8)),
    "tensor dtype unknown": _tensor("qint8", b"\x00", 1),
    "tensor dtype is an attribute of torch": _tensor("load", b"\x00", 1),
    "tensor shape beyond data": _tensor("float32", b"\x00" * 4, 2),
    "tensor negative": _tensor("float32", b"\x00" * 4, -1),
    "tensor of 4 TiB": _tensor("float32", b"\x00" * 4, 1 << 40),
    "size of text": _array(_mark(65), _pack("a")),
    "device unknown": _array(_mark(67), _pack("os"), _pack(0)),
    "device index": _array(_mark(67), _pack("cuda"), _pack(1 << 40)),
}


@pytest.mark.parametrize("name", BODIES)
def test_body_that_lies_is_refused_without_memory_for_its_claims(name):
    """Each malformed body raises CodecError alone, and takes memory in proportion to its size."""
    if name.startswith(("tensor", "size", "device")):
        pytest.importorskip("torch")
    body = BODIES[name]
    with pytest.raises(CodecError):
        decode([body])  # the first of its kind imports numpy or torch, which is not the body's doing
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode([body])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000 + 40 * len(body)


def test_no_frames_is_refused():
    """Nothing is not a value."""
    with pytest.raises(CodecError, match="no body"):
        decode([])


@pytest.mark.parametrize("size", [0, 7_999, 8_001, 16_000])
def test_buffer_of_another_size_is_refused(size):
    """A frame must hold exactly the bytes that dtype and shape demand."""
    body, _ = encode(np.zeros(1000))
    with pytest.raises(CodecError, match="8,000 bytes was announced"):
        decode([body, bytes(size)])


def test_buffer_named_twice_or_not_at_all_is_refused():
    """Two arrays never share memory, and no frame goes unread."""
    with pytest.raises(CodecError, match="twice"):
        decode([_array(_ndarray("|u1", 0, 600), _ndarray("|u1", 0, 600)), bytes(600)])
    body, buffer = encode(np.zeros(1000))
    with pytest.raises(CodecError, match="2 buffers came"):
        decode([body, buffer, b""])
    with pytest.raises(CodecError, match="0 came"):
        decode([body])


def test_released_or_foreign_buffer_is_refused():
    """A frame that is no memory is refused like any other bad frame."""
    view = memoryview(bytes(8000))
    view.release()
    body, _ = encode(np.zeros(1000))
    for frames in ([body, view], [body, "text"], [view], [None]):
        with pytest.raises(CodecError):
            decode(frames)


def test_standard_timestamp_is_read_as_a_utc_datetime():
    """Msgpack's own timestamp, which zbus never writes, arrives as a value the codec knows."""
    value = decode([b"\xd6\xff\x00\x00\x00\x01"])
    assert value.isoformat() == "1970-01-01T00:00:01+00:00"


def test_nothing_is_imported_for_a_name_on_the_wire():
    """Names of classes, dtypes, devices and exceptions lead to tables only."""
    known = set(sys.modules)
    for name in ("antigravity", "this", "os.system", "zbus.transport", "\u043es"):
        for body in (
            _array(_mark(32), _pack(name), b"\x80"),
            _ndarray(name, b"", 0),
            _array(_mark(33), _pack(name), _pack("x")),
        ):
            with pytest.raises(CodecError):
                decode([body])
    assert "antigravity" not in sys.modules
    assert {module for module in set(sys.modules) - known if module in {"this", "zbus.transport"}} == set()


def test_claims_of_a_megabyte_do_not_grow_the_process():
    """The peak memory of the process stays flat over a large body of nested claims."""
    body = (b"\xdd" + struct.pack(">I", 1_000_000)) * 500 + b"\xc0" * 1_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        with pytest.raises(CodecError):
            decode([body])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_message_of_a_refusal_does_not_repeat_the_body():
    """An error about a hostile message is short."""
    for body in BODIES.values():
        with pytest.raises(CodecError) as caught:
            decode([body])
        assert len(str(caught.value)) < 500
        assert len(caught.value.hint or "") < 500


def test_limits_apply_to_the_sum_of_buffers():
    """Many frames within their own bounds are still bounded together."""
    with pytest.raises(CodecError, match="limit is 1,000"):
        decode([b"\xc0", *[bytes(600)] * 2], limits=Limits(buffer_bytes=1000))
