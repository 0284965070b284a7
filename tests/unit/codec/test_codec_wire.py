from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from controller.collect import equal
from zbus import Ragged
from zbus.codec import DEFAULT_LIMITS, decode, encode
from zbus.codec.wire import Kind

_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "codec.md"

# Written by version 1 of the wire; a change here is a change of the protocol version.
_GOLDEN = [
    ([["train", (1, "a"), {"lr": 0.5}]], ["9193a5747261696e93d4010101a16181a26c72cb3fe0000000000000"]),
    ({(1, 2): 2**64, "b": b"x"}, ["95d4010493d401010102c70902010000000000000000a162c40178"]),
    (np.arange(3, dtype="<u2"), ["94d40130a33c7532c40600000100020003"]),
    (np.zeros(64, "<f8"), ["94d40130a33c66380040", "00" * 512]),
    (
        Ragged(np.arange(3, dtype="<u2"), [0, 2, 3]),
        [
            "93d4013594d40130a33c7532c4060000010002000394d40130a33c6938c41800000000000000000200000000000000030000000000000003"
        ],
    ),
]


def test_bytes_of_version_one_stand():
    """What is encoded today is what version 1 wrote, and what version 1 wrote is read."""
    for value, golden in _GOLDEN:
        frames = [bytes(frame) for frame in encode(value)]
        assert [frame.hex() for frame in frames] == golden
        back = decode([bytes.fromhex(text) for text in golden])
        assert equal(back, value)


def test_every_kind_stands_in_the_reference():
    """The table of the reference page lists each kind by its number."""
    numbers = {int(number) for number in re.findall(r"\| (\d+) [`a-zA-Z.]", _PAGE.read_text(encoding="utf-8"))}
    assert {int(kind) for kind in Kind} <= numbers


def test_limits_stand_in_the_reference():
    """The page states the limits that hold."""
    page = _PAGE.read_text(encoding="utf-8")
    assert f"| {DEFAULT_LIMITS.depth} |" in page
    assert f"| {DEFAULT_LIMITS.items:,} |" in page
    assert f"| {DEFAULT_LIMITS.body_bytes >> 20} MiB |" in page
    assert f"| {DEFAULT_LIMITS.buffers:,} |" in page
    assert f"| {DEFAULT_LIMITS.buffer_bytes >> 30} GiB |" in page
