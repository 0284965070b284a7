"""Values to frames and back, exactly or not at all; exceptions as plain data.

See ``docs/reference/codec.md`` for what is carried and how it arrives.
"""

from __future__ import annotations

from zbus.codec import joined, refs, stdlib
from zbus.codec.classes import register, registered
from zbus.codec.decoder import NOT_PLAIN, decode, decode_calls, decode_plain
from zbus.codec.encoder import (
    Keep,
    encode,
    encode_call,
    encode_plain,
    encode_plain_batch,
    encode_plain_call,
    encode_plain_calls,
)
from zbus.codec.exceptions import describe_exception, rebuild_exception, register_exception
from zbus.codec.joined import JoinedRef
from zbus.codec.limits import DEFAULT_LIMITS, Limits
from zbus.codec.refs import Ref
from zbus.protocol.messages import Buffer

__all__ = [
    "DEFAULT_LIMITS",
    "NOT_PLAIN",
    "Buffer",
    "JoinedRef",
    "Keep",
    "Limits",
    "Ref",
    "decode",
    "decode_calls",
    "decode_plain",
    "describe_exception",
    "encode",
    "encode_call",
    "encode_plain",
    "encode_plain_batch",
    "encode_plain_call",
    "encode_plain_calls",
    "rebuild_exception",
    "register",
    "register_exception",
    "registered",
]

stdlib.install()
refs.install()
joined.install()
