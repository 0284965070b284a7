"""Handles of values that stay elsewhere: they travel as metadata, exactly, and say what they stand for."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbus import ConfigError, JoinedRef, Ragged, Ref
from zbus.codec import decode, encode
from zbus.codec.rows import describe, join, lengths_of, rows_of, take
from zbus.errors import CodecError


def ref(**changes) -> Ref:
    """Return a handle of a batch of eight rows."""
    fields = {
        "role": "actor", "rank": 3, "incarnation": 1 << 50, "generation": (1 << 63) - 1, "number": 7,
        "memory": "00ff00ff00ff00ff", "endpoints": {"ctl": ["ipc:///run/c", "tcp://127.0.0.1:7"]}, "nbytes": 1 << 24,
        "rows": 8, "lengths": [1, 2, 3, 4, 5, 6, 7, 1 << 31], "method": "rollout", "about": "dict(ids int64 [8, 4])",
    }  # fmt: skip
    return Ref(**{**fields, **changes})


def back(value):
    """Return what arrives."""
    return decode([bytes(frame) for frame in encode(value)])


FIELDS = [name for name in Ref.__slots__ if name not in ("__weakref__", "home", "hold", "kept")]


@pytest.mark.parametrize(
    "sent",
    [ref(), ref(rows=None, lengths=None), ref()[2:5], ref()[0:0], ref().take([1, 4, 6]), ref(memory="", endpoints={})],
    ids=["whole", "no rows", "slice", "empty", "chosen", "far"],
)
def test_a_handle_arrives_with_all_that_it_says(sent):
    """Every field travels, rows chosen one by one included."""
    came = back({"x": [sent]})["x"][0]

    assert came == sent
    for name in FIELDS:
        one, other = getattr(sent, name), getattr(came, name)
        same = (one is None) == (other is None) if name in ("lengths", "chosen") else one == other
        assert same, name
        if name in ("lengths", "chosen") and one is not None:
            assert list(one) == list(other)


def test_bytes_of_a_handle_stand():
    """What version 1 wrote is read, and written today."""
    golden = (
        "9ed40128a56163746f7203cf0004000000000000cf7fffffffffffffff07b0303066663030666630306666303066669192a363746c92ac69"
        "70633a2f2f2f72756e2f63b17463703a2f2f3132372e302e302e313a37ce0040000002c4080300000004000000a7726f6c6c6f7574b66469"
        "63742869647320696e743634205b382c20345d29920204"
    )
    assert encode(ref()[2:4])[0].hex() == golden
    assert decode([bytes.fromhex(golden)]) == ref()[2:4]


def test_rows_of_rows_are_rows_of_the_value():
    """Slices and choices of a slice count from its own first row."""
    part = ref()[2:7]

    assert (part.rows, list(part.chosen), list(part.lengths)) == (5, [2, 3, 4, 5, 6], [3, 4, 5, 6, 7])
    assert list(part[1:3].chosen) == [3, 4]
    assert list(part.take([4, 0]).chosen) == [6, 2]
    assert list(part.take([4, 0])[0:1].chosen) == [6]
    assert list(ref()[::3].chosen) == [0, 3, 6]
    assert list(ref()[::-1][1:3].chosen) == [6, 5]
    assert part.nbytes == ref().nbytes * 5 // 8
    assert ref()[0:8] == ref()
    assert ref()[0:8] is not None
    with pytest.raises(IndexError, match=r"rows 2\.\.6"):
        part.take([5])


def test_a_handle_reads_well_and_cannot_be_changed():
    """Its text names owner, method, types and size; what it cannot do it says, with what to do."""
    assert repr(ref()) == "<Ref actor/3 rollout: dict(ids int64 [8, 4]), 16.0 MiB, 8 rows>"
    assert repr(ref()[2:5]).endswith("6.0 MiB, rows 2..4>")
    with pytest.raises(AttributeError, match="cannot be changed"):
        ref().number = 1
    with pytest.raises(TypeError, match=r"ref\.get\(\)"):
        ref()[3]
    with pytest.raises(TypeError):
        iter(ref())
    with pytest.raises(TypeError, match="within one run"):
        pickle.dumps(ref())
    with pytest.raises(TypeError, match="within one run"):
        copy.copy(ref())
    with pytest.raises(ConfigError) as error:
        ref().get()
    assert "bus.get(ref)" in error.value.hint
    with pytest.raises(TypeError, match="no rows"):
        len(ref(rows=None, lengths=None))
    assert ref(rows=0, lengths=None)


def _changed(position: int, value: object):
    import msgpack

    items = msgpack.unpackb(encode(ref()[2:4])[0], strict_map_key=False)
    items[position] = value
    return [msgpack.packb(items)]


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (1, 5), (2, -1), (4, 1.5), (5, True), (6, None), (7, [["ctl"]]), (7, [["ctl", [1]]]),
        (7, [["x", ["y"]]] * 65), (7, {"ctl": []}), (8, -1), (9, 3), (9, None), (10, b"abc"), (10, b"abcd"),
        (12, "x" * 1025), (13, [4, 2]), (13, [0]), (13, [-1, 1]), (13, b"abc"), (13, b"abcd"), (13, "all"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_what_is_no_handle_is_refused(position, value):
    """A handle made up by a peer is a clear error, not one of ours."""
    with pytest.raises(CodecError):
        decode(_changed(position, value))


def test_handles_in_a_value_are_told():
    """Whoever encodes or decodes can learn which handles there are."""
    out: list[Ref] = []
    frames = encode([ref(), {"a": (ref()[1:2],)}, 5], refs=out)
    found: list[Ref] = []
    decode(frames, refs=found)

    assert out == found == [ref(), ref()[1:2]]


BATCH = {
    "ids": np.arange(12).reshape(4, 3),
    "lengths": np.array([3, 1, 2, 0]),
    "texts": ["a", "b", "c", "d"],
    "more": {"mask": np.ones(4, bool)},
    "step": 7,
}


def test_rows_are_what_split_divides():
    """Lists, tuples, first dimensions and the columns of dicts that agree; everything else goes along."""
    assert rows_of(BATCH) == 4
    assert [rows_of(value) for value in ([1, 2], (1,), np.zeros(3))] == [2, 1, 3]
    assert [rows_of(value) for value in (np.zeros(()), 5, "text", {"a": [1], "b": [1, 2]})] == [None] * 4
    part = take(BATCH, range(1, 3))
    assert np.shares_memory(part["ids"], BATCH["ids"])
    assert (part["texts"], part["step"], part["more"]["mask"].shape) == (["b", "c"], 7, (2,))
    assert take(BATCH, [3, 0])["ids"].tolist() == [[9, 10, 11], [0, 1, 2]]
    joined = join([take(BATCH, range(3)), take(BATCH, [3])])
    assert joined["ids"].tolist() == BATCH["ids"].tolist()
    assert (joined["texts"], joined["step"]) == (BATCH["texts"], 7)
    with pytest.raises(ValueError, match=r"different shape in \['ids'\]"):
        join([{"ids": np.zeros((1, 2))}, {"ids": np.zeros((1, 3))}])
    with pytest.raises(ValueError, match="different keys"):
        join([{"a": [1]}, {"b": [1]}])


def test_token_counts_are_those_the_value_declares():
    """A mask or a column of lengths; nothing is guessed."""
    assert lengths_of(BATCH) == [3, 1, 2, 0]
    assert lengths_of({"attention_mask": np.array([[1, 1, 0], [1, 0, 0]])}) == [2, 1]
    assert lengths_of({"attention_mask": [[1, 1, 0], [1, 0, 0]]}) == [2, 1]
    assert lengths_of({"ids": [[1, 2], [3]]}) is None
    assert lengths_of([1, 2]) is None
    assert lengths_of({"lengths": ["a"]}) is None
    assert describe(BATCH) == (
        "dict(ids int64 [4, 3], lengths int64 [4], texts list of 4, more dict(mask bool [4]), step int)"
    )


def test_ragged_columns_are_rows_too():
    """Sequences of different length: counted, taken and joined as they are; they say their token counts."""
    value = {"ids": Ragged.of([[1, 2], [3], [4, 5, 6]]), "reward": np.array([0.1, 0.2, 0.3])}
    assert rows_of(value) == 3
    assert lengths_of(value) == [2, 1, 3]
    assert [list(row) for row in take(value, [2, 0])["ids"]] == [[4, 5, 6], [1, 2]]
    joined = join([take(value, range(1)), take(value, range(1, 3))])
    assert [list(row) for row in joined["ids"]] == [[1, 2], [3], [4, 5, 6]]
    assert describe(value) == "dict(ids ragged int64 [3 x ..], reward float64 [3])"


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=4)


@given(sizes=SIZES, data=st.data())
def test_rows_of_a_joined_handle_are_those_of_its_parts(sizes, data):
    """Any rows of any order, also of rows taken before, come from the right part, and from no part too much."""
    parts = [
        ref(number=number, rows=size, lengths=[10 * number + row for row in range(size)])
        for number, size in enumerate(sizes, 1)
    ]
    values = {part.number: [f"{part.number}.{row}" for row in range(part.rows)] for part in parts}
    flat = [item for value in values.values() for item in value]
    order = data.draw(st.none() | st.permutations(range(len(flat))))
    asked = []

    def get(part):
        asked.append(part)
        value = values[part.number]
        return value if part.chosen is None else take(value, part.chosen)

    joined = JoinedRef(parts, order)
    expected = flat if order is None else [flat[place] for place in order]
    assert back(joined) == joined
    assert joined.made(get) == expected
    assert len(joined) == len(expected)
    assert [f"{length // 10}.{length % 10}" for length in joined.lengths] == expected
    for _ in range(2):
        if not expected:
            return
        rows = data.draw(st.lists(st.sampled_from(range(len(expected))), min_size=1, unique=True))
        joined, expected = joined.take(rows), [expected[row] for row in rows]
        asked.clear()
        assert (joined.made(get) if isinstance(joined, JoinedRef) else get(joined)) == expected
        assert sum(part.rows for part in asked) == len(expected)


def test_a_joined_handle_that_is_none_is_refused():
    """Its order must be one, its parts handles with rows."""
    good = JoinedRef([ref(rows=2, lengths=None), ref(number=8, rows=1, lengths=None)], [2, 0, 1])
    assert back(good) == good
    assert good[1:3] == good.parts[0]
    for order in ([0, 1], [0, 1, 1], [0, 1, 3]):
        with pytest.raises(CodecError, match="rows are not those"):
            back(JoinedRef(good.parts, order))
    with pytest.raises(ConfigError, match="without rows"):
        JoinedRef([ref(rows=None, lengths=None)])
    with pytest.raises(CodecError, match="parts are none"):
        decode([encode(good)[0].replace(encode(good.parts[0])[0], b"\x01")])
