from __future__ import annotations

import collections
import contextlib
import datetime as dt
import importlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exactness import same
from zbus.codec import decode, describe_exception, encode, rebuild_exception
from zbus.errors import CodecError, RemoteError

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.datetimes(timezones=st.sampled_from([None, dt.UTC, dt.timezone(dt.timedelta(minutes=-90))])),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
)
keys = st.recursive(
    scalars,
    lambda inner: st.one_of(st.tuples(inner), st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
arrays = hnp.arrays(
    st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.unsigned_integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?"),
        hnp.complex_number_dtypes(endianness="?"),
        hnp.datetime64_dtypes(endianness="?"),
        hnp.timedelta64_dtypes(endianness="?"),
        hnp.unicode_string_dtypes(endianness="?", min_len=1),
    ),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9),
)
values = st.recursive(
    st.one_of(scalars, arrays, st.binary(max_size=20).map(bytearray)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(collections.deque),
        st.sets(keys, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


@given(values)
def test_every_value_comes_back_exactly(value):
    """Whatever is encoded decodes to the same types, order and bits."""
    assert same(decode(encode(value)), value)


@given(values)
def test_what_came_back_encodes_to_the_same_frames(value):
    """Encoding is a function of the value, so a relay changes nothing."""
    frames = encode(value)
    assert [bytes(frame) for frame in encode(decode(frames))] == [bytes(frame) for frame in frames] or _has_set(value)


def _has_set(value):
    """Tell whether a set, whose order may differ, is inside."""
    if isinstance(value, (set, frozenset)):
        return True
    if isinstance(value, dict):
        return any(map(_has_set, value.keys())) or any(map(_has_set, value.values()))
    if isinstance(value, (list, tuple, collections.deque)):
        return any(map(_has_set, value))
    return False


@given(st.data())
def test_array_views_arrive_as_their_content(data):
    """Any basic slice of an array arrives as what it shows."""
    array = data.draw(hnp.arrays("<i4", hnp.array_shapes(max_dims=3, max_side=12)))
    view = array[data.draw(hnp.basic_indices(array.shape))]
    view = np.asarray(view)
    assert np.array_equal(decode(encode(view)), view)


@given(st.binary(max_size=300), st.lists(st.binary(max_size=20), max_size=3))
def test_arbitrary_bytes_give_a_value_or_a_codec_error(body, buffers):
    """Nothing but CodecError escapes from decoding garbage."""
    _only_codec_error([body, *buffers])


@given(values, st.data())
def test_mutated_message_gives_a_value_or_a_codec_error(value, data):
    """Bytes changed, cut or added anywhere: a value or CodecError, nothing else."""
    frames = [bytearray(frame) for frame in encode(value)]
    frame = data.draw(st.sampled_from(frames))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(frame)))
        frame[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=4))
    _only_codec_error(frames)


def _only_codec_error(frames):
    with contextlib.suppress(CodecError):
        decode(frames)


RECORDED = [
    [["train", (1, [2.5, None]), {"lr": 1e-3, "tags": {"a", b"b"}}]],
    {(1, "a"): 2**80, "when": dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "c": 1j, "s": slice(1, 2)},
    [np.arange(200, dtype="<i8"), np.arange(6, dtype=">f4").reshape(2, 3), np.float32(1), np.dtype("<M8[ns]")],
    collections.OrderedDict(a=collections.deque([1], 3), b=bytearray(b"x"), c=range(3)),
]


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_every_single_byte_mutation_and_truncation_of_a_body_is_survived(number):
    """Each byte set to each value, and each prefix: a value or CodecError, memory in proportion to the body."""
    body, *buffers = encode(RECORDED[number])
    decode([body, *buffers])
    with contextlib.suppress(ImportError):
        # A changed mark may be that of a tensor; the import itself is not the body's doing.
        decode(encode(importlib.import_module("torch").zeros(1)))
    tracemalloc.start()
    try:
        for place in range(len(body)):
            changed = bytearray(body)
            for byte in range(256):
                changed[place] = byte
                _only_codec_error([bytes(changed), *buffers])
            _only_codec_error([body[:place], *buffers])
            with pytest.raises(CodecError):
                decode([body[:place], *buffers])
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@given(st.recursive(st.none(), lambda inner: st.tuples(st.text(), inner), max_leaves=8), st.lists(values, max_size=3))
def test_any_exception_with_any_arguments_arrives(chain, arguments):
    """An exception with arbitrary arguments and causes always arrives as a RemoteError of its class."""
    error = ValueError(*arguments)
    at: BaseException = error
    while chain is not None:
        at.__cause__ = KeyError(chain[0])
        at, chain = at.__cause__, chain[1]
    where = {"role": "r", "rank": 0, "host": "h", "pid": 1, "method": "m", "attempts": 1}
    back = rebuild_exception(decode(encode(describe_exception(error))), **where)
    assert isinstance(back, RemoteError)
    assert isinstance(back, ValueError)


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(), st.binary()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    ["type", "builtin", "tag", "message", "args", "os", "notes", "cause", "members", "name"]
                ),
                st.one_of(inner, st.sampled_from(["OSError", "ExceptionGroup", "UnicodeDecodeError", "SystemExit"])),
            ),
        ),
    )
)
def test_any_description_gives_a_remote_error(desc):
    """Rebuilding never fails, whatever a worker sends."""
    where = {"role": None, "rank": None, "host": None, "pid": None, "method": None, "attempts": 1}
    assert isinstance(rebuild_exception(desc, **where), RemoteError)
