from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import math
import pathlib
import struct
import sys
import threading
import uuid
from typing import Any, NamedTuple

import msgpack
import pytest

from exactness import same
from zbus.codec import Limits, decode, encode, register, registered
from zbus.errors import CodecError


@register
@dataclasses.dataclass
class Item:
    name: str
    weights: list[float]
    total: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = sum(self.weights)


@register
@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    left: int
    right: tuple[int, ...]


@register(tag="tests.Colour")
class Colour(enum.Enum):
    RED = "red"
    GREEN = object()


@register
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@register
class Access(enum.Flag):
    READ = 1
    WRITE = 2


@register
class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Unregistered:
    x: int = 0


class UnregisteredEnum(enum.Enum):
    A = 1


class UnregisteredPair(NamedTuple):
    a: int


VALUES = [
    *(None, True, False, 0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**300, -(10**300)),
    *(0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324, sys.float_info.max),
    struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf0\xff")[0],
    *(1 + 2j, complex(-0.0, math.nan)),
    *("", "grüße 🚌", "\x00", "a" * 70_000),
    *(b"", b"\x00\xff", b"x" * 70_000, bytearray(b"ab"), bytearray(b"y" * 70_000), bytearray()),
    *([], [1, [2, [3]]], (), (1,), (1, (2, [3, (4,)])), [()], ((),)),
    *({}, {"a": 1}, {1: "one", -5: 2, 2.5: 3, None: 4, b"k": 5}, {True: 1}, {(1, 2): "t", ("a", (b"b",)): [(1,)]}),
    {frozenset({1}): {"x": set()}, 2**70: 1, math.inf: (), b"z" * 70_000: 1},
    *(set(), {1, "a", (2, 3)}, frozenset(), frozenset({(1,), frozenset({2})})),
    *(slice(None), slice(1, -2, 3), range(0), range(5, -7, -2), range(2**80), ...),
    collections.OrderedDict([("b", 1), ("a", (2,))]),
    collections.deque([1, (2,)], maxlen=5),
    collections.deque(),
    *(dt.date(1, 1, 1), dt.time(23, 59, 59, 999999), dt.timedelta(-3, 5, 7)),
    dt.datetime(2024, 10, 27, 2, 30, fold=1),  # noqa: DTZ001  # naive ones are values too
    dt.datetime(9999, 12, 31, tzinfo=dt.UTC),
    dt.datetime(2000, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-5, microseconds=1), "here")),
    dt.timezone(dt.timedelta(seconds=3600)),
    *(decimal.Decimal("1.10"), decimal.Decimal("-NaN"), decimal.Decimal("Infinity"), fractions.Fraction(-3, 7)),
    *(uuid.UUID(int=5), pathlib.Path("/tmp/x"), pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:\\x")),
    *(Item("n", [1.0, 2.0]), Key(1, (2, 3)), {Key(1, ()): Key(2, (1,))}, Colour.RED, Colour.GREEN, Level.HIGH),
    *(Access.READ, Access.READ | Access.WRITE, Access(0), Pair(1, (2,)), [Pair([], {})]),
    [["train", (1, [2, 3]), {"lr": 0.1, "opts": {"betas": (0.9, 0.99)}}]] * 3,
]


@pytest.mark.parametrize(
    "value", VALUES, ids=[f"{number}-{type(value).__name__}" for number, value in enumerate(VALUES)]
)
def test_value_comes_back_with_type_order_and_bits(value):
    """What is carried arrives as the same type, in the same order, with the same bits."""
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "enum"},
        {"type": "dataclass", "class": "os.system"},
        {"type": "torch_dtype", "value": "float32"},
        {"__zbus__": 1},
        {"__class__": "x", "__reduce__": [1]},
        {"$ref": "#/0", "nd": True, "dtype": "<f4", "data": b""},
        [1, b"\xd4\x01\x01"],
    ],
    ids=range(7),
)
def test_no_key_of_a_users_dict_has_a_meaning_of_its_own(value):
    """User data that looks like some codec's own words is data (B12)."""
    assert same(decode(encode([value, (value,)])), [value, (value,)])


def test_nan_and_infinity_survive_as_arguments():
    """NaN and infinities of a call arrive as themselves (B10)."""
    args, kwargs = decode(encode(((math.nan,), {"lr": math.inf})))
    assert math.isnan(args[0])
    assert kwargs == {"lr": math.inf}


def test_init_false_field_arrives_and_no_initialiser_runs():
    """A dataclass is rebuilt through its fields: what ``__post_init__`` made is kept, not made again (B14)."""
    item = Item("n", [1.0])
    item.total = 99.0
    back = decode(encode(item))
    assert isinstance(back, Item)
    assert back.total == 99.0


def test_a_plain_list_is_handed_to_the_packer_without_a_copy_of_its_items():
    """The value itself is never changed by encoding it."""
    value = [(1,), {"a": {1, 2}}, [b"x" * 70_000]]
    before = repr(value)
    encode(value)
    assert repr(value) == before


class _ListChild(list):
    pass


class _Number:
    def __radd__(self, other: float) -> float:
        return other


class _Raises:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("value", "path", "hint"),
    [
        ([{"batch": Item("a", [1.0, _Number()])}], "$[0]['batch'].weights[1]", "plain data"),
        ([1, (2, Unregistered())], "$[1][1]", "zbus.register(Unregistered)"),
        ({"mode": UnregisteredEnum.A}, "$['mode']", "zbus.register(UnregisteredEnum)"),
        ([UnregisteredPair(1)], "$[0]", "zbus.register(UnregisteredPair)"),
        ({UnregisteredEnum.A: 1}, "$<key <UnregisteredEnum.A: 1>>", "register"),
        ({"a": collections.defaultdict(list)}, "$['a']", "dict(value)"),
        ([_ListChild()], "$[0]", "list(value)"),
        ([memoryview(b"x")], "$[0]", "bytes(view)"),
        ([lambda: 0], "$[0]", "endpoint"),
        ([print], "$[0]", "endpoint"),
        ([int], "$[0]", "name"),
        ([ValueError("x")], "$[0]", "raise it"),
        ((x for x in ()), "$", "list(value)"),
        ([_Raises()], "$[0]", "plain data"),
        (["ok", "\ud800"], "$[1]", None),
        ([msgpack.ExtType(1, b"\x01"), 1], "$[0]", "tuple(...)"),
        ([msgpack.Timestamp(1, 1)], "$[0]", "plain data"),
        ([Pair(1, object())], "$[0][1]", "plain data"),
        ([slice([], 1)], "$[0]", "int"),
    ],
    ids=range(19),
)
def test_what_cannot_be_carried_is_refused_with_its_path_and_a_remedy(value, path, hint):
    """A refusal names the part of the user's value, and one change that helps."""
    with pytest.raises(CodecError) as caught:
        encode(value)
    assert caught.value.path == path
    assert hint is None or hint in (caught.value.hint or "")
    assert path in str(caught.value)


def test_named_time_zone_is_refused():
    """A zone that would be looked up by name on arrival is refused."""
    zoneinfo = pytest.importorskip("zoneinfo")
    try:
        zone = zoneinfo.ZoneInfo("Europe/Berlin")
    except zoneinfo.ZoneInfoNotFoundError:
        pytest.skip("no time zone data on this machine")
    with pytest.raises(CodecError, match="time zone"):
        encode(dt.datetime(2024, 1, 1, tzinfo=zone))


def test_field_that_was_never_set_is_refused():
    """An object with an unset field is refused, not sent without it."""
    item = object.__new__(Item)
    item.name = "half"
    with pytest.raises(CodecError, match="'weights'"):
        encode([item])


def test_value_that_contains_itself_is_refused():
    """A cycle ends in a refusal, not in a crash."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CodecError, match="contains itself"):
        encode(value)


@pytest.mark.parametrize(
    "wrap",
    [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: Pair(1, v)],
    ids=["list", "tuple", "dict", "pair"],
)
def test_depth_limit_is_the_same_in_both_directions(wrap):
    """64 levels travel, 65 are refused by the sender and by the receiver."""
    value: Any = wrap(1)
    for _ in range(63):
        value = wrap(value)
    assert same(decode(encode(value)), value)
    deeper = wrap(value)
    with pytest.raises(CodecError, match="deeper than 64"):
        encode(deeper)
    frames = encode(deeper, limits=Limits(depth=80))
    with pytest.raises(CodecError, match="deeper than 64"):
        decode(frames)


def test_empty_container_counts_as_a_level():
    """An empty dict at the limit is judged alike by both sides."""
    value: Any = {}
    for _ in range(63):
        value = [value]
    assert decode(encode(value)) == value
    with pytest.raises(CodecError):
        encode([value])


def test_item_and_body_limits_hold_in_both_directions():
    """Counts and bytes beyond a limit are refused on either side."""
    small = Limits(items=10, body_bytes=1000)
    with pytest.raises(CodecError, match="11 entries"):
        encode([0] * 11, limits=small)
    with pytest.raises(CodecError, match="limit is 1,000"):
        encode("x" * 2000, limits=small)
    with pytest.raises(CodecError):
        decode(encode([0] * 50), limits=small)
    with pytest.raises(CodecError, match="limit is 1,000"):
        decode(encode("x" * 2000), limits=small)


def test_limits_that_cannot_be_held_are_refused():
    """A limit outside what the packer can keep is an error at once."""
    with pytest.raises(ValueError, match="depth"):
        Limits(depth=500)
    with pytest.raises(ValueError, match="negative"):
        Limits(items=-1)


# -- registration --------------------------------------------------------------------------------------------------


def test_tags_are_listed_and_default_to_the_full_name():
    """A tag is the class's full name unless given."""
    assert registered()["tests.Colour"] is Colour
    assert registered()[f"{Item.__module__}.Item"] is Item


def test_one_tag_cannot_name_two_classes():
    """A tag in use by another class is refused and both are named."""
    with pytest.raises(CodecError, match="already belongs to") as caught:
        register(Unregistered, "tests.Colour")
    assert "Colour" in str(caught.value)


def test_other_sorts_of_class_are_refused_at_registration():
    """Registering what the codec cannot rebuild fails at once."""
    with pytest.raises(CodecError, match="not a dataclass"):
        register(_Raises)


def test_subclass_of_a_registered_class_needs_its_own_registration():
    """A subclass is not silently sent as its base."""

    class Child(Item):
        pass

    with pytest.raises(CodecError, match="Child"):
        encode(Child("a", []))


def test_unknown_tag_is_refused_and_named():
    """A class the receiver did not register is refused by its tag, never imported."""
    known = set(sys.modules)
    body = bytes(encode(Item("a", []))[0]).replace(b"Item", b"Ixxm")
    with pytest.raises(CodecError, match="Ixxm") as caught:
        decode([body])
    assert "import the module" in (caught.value.hint or "")
    assert set(sys.modules) == known


def test_class_with_other_fields_is_refused_and_the_fields_are_named():
    """Version skew of a dataclass is loud."""
    body = bytes(encode(Item("a", []))[0]).replace(b"weights", b"weightz")
    with pytest.raises(CodecError, match="weights, weightz"):
        decode([body])


def test_threads_encode_at_once_without_mixing_messages():
    """Encoding is safe from any number of threads."""
    wrong: list[int] = []

    def work(number: int) -> None:
        for step in range(300):
            value = [number, (step,), "x" * number, 2**70 + number]
            if decode(encode(value)) != value:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_failed_encode_does_not_spoil_the_next():
    """After a refusal the same thread encodes the next value rightly."""
    for bad in ("\ud800", object(), [1, ["\udfff"]]):
        with pytest.raises(CodecError):
            encode([1, 2, bad])
        assert encode([1, (2,)]) == encode([1, (2,)])
        assert decode(encode([1, (2,)])) == [1, (2,)]
