"""What travels on the hint channel: small facts that say where in the registry to look, never the truth itself."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from zbus import names
from zbus.errors import ConfigError

__all__ = ["HINTS_PREFIX", "Hint", "HintKind", "decode_hint", "encode_hint", "probe_topic", "topic_of"]

HINTS_PREFIX: Final = "hint/"
"""Every hint's topic begins so; its end is the role."""

_MAX_TEXT: Final = 1_000
_UINT64: Final = 1 << 64


class HintKind(enum.IntEnum):
    """What happened; numbers are wire format."""

    JOIN = 1
    """A worker's record was published."""
    EXIT = 2
    """An exit record was published."""
    LEAVE = 3
    """A worker says goodbye; its exit record follows."""
    STATE = 4
    """A worker says what it is doing (``text``); nothing in the registry changed."""
    AGENT = 5
    """An agent's record was published or withdrawn (``text`` is its id)."""
    EPOCH = 6
    """A new epoch record was published."""


class Hint(msgspec.Struct, array_like=True, frozen=True):
    """One hint: what happened to which incarnation of which rank (rank -1 and incarnation 0: not about a rank)."""

    kind: HintKind
    role: str
    rank: int = -1
    incarnation: int = 0
    text: str = ""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Hint).decode


def topic_of(role: str) -> str:
    """Return the topic of a role's hints."""
    return f"{HINTS_PREFIX}{role}"


def probe_topic(number: int) -> str:
    """Return the topic on which one directory listens for itself."""
    return f"probe/{number:016x}"


def encode_hint(hint: Hint) -> bytes:
    """Return a hint as bytes; a longer text is cut."""
    if len(hint.text) > _MAX_TEXT:
        hint = msgspec.structs.replace(hint, text=hint.text[:_MAX_TEXT])
    return _encode(hint)


def decode_hint(payload: bytes) -> Hint | None:
    """Return the hint in ``payload``, or None if it is not a valid one."""
    try:
        hint = _decode(payload)
        names.check(hint.role, "role")
    except (msgspec.MsgspecError, ConfigError):
        return None
    if hint.rank < -1 or not 0 <= hint.incarnation < _UINT64 or len(hint.text) > _MAX_TEXT:
        return None
    return hint
