from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zbus import trace
from zbus.trace.args import freeze
from zbus.trace.blocks import Block, ThreadPart, decode_block, encode_block, expand
from zbus.trace.events import Expander
from zbus.trace.tracer import Tracer

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.sampled_from([-(2**63) - 1, -(2**63), 2**63, 2**64 - 1, 2**64, 10**4000]),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=()), max_size=20),  # lone surrogates and control characters too
    st.binary(max_size=20),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner), st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)
many_args = st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), min_size=1, max_size=6)


def written(value: Any) -> Any:
    """Return what a line says of a frozen value."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [written(item) for item in value]
    if isinstance(value, dict):
        return {written(key): written(item) for key, item in value.items()}
    return value


def args_of(block: Block) -> list[dict[str, Any]]:
    """Return the args of the spans of a block, from its lines."""
    found = expand(block, Expander(1, 0, "e/t"), {}, {"role": "actor", "rank": 0}, 1)
    assert found.malformed == 0
    lines = [json.loads(line) for line in found.data.splitlines()]
    return [line.get("args", {}) for line in lines if line["ph"] == "X"]


@given(many_args)
def test_args_are_written_as_they_were_frozen(spans: list[dict[str, Any]]):
    """Whatever spans are given, their lines hold it frozen, by a file of one's own and by way of the sidecar."""
    tracer = Tracer("actor", 0)
    tracer.set_level("full")
    with trace.use_tracer(tracer):
        for args in spans:
            with trace.trace_scope("odd", args=args):
                pass
    expected = [{written(key): written(freeze(value)) for key, value in args.items()} for args in spans]
    part = ThreadPart(1, "main", *tracer.rings()[0].take(100))
    sent = decode_block(encode_block(Block([part])))
    assert args_of(sent) == expected
    assert args_of(Block([part])) == expected
