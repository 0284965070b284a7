from __future__ import annotations

import json
import os
from pathlib import Path

import msgpack
import pytest

from zbus.protocol.frames import (
    INLINE_BYTES,
    MAX_CALLS,
    MAX_HEADER_BYTES,
    FrameError,
    VersionMismatch,
    decode,
    encode,
    join_requests,
)
from zbus.protocol.messages import PROTOCOL_VERSION, Header, Kind, Status

GOLDEN = Path(__file__).parents[2] / "golden" / "wire" / f"v{PROTOCOL_VERSION}" / "messages.json"

SESSION = bytes(range(16))
MESSAGES = {
    "hello": (Header(Kind.HELLO, SESSION, 1, 0, "main"), [b"\x80"]),
    "welcome": (Header(Kind.WELCOME, SESSION, 1, 3 << 48 | 5, "main"), [b"\x80"]),
    "request": (Header(Kind.REQ, SESSION, 2, 7, "main", 41, 1, 1, 40, 30_000, 0, 9), [b"body"]),
    "strict batch with buffers": (
        Header(Kind.REQ, SESSION, 2, 7, "main", 41, 3, 2, 40, 0, Status.STRICT, 1 << 63),
        [b"body", b"\0" * 16, b""],
    ),
    "skip": (Header(Kind.SKIP, SESSION, 2, 7, "side", 5, 2), []),
    "result": (Header(Kind.RESULT, SESSION, 2, 7, "main", 41, status=Status.OK), [b"value"]),
    "empty result": (Header(Kind.RESULT, SESSION, 2, 7, "main", 42, status=Status.OK), [b""]),
    "large result": (Header(Kind.RESULT, SESSION, 2, 7, "main", 43, status=Status.OK), [b"v" * (INLINE_BYTES + 1)]),
    "failure": (Header(Kind.FAILURE, SESSION, 2, 7, "main", 41, status=Status.APP_ERROR), [b"error"]),
    "failure before the start": (
        Header(Kind.FAILURE, SESSION, 2, 7, "main", 41, status=Status.NOT_STARTED),
        [b"error"],
    ),
    "chunk": (Header(Kind.CHUNK, SESSION, 2, 7, "main", 41, floor=12), [b"item"]),
    "end": (Header(Kind.END, SESSION, 2, 7, "main", 41, floor=13, status=Status.OK), []),
    "progress": (Header(Kind.PROGRESS, SESSION, 2, 7, "main", 41, status=Status.RUNNING), []),
    "probe": (Header(Kind.PROBE, SESSION, 2, 7, "main", 41, floor=41), []),
    "cancel": (Header(Kind.CANCEL, SESSION, 2, 7, "main", 41), []),
    "gap": (Header(Kind.NACK, SESSION, 2, 7, "main", 40, floor=2, status=Status.GAP), []),
    "credit": (Header(Kind.ACK, SESSION, 2, 7, "main", 41, floor=10), []),
    "ping": (Header(Kind.PING, SESSION, 0, 0, "ctl"), [b"\x91\x01"]),
    "bye of the last incarnation": (Header(Kind.BYE, SESSION, (1 << 64) - 1, (1 << 64) - 1, "ctl"), []),
    "request that starts together": (
        Header(Kind.REQ, SESSION, 2, 7, "main", 44, status=Status.TOGETHER_STRICT),
        [b"body"],
    ),
    "poised": (Header(Kind.PROGRESS, SESSION, 2, 7, "main", 44, status=Status.POISED), []),
    "go": (Header(Kind.GO, SESSION, 2, 7, "main", 44), []),
    "requests that travel together": (
        Header(Kind.REQ, SESSION, 2, 7, "main", 45, 2, status=Status.JOINED),
        [join_requests([(30_000, b"body"), (0, b"body")])],
    ),
}


def plain(header: Header) -> list[object]:
    """Return a header as JSON has it."""
    return [field.hex() if isinstance(field, bytes) else field for field in header]


def test_bytes_of_every_kind_are_those_of_the_golden_file():
    """The layout of a protocol version never changes; a new layout is a new version with a file of its own."""
    now = {
        name: {"header": plain(header), "frames": [frame.hex() for frame in encode(header, buffers)]}
        for name, (header, buffers) in MESSAGES.items()
    }
    if os.environ.get("ZBUS_TEST_GOLDEN") == "write":
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(json.dumps(now, indent=1) + "\n")
    assert now == json.loads(GOLDEN.read_text())


def test_golden_bytes_are_understood():
    """What was written by this version once is read by it now."""
    for name, entry in json.loads(GOLDEN.read_text()).items():
        header, buffers = decode([bytes.fromhex(frame) for frame in entry["frames"]])
        assert (plain(header), list(buffers)) == (entry["header"], MESSAGES[name][1]), name


@pytest.mark.parametrize("name", MESSAGES)
def test_every_truncation_is_refused(name):
    """A cut header, and a message without its last frames, is no message."""
    frames = encode(*MESSAGES[name])
    for length in range(len(frames[0])):
        with pytest.raises(FrameError):
            decode([frames[0][:length], *frames[1:]])
    for count in range(len(frames)):
        with pytest.raises(FrameError):
            decode(frames[:count])


@pytest.mark.parametrize("name", [name for name in MESSAGES if name != "large result"])
def test_every_single_byte_mutation_is_refused_or_read(name):
    """Nothing but FrameError comes of a damaged header; what still reads is a header of the right types."""
    frames = encode(*MESSAGES[name])
    first = bytearray(frames[0])
    for position in range(len(first)):
        kept = first[position]
        for value in range(256):
            first[position] = value
            try:
                header, _ = decode([bytes(first), *frames[1:]])
            except FrameError:
                continue
            assert type(header.kind) is int
            assert header.calls >= 1
            assert len(header.session) == 16
        first[position] = kept


def test_glued_and_torn_messages_are_refused_as_a_whole():
    """Frames of one message before or behind another's show in number or bytes."""
    one = encode(*MESSAGES["strict batch with buffers"])
    other = encode(*MESSAGES["large result"])
    small = encode(*MESSAGES["request"])
    for glued in (one + other, one[:2] + other, one[:-1], one[:1] + other[1:], small + small, small + one[1:]):
        with pytest.raises(FrameError) as caught:
            decode(glued)
        assert caught.value.reason in ("frame_count", "frame_bytes")


def test_a_header_of_another_version_says_which():
    """It may have any number of fields."""
    for fields in ([2], [2, "x"], [9, *range(30)]):
        with pytest.raises(VersionMismatch) as caught:
            decode([msgpack.packb(fields)])
        assert caught.value.theirs == fields[0]


def test_what_is_no_header_is_refused_by_a_word_to_count():
    """Each kind of rubbish has its reason."""
    good = [PROTOCOL_VERSION, *MESSAGES["probe"][0], 0, 0, None]

    def changed(index, value):
        return msgpack.packb([*good[:index], value, *good[index + 1 :]])

    cases = {
        b"": "header_not_msgpack",
        b"\xc1": "header_not_msgpack",
        b"\xff" * (MAX_HEADER_BYTES + 1): "header_too_long",
        b"\x91" * 1000: "header_not_msgpack",
        msgpack.packb({"kind": 1}): "header_not_array",
        msgpack.packb([]): "header_not_array",
        msgpack.packb(["1"]): "header_not_array",
        msgpack.packb([True]): "header_not_array",
        msgpack.packb(good[:-1]): "header_fields",
        msgpack.packb([*good, 0]): "header_fields",
        changed(1, 99): "kind",
        changed(1, -1): "kind",
        changed(1, 3.0): "header_type",
        changed(1, {}): "header_type",
        changed(1, True): "header_type",
        changed(2, b"short"): "header_type",
        changed(2, "x" * 16): "header_type",
        changed(5, "x" * 65): "header_type",
        changed(5, b"main"): "header_type",
        changed(6, -1): "header_type",
        changed(6, 1.5): "header_type",
        changed(6, 1 << 63): "header_range",
        changed(7, 0): "header_range",
        changed(7, MAX_CALLS + 1): "header_range",
        changed(9, 1 << 63): "header_range",
        changed(13, 1): "frame_count",
        changed(14, 1): "frame_bytes",
    }
    for frame, reason in cases.items():
        with pytest.raises(FrameError) as caught:
            decode([frame])
        assert caught.value.reason == reason, frame
    with pytest.raises(FrameError, match="empty"):
        decode([])


def test_small_bodies_need_one_frame_and_large_ones_are_not_copied():
    """A body of up to 1,024 bytes rides in the header's frame; others are handed on as they are."""
    header = MESSAGES["request"][0]
    assert len(encode(header, [b"x" * INLINE_BYTES])) == 1
    large = bytes(INLINE_BYTES + 1)
    view = memoryview(bytearray(100))
    assert encode(header, [large])[1] is large
    assert encode(header, [b"body", view])[2] is view


def test_multi_byte_items_count_by_bytes():
    """A memoryview of eight-byte items is as long as its bytes."""
    view = memoryview(bytearray(80)).cast("d")
    frames = encode(MESSAGES["request"][0], [b"body", view])
    assert decode([frames[0], b"body", bytes(80)])[1] == [b"body", bytes(80)]
