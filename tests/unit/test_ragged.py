"""Sequences of different length in one array."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from waiting import scaled
from zbus import Ragged
from zbus.codec import decode, encode
from zbus.errors import CodecError, ConfigError

SEQUENCES = [[1, 2, 3], [], [4], [5, 6]]


def listed(ragged):
    """Return the sequences as lists."""
    return [one.tolist() for one in ragged]


@pytest.fixture(params=["numpy", "torch"])
def ragged(request):
    """Return four sequences in an array or a tensor."""
    if request.param == "torch":
        return Ragged.of([torch.tensor(one, dtype=torch.int32) for one in SEQUENCES])
    return Ragged.of([np.array(one, np.int32) for one in SEQUENCES])


def test_it_is_the_sequences_it_was_made_of(ragged):
    """Number, lengths, each one, and a text that says what it is."""
    assert listed(ragged) == SEQUENCES
    assert (len(ragged), ragged.lengths.tolist(), ragged.offsets.tolist()) == (4, [3, 0, 1, 2], [0, 3, 3, 4, 6])
    assert ragged[-1].tolist() == [5, 6]
    assert ragged[np.int64(2)].tolist() == [4]
    assert repr(ragged).startswith("<Ragged: 4 sequences, 6 entries of ")
    with pytest.raises(IndexError):
        ragged[4]
    assert Ragged.of([[], [1.5]]).values.dtype == np.float64


def test_parts_are_views_where_they_can_be(ragged):
    """A run of sequences shares memory, a choice of them is copied once."""
    part = ragged[2:]
    assert listed(part) == [[4], [5, 6]]
    part.values[0] = 9
    assert ragged.values[3] == 9
    assert listed(ragged[[3, 0]]) == [[5, 6], [1, 2, 3]]
    assert listed(ragged[::2]) == [[1, 2, 3], [9]]
    assert listed(ragged[3:1]) == listed(ragged[[]]) == []


def test_padding_fills_behind_each_end(ragged):
    """The rectangle that models take."""
    assert ragged.padded(-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1], [5, 6, -1]]
    assert ragged.padded().dtype == ragged.values.dtype
    assert ragged[:0].padded().shape == (0, 0)
    wide = Ragged(np.arange(6).reshape(3, 2), [0, 2, 3])
    assert wide.padded().tolist() == [[[0, 1], [2, 3]], [[4, 5], [0, 0]]]


def test_it_travels_as_it_is(ragged):
    """Kind, dtype and cuts come back, and the values ride out of band."""
    back = decode(encode({"x": [ragged]}))["x"][0]
    assert type(back.values) is type(ragged.values)
    assert (back.values.dtype, listed(back)) == (ragged.values.dtype, SEQUENCES)
    large = Ragged(np.arange(100_000), [0, 60_000, 100_000])
    frames = encode(large)
    assert len(frames) == 2
    assert np.array_equal(decode(frames)[1], np.arange(60_000, 100_000))


@pytest.mark.parametrize(
    ("values", "offsets"),
    [
        (np.arange(3), [0, 2]),
        (np.arange(3), [1, 3]),
        (np.arange(3), [0, 2, 1, 3]),
        (np.arange(3), [0, 4, 3]),
        (np.arange(3), [[0, 3]]),
        (np.arange(3), [0.0, 3.0]),
        (np.arange(3), []),
        (np.array(3), [0, 3]),
        ([1, 2, 3], [0, 3]),
        ("abc", [0, 3]),
    ],
)
def test_cuts_that_do_not_fit_are_refused_here_and_from_the_wire(values, offsets):
    """By whoever makes it, and by the decoder with an error of its own."""
    with pytest.raises(ConfigError):
        Ragged(values, offsets)
    lie = Ragged.__new__(Ragged)
    lie.values, lie.offsets = values, np.array(offsets)
    with pytest.raises(CodecError):
        decode(encode(lie))


def test_lies_about_its_parts_are_refused():
    """Offsets of another type or kind, and parts that are missing."""
    for offsets in ([0, 3], np.array([0, 3], np.int32), torch.tensor([0, 3]), None):
        lie = Ragged.__new__(Ragged)
        lie.values, lie.offsets = np.arange(3), offsets
        with pytest.raises(CodecError, match="without values or offsets"):
            decode(encode(lie))
    with pytest.raises(ConfigError, match="no dtype"):
        Ragged.of([])


def test_import_costs_no_library():
    """Naming it imports neither numpy nor torch."""
    script = "import sys, json; from zbus import Ragged; import zbus.codec; print(json.dumps(sorted(sys.modules)))"
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=scaled(60), check=True
    ).stdout
    assert not {"numpy", "torch"} & set(json.loads(said))
