from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from exactness import same
from zbus.codec import Limits, decode, encode
from zbus.errors import CodecError

DTYPES = [
    *("?", "i1", "<i2", ">i2", "<i4", ">i4", "<i8", ">i8", "u1", "<u2", ">u2", "<u4", ">u4", "<u8", ">u8"),
    *("<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "g", "<c8", ">c8", "<c16", ">c16", "G"),
    *("<M8[ns]", ">M8[D]", "<M8[25s]", "<m8[us]", "<M8", "<U5", ">U3", "S7"),
]


def _filled(dtype, shape):
    rng = np.random.default_rng(7)
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=int)) * kind.itemsize
    if kind.kind == "U":
        return np.full(shape, "é🚌x", dtype)
    if kind.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(rng.integers(0, 256, size, dtype="u1").tobytes(), dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (17, 19), (4, 5, 6, 7)], ids=str)
def test_array_of_every_dtype_and_shape_comes_back_bit_for_bit(dtype, shape):
    """Dtype with byte order, shape and bits arrive exactly, NaN payloads included."""
    value = _filled(dtype, shape)
    back = decode(encode([value]))[0]
    assert back.dtype == value.dtype
    assert back.dtype.str == value.dtype.str
    assert back.shape == value.shape
    assert back.tobytes() == value.tobytes()
    assert back.flags.writeable
    assert back.flags.aligned


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalar_of_every_dtype_comes_back_as_a_numpy_scalar(dtype):
    """A numpy scalar stays one, with its dtype and bits."""
    value = _filled(dtype, (1,))[0]
    assert same(decode(encode({"x": value}))["x"], value)


@pytest.mark.parametrize(
    "value", [np.str_(""), np.str_("a\x00"), np.bytes_(b""), np.bytes_(b"a\x00"), np.True_], ids=range(5)
)
def test_text_and_bool_scalars_keep_type_and_trailing_zeros(value):
    """Numpy's text scalars keep what an array of them would lose."""
    back = decode(encode(value))
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_itself_can_be_sent(dtype):
    """A dtype object arrives equal."""
    value = np.dtype(dtype)
    assert decode(encode(value)) == value


def test_views_arrive_as_their_content():
    """Strided, transposed, reversed, broadcast and read-only arrays arrive as what they show."""
    base = np.arange(2400, dtype="<i4").reshape(40, 60)
    for view in (base[::2, ::3], base.T, base[::-1], base[:, 5], np.broadcast_to(base[0], (5, 60)), base[3:7]):
        back = decode(encode(view))
        assert np.array_equal(back, view)
    base.setflags(write=False)
    assert np.array_equal(decode(encode(base)), base)
    assert decode(encode(base)).flags.writeable


def test_column_major_order_is_kept():
    """A Fortran-ordered array arrives Fortran-ordered."""
    value = np.asfortranarray(np.arange(600.0).reshape(20, 30))
    back = decode(encode(value))
    assert back.flags.f_contiguous
    assert np.array_equal(back, value)


def test_memory_map_arrives_as_an_array(tmp_path):
    """A memory-mapped array is read and sent as a plain one."""
    np.arange(1000.0).tofile(tmp_path / "data")
    value = np.memmap(tmp_path / "data", dtype="f8", mode="r")
    back = decode(encode([value, value[:3]]))
    assert type(back[0]) is np.ndarray
    assert np.array_equal(back[0], value)


def test_large_arrays_leave_the_body_and_small_ones_do_not():
    """Arrays of 512 bytes and more are frames of their own, uncopied and contiguous."""
    small, large = np.zeros(511, "u1"), np.zeros(512, "u1")
    body, *buffers = encode([small, large, large[::-1]])
    assert [memoryview(buffer).nbytes for buffer in buffers] == [512, 512]
    assert all(memoryview(buffer).c_contiguous for buffer in buffers)
    assert np.shares_memory(np.asarray(buffers[0]), large)
    assert 511 < len(body) < 600


def test_snapshot_is_not_touched_by_a_later_change():
    """With ``snapshot`` what is sent is what was there at the call; without it the buffer is a view."""
    value = np.zeros(1000)
    taken, viewed = encode(value, snapshot=True), encode(value)
    value[:] = 1
    assert decode(taken).sum() == 0
    assert decode(viewed).sum() == 1000


def test_decoded_array_never_aliases_what_it_was_decoded_from():
    """By default a change of a decoded array reaches neither the sender's array nor the frames."""
    value = np.zeros(1000)
    frames = encode(value)
    back = decode(frames)
    back[:] = 7
    assert value.sum() == 0
    assert decode(frames).sum() == 0


def test_owned_frames_are_used_in_place():
    """With ``owned`` a writable frame becomes the array's memory; a read-only one is copied."""
    value = np.arange(1000.0)
    body, buffer = encode(value)
    frame = bytearray(buffer)
    back = decode([body, frame], owned=True)
    assert np.shares_memory(back, np.frombuffer(frame, "f8"))
    back[0] = 5
    copied = decode([body, bytes(buffer)], owned=True)
    copied[0] = 6
    assert value[0] == 0


def test_misaligned_owned_frame_is_realigned():
    """Memory at an odd address is copied rather than handed to code that needs alignment."""
    body, buffer = encode(np.arange(1000.0))
    shifted = memoryview(bytearray(1 + len(buffer)))[1:]
    shifted[:] = buffer
    back = decode([body, shifted], owned=True)
    assert back.flags.aligned
    assert np.array_equal(back, np.arange(1000.0))


class _Child(np.ndarray):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([1, "a", None], dtype=object), "objects"),
        (np.zeros(3, dtype=[("x", "f4"), ("y", "i2")]), "structured"),
        (np.zeros(3, "V5"), "exactly"),
        (np.array(["a"], dtype=np.dtypes.StringDType()), "cannot be carried"),
        (np.ma.masked_array([1, 2], mask=[0, 1]), "MaskedArray"),
        (np.zeros(3).view(_Child), "_Child"),
        (np.void(b"abc"), "numpy.void"),
        (np.float32, "type"),
    ],
    ids=range(8),
)
def test_array_that_would_lose_something_is_refused(value, words):
    """Object, structured and foreign arrays are refused with path and remedy."""
    with pytest.raises(CodecError, match=words) as caught:
        encode({"a": [value]})
    assert caught.value.path == "$['a'][0]"
    assert caught.value.hint


def test_array_limits_hold_on_both_sides():
    """Number and bytes of buffers are bounded for sender and receiver."""
    value = [np.zeros(1000)] * 3
    for limits in (Limits(buffers=2), Limits(buffer_bytes=20_000)):
        with pytest.raises(CodecError):
            encode(value, limits=limits)
        with pytest.raises(CodecError):
            decode(encode(value), limits=limits)


def test_plain_values_import_neither_numpy_nor_torch():
    """A process that has not imported numpy or torch does not through the codec."""
    script = (
        "import sys; from zbus.codec import decode, encode, describe_exception\n"
        "assert decode(encode([(1, {2}), b'x' * 100000, 2**80])) == [(1, {2}), b'x' * 100000, 2**80]\n"
        "describe_exception(ValueError('x'))\n"
        "assert 'numpy' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_process_that_takes_no_arrays_cannot_be_made_to_import_numpy():
    """A message with an array is refused, and imports nothing, where the limits say so."""
    body, *buffers = encode([np.zeros(3), np.zeros(1000)])
    script = (
        "import sys; from zbus.codec import Limits, decode; from zbus.errors import CodecError\n"
        f"frames = [{bytes(body)!r}, *{[bytes(buffer) for buffer in buffers]!r}]\n"
        "try: decode(frames, limits=Limits(arrays=False)); raise SystemExit('accepted')\n"
        "except CodecError as error: assert 'takes none' in str(error)\n"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_array_needs_no_torch():
    """A process with numpy alone sends and receives arrays without importing torch."""
    script = (
        "import sys, numpy; from zbus.codec import decode, encode\n"
        "assert decode(encode(numpy.arange(9))).sum() == 36\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
