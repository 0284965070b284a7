import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbus.discovery.hints import Hint, HintKind, decode_hint, encode_hint, probe_topic, topic_of


@pytest.mark.parametrize("kind", list(HintKind))
def test_a_hint_comes_back_as_it_went(kind):
    """Every kind survives the wire."""
    hint = Hint(kind, "actor", 3, (1 << 64) - 1, "doing well")
    assert decode_hint(encode_hint(hint)) == hint


def test_a_long_text_is_cut():
    """A hint stays small."""
    decoded = decode_hint(encode_hint(Hint(HintKind.STATE, "actor", 0, 1, "x" * 100_000)))
    assert decoded is not None
    assert len(decoded.text) == 1_000


@pytest.mark.parametrize(
    "hint",
    [
        (99, "actor", 0, 1, ""),
        (1, "../../etc", 0, 1, ""),
        (1, "", 0, 1, ""),
        (1, "..", 0, 1, ""),
        (1, "actor", -2, 1, ""),
        (1, "actor", 0, -1, ""),
        (1, "actor", 0, 1 << 63, "x" * 2_000),
        (1, "actor", "0", 1, ""),
        (1, 5, 0, 1, ""),
        "text",
        {},
        None,
    ],
)
def test_a_hint_that_is_not_one_is_refused(hint):
    """Names are checked before anything is looked up by them."""
    assert decode_hint(msgspec.msgpack.encode(hint)) is None


@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise(data):
    """Anything decodes to a hint or to None."""
    decoded = decode_hint(data)
    assert decoded is None or isinstance(decoded, Hint)


def test_topics_do_not_run_into_each_other():
    """Hints and probes have prefixes of their own."""
    assert topic_of("actor") == "hint/actor"
    assert probe_topic(10) == "probe/000000000000000a"
