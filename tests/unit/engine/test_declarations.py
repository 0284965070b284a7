from __future__ import annotations

import subprocess
import sys

import pytest

import zbus
from zbus.engine import (
    AnyOne,
    Concat,
    EndpointSpec,
    Everywhere,
    First,
    PerRank,
    RankZero,
    Same,
    Scatter,
    Split,
    endpoints_of,
    lanes_of,
    table_from_wire,
    table_to_wire,
)
from zbus.errors import ConfigError


class Worker(zbus.Engine):
    """An engine with one endpoint of each kind."""

    @zbus.endpoint
    def bare(self):
        """First line.

        Second paragraph.
        """
        return 1

    @zbus.endpoint(Split("dp", by="tokens", args=("batch",)), collect=Concat(), effect="pure", deadline="2m")
    def logprobs(self, batch, /, scale: float = 1.0, *more, flag, **rest):
        return batch

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=64, trace="generate")
    async def generate(self, prompt):
        yield prompt

    @zbus.endpoint(AnyOne(), lane="gen")
    async def count(self, prompt):
        return len(prompt)

    @zbus.endpoint(RankZero(), strict=True)
    def save(self, path):
        return path

    def helper(self):
        return "not callable through the bus"


def test_the_decorator_leaves_the_method_as_it_is():
    """An endpoint is still a plain method of its engine."""
    assert Worker().bare() == 1
    assert Worker().save("p") == "p"


def test_only_declared_methods_are_endpoints():
    """What is not declared cannot be called through the bus."""
    assert set(endpoints_of(Worker)) == {"bare", "logprobs", "generate", "count", "save"}


def test_defaults_follow_from_the_dispatch():
    """Collect defaults to First for one rank and to PerRank for several."""
    table = endpoints_of(Worker)
    assert (table["bare"].dispatch, table["bare"].collect, table["bare"].effect) == (Everywhere(), PerRank(), "once")
    assert (table["save"].collect, table["generate"].collect) == (First(), First())
    assert table["bare"].doc == "First line."


def test_async_endpoints_get_a_lane_of_their_own():
    """An async method without a lane never lands on main."""

    class Async(zbus.Engine):
        @zbus.endpoint()
        async def look(self): ...

    spec = endpoints_of(Async)["look"]
    assert (spec.lane, spec.is_async) == ("async", True)


def test_concurrency_belongs_to_the_lane():
    """An endpoint that states none takes that of its lane."""
    table = endpoints_of(Worker)
    assert table["count"].concurrency == 64
    assert lanes_of(table) == {"main": 1, "gen": 64}


def test_the_table_survives_the_wire():
    """An endpoint table is plain data and comes back equal."""
    table = endpoints_of(Worker)
    wire = table_to_wire(table)
    from zbus.codec import decode, encode

    assert table_from_wire(decode(encode(wire))) == table


def test_unknown_fields_of_a_table_are_ignored():
    """A newer peer may say more."""
    entry = endpoints_of(Worker)["bare"].to_wire()
    entry["dispatch"] = {**entry["dispatch"], "new": 1}
    assert EndpointSpec.from_wire({**entry, "new": 1}) == endpoints_of(Worker)["bare"]


@pytest.mark.parametrize("junk", [{}, {"name": "x"}, {"name": "x", "dispatch": {"kind": "os.system"}, "collect": {}}])
def test_junk_is_no_table(junk):
    """What does not describe an endpoint is refused, never guessed."""
    with pytest.raises(ConfigError, match="not the description of an endpoint"):
        EndpointSpec.from_wire(junk)


def test_subclasses_inherit_and_replace_endpoints():
    """A subclass may override an endpoint with or without declaring it anew."""

    class Base(zbus.Engine):
        @zbus.endpoint(RankZero())
        def kept(self): ...

        @zbus.endpoint(RankZero())
        def replaced(self): ...

        @zbus.endpoint()
        def hidden(self): ...

    class Derived(Base):
        @zbus.endpoint(Everywhere(), collect=Same())
        def replaced(self): ...

        def hidden(self): ...

    table = endpoints_of(Derived)
    assert set(table) == {"kept", "replaced"}
    assert table["replaced"].collect == Same()


async def _async_method(self): ...


def _generator(self):
    yield 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dispatch": "dp"}, "dispatch 'dp' is not a declaration"),
        ({"collect": Everywhere()}, "collect .* is not a declaration"),
        ({"effect": "twice"}, "effect 'twice' is not known"),
        ({"lane": "ctl"}, "lane 'ctl' belongs to the bus"),
        ({"concurrency": 2}, "lane `main` runs one call at a time"),
        ({"lane": "x", "concurrency": 0}, "concurrency 0 lets nothing run"),
        ({"deadline": "soon"}, "deadline of endpoint `train` 'soon' is not a duration"),
        ({"dispatch": Split("dp", args=("bach",))}, "Split names the argument 'bach'"),
    ],
)
def test_a_wrong_declaration_is_refused_where_it_is_written(options, match):
    """A contradiction in a declaration is an error at class definition, not at the first call."""

    def train(self, batch): ...

    with pytest.raises(ConfigError, match=match):
        zbus.endpoint(**options)(train)


def test_a_class_in_place_of_a_declaration_is_explained():
    """Forgetting the parentheses of a declaration gives the hint to write them."""

    def method(self): ...

    with pytest.raises(ConfigError) as caught:
        zbus.endpoint(AnyOne)(method)
    assert caught.value.hint == "write AnyOne()"


def test_async_on_main_is_refused():
    """Lane main runs on the main thread, so an async method cannot be there."""
    with pytest.raises(ConfigError, match="cannot be on lane `main`"):
        zbus.endpoint(lane="main")(_public(_async_method))


def test_a_generator_comes_from_one_rank():
    """A stream has one producer: several ranks cannot be dispatched to."""
    with pytest.raises(ConfigError, match="items come from one rank, but Everywhere calls several"):
        zbus.endpoint()(_public(_generator))


@pytest.mark.parametrize("name", ["_private", "setup", "batch", "options"])
def test_taken_names_are_refused(name):
    """A name that means something else on a group cannot be an endpoint's."""

    def method(self): ...

    method.__name__ = name
    with pytest.raises(ConfigError, match="cannot be an endpoint's"):
        zbus.endpoint()(method)


def test_two_concurrencies_of_one_lane_are_refused():
    """A lane has one concurrency; the two endpoints that disagree are named."""
    with pytest.raises(ConfigError, match="lane `gen` has concurrency 2 in `a` and 3 in `b`"):

        class Torn(zbus.Engine):
            @zbus.endpoint(lane="gen", concurrency=2)
            async def a(self): ...

            @zbus.endpoint(lane="gen", concurrency=3)
            async def b(self): ...


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Split(""), "is not the name of a mesh axis"),
        (lambda: Split("dp", by="size"), "by 'size' is not known"),
        (lambda: Split("dp", groups=0), "groups=0 cannot hold an item"),
        (lambda: Split("dp", args="batch"), "is text, not a tuple"),
    ],
)
def test_a_wrong_split_is_refused(make, match):
    """A Split that means nothing is refused when it is made."""
    with pytest.raises(ConfigError, match=match):
        make()


def test_declarations_need_no_array_library():
    """Declaring an engine imports neither numpy, torch nor zmq."""
    code = (
        "import sys, zbus.engine, zbus.retry; "
        "print([m for m in ('numpy', 'torch', 'zmq', 'msgspec') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def _public(fn):
    fn.__name__ = "look"
    return fn


def test_scatter_and_the_rest_are_plain_values():
    """Declarations compare by value, so two sides can tell whether they agree."""
    assert Scatter() == Scatter()
    assert Split("dp") != Split("tp")
