from __future__ import annotations

import asyncio
import math
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbus.codec import decode, encode
from zbus.rl.exact import Exact
from zbus.rl.stats import Stats, merge, values
from zbus.testing import FakeClock

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE), st.lists(FINITE))
def test_a_sum_of_floats_is_exact_whatever_its_parts(left, right):
    """The sum is the rational number, not what float addition makes of it."""
    total = Exact.of(np.array(left, np.float64)) + Exact.of(np.array(right, np.float64))

    assert Fraction(total.numerator) * Fraction(2) ** total.exponent == sum(map(Fraction, left + right), Fraction(0))
    assert Exact.of_pair(total.pair()) == total == Exact.of(np.array(right + left, np.float64))
    assert total == sum(map(Exact.of_one, left + right), Exact())


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_beyond_what_floats_hold_is_infinite(sign):
    """The exact sum is kept, and is infinite where it is to be a float; a mean may be one all the same."""
    largest = sign * np.finfo(np.float64).max
    total = Exact.of(np.array([largest, largest]))

    assert total.over() == sign * math.inf
    assert total.over(2) == largest


def test_many_numbers_of_one_size_add_up_exactly():
    """Where the partial sums are largest: as many equal numbers as are added at once, each with all its bits set."""
    odd = np.nextafter(2.0, 0.0)
    total = Exact.of(np.full(1 << 20, odd))
    assert Fraction(total.numerator) * Fraction(2) ** total.exponent == Fraction(odd) * (1 << 20)


@given(st.lists(FINITE, min_size=1), st.randoms())
def test_the_mean_over_ranks_does_not_depend_on_who_had_what(numbers, random):
    """A mean of means would: here the parts may be cut and ordered in any way."""

    def mean(parts):
        recorders = []
        for part in parts:
            recorders.append(Stats())
            for number in part:
                recorders[-1].scalar(loss=number)
        return values(merge(one.export() for one in recorders))["loss"]

    shuffled = random.sample(numbers, len(numbers))
    cut = random.randrange(len(numbers) + 1)

    expected = sum(map(Fraction, numbers)) / len(numbers)
    assert mean([numbers]) == mean([shuffled[:cut], shuffled[cut:]]) == float(expected)


def test_keys_carry_their_scopes():
    """Scopes nest by slashes and end where their block ends."""
    stats = Stats()
    with stats.scope("actor"):
        stats.scalar(loss=1.0)
        with stats.scope("ppo"):
            stats.scalar({"clip-share": 0.5})
        stats.scalar(lr=0.1)
    stats.scalar(step=3)

    assert values(stats.export()) == {"actor/loss": 1.0, "actor/lr": 0.1, "actor/ppo/clip-share": 0.5, "step": 3.0}


def test_an_exception_leaves_no_scope_behind():
    """B85: what is recorded after a failed block is not recorded under its name."""
    stats = Stats()
    with pytest.raises(ZeroDivisionError), stats.scope("actor"), stats.timing("forward"):
        _ = 1 / 0
    stats.scalar(loss=1.0)

    assert set(values(stats.export())) == {"loss", "time/actor/forward", "time/actor/forward/max"}


def test_threads_have_scopes_of_their_own():
    """B85: a thread that is inside a scope moves no key of another thread."""
    stats = Stats()
    inside, done = threading.Event(), threading.Event()

    def other():
        with stats.scope("other"):
            inside.set()
            done.wait()
            stats.scalar(loss=2.0)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    stats.scalar(loss=1.0)
    done.set()
    thread.join()

    assert values(stats.export()) == {"loss": 1.0, "other/loss": 2.0}


async def _episode(stats, name, turn, following):
    with stats.scope(name):
        stats.denominator("tokens", [True] * len(name))
        await turn.wait()
        stats.stat("reward", [1.0] * len(name), denominator="tokens", reduce="sum")
        following.set()


def test_tasks_have_scopes_and_masks_of_their_own():
    """Tasks that take turns inside their scopes mix neither keys nor masks."""
    stats = Stats()

    async def both():
        first, second, end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        with stats.scope("rollout"):
            tasks = [
                asyncio.create_task(_episode(stats, "ab", second, end)),
                asyncio.create_task(_episode(stats, "cde", first, second)),
            ]
        first.set()
        await asyncio.gather(*tasks)

    asyncio.run(both())

    assert values(stats.export()) == {
        "rollout/ab/reward": 2.0, "rollout/ab/tokens": 2.0, "rollout/cde/reward": 3.0, "rollout/cde/tokens": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("avg", {"ratio": 2.0}),
        ("min", {"ratio": 1.0}),
        ("max", {"ratio": 3.0}),
        ("sum", {"ratio": 4.0}),
        ("avg_min_max", {"ratio/avg": 2.0, "ratio/min": 1.0, "ratio/max": 3.0}),
    ],
)
def test_a_stat_counts_the_places_of_its_mask_alone(reduce, expected):
    """Places outside the mask are in no mean, no sum and no extreme."""
    stats = Stats()
    stats.denominator("tokens", np.array([[True, False], [True, False]]))
    stats.stat("ratio", np.array([[1.0, -9.0], [3.0, 99.0]]), denominator="tokens", reduce=reduce)

    found = values(stats.export(), counts=True)
    assert found.pop("tokens") == 2.0
    assert found.pop("ratio__count") == 2
    assert found == expected


def test_masked_means_of_unequal_ranks_weigh_each_token_alike():
    """A rank with three tokens weighs three times one with one; a rank with none weighs nothing and loses no key."""
    dumps = []
    for mask, numbers in (([1, 1, 1], [1.0, 2.0, 3.0]), ([1, 0, 0], [10.0, 7.0, 7.0]), ([0, 0, 0], [5.0, 5.0, 5.0])):
        stats = Stats()
        stats.denominator("tokens", mask)
        stats.stat("reward", numbers, denominator="tokens")
        dumps.append(stats.export())

    assert values(merge(dumps)) == {"tokens": 4.0, "reward/avg": 4.0, "reward/min": 1.0, "reward/max": 10.0}
    alone = values(dumps[2], counts=True)
    assert math.isnan(alone["reward/avg"])
    assert (alone["reward__count"], alone["tokens"]) == (0, 0.0)


@given(st.lists(st.floats(), max_size=6), st.sampled_from(["avg", "sum", "min", "max", "avg_min_max"]))
def test_many_numbers_at_once_are_as_many_one_by_one(numbers, reduce):
    """Whatever they are, also none and such as are not finite."""
    one_by_one, at_once = Stats(), Stats()
    for number in numbers:
        one_by_one.scalar({"age": number}, reduce=reduce)
    with at_once.scope("a"):
        at_once.scalars("age", numbers, reduce=reduce)

    left, right = merge([one_by_one.export()]), merge([at_once.export()])
    assert values(right, counts=True) == pytest.approx(
        {f"a/{key}": value for key, value in values(left, counts=True).items()}, nan_ok=True, rel=0, abs=0
    )


def test_no_key_of_any_rank_is_dropped():
    """B86: a key that only one rank has is in the result, and equal keys are merged, not taken from the first."""
    first, second = Stats(), Stats()
    first.scalar(loss=1.0, only_first=5.0)
    second.scalar(loss=2.0)
    second.scalar(loss=3.0)
    second.scalar({"only-second": 7.0}, reduce="max")

    assert values(merge([first.export(), {}, second.export()])) == {"loss": 2.0, "only_first": 5.0, "only-second": 7.0}


def test_merging_in_stages_equals_merging_at_once():
    """A dump is a dump again after merging, also for timings, whose parts are ranks."""
    clock = FakeClock()
    dumps = []
    for seconds in (1, 2, 6):
        stats = Stats(clock)
        for _ in range(2):
            with stats.timing("forward"):
                clock.advance(seconds)
        stats.scalar(loss=seconds)
        dumps.append(stats.export())

    staged = merge([merge(dumps[:2]), dumps[2]])
    assert staged == merge(dumps) == merge(dumps[::-1])
    assert values(staged) == {"loss": 3.0, "time/forward": 6.0, "time/forward/max": 12.0}


def test_numbers_that_are_not_finite_are_kept_and_named():
    """A NaN makes its key NaN and is counted; an infinity stays one; other keys are untouched."""
    bad, good = Stats(), Stats()
    bad.scalar(loss=math.nan, grad=math.inf, lr=1.0)
    good.scalar(loss=1.0, grad=2.0, lr=3.0)

    found = values(merge([bad.export(), good.export()]))
    assert math.isnan(found.pop("loss"))
    assert found == {"loss__nan": 1, "grad": math.inf, "grad__inf": 1, "lr": 2.0}


def test_one_key_can_be_exported_and_the_rest_stays():
    """B85: exporting one key hands over that key alone; an unknown one is named and nothing is lost."""
    stats = Stats()
    with stats.scope("actor"):
        stats.scalar(loss=1.0, lr=2.0)

    assert values(stats.export("actor/loss")) == {"actor/loss": 1.0}
    with pytest.raises(KeyError, match=r"no statistic 'actor/loss'.*there is: actor/lr"):
        stats.export("actor/loss")
    assert values(stats.export(reset=False)) == values(stats.export()) == {"actor/lr": 2.0}
    assert stats.export() == {}


def test_a_key_has_one_meaning():
    """Recording or merging a key in two ways is refused by name, not settled in silence."""
    stats, other = Stats(), Stats()
    stats.scalar(loss=1.0)
    other.scalar({"loss": 1.0}, reduce="sum")

    with pytest.raises(ValueError, match=r"'loss' is recorded as scalar \(avg\) and as scalar \(max\)"):
        stats.scalar({"loss": 2.0}, reduce="max")
    with pytest.raises(ValueError, match=r"'loss' is recorded .*\(sum\).*\(dumps 0 and 2\)"):
        merge([stats.export(), {}, other.export()])


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (lambda s: s.scalar(loss=[1.0, 2.0]), r"'loss': a scalar is one number, not 2"),
        (lambda s: s.scalar(loss="low"), r"'loss' is made of numbers, not of str"),
        (lambda s: s.scalar(loss=10**400), r"'loss' is made of numbers, not of int: .*too large"),
        (lambda s: s.scalar(loss=1j), r"'loss' is made of numbers, not of complex"),
        (lambda s: s.scalar({"loss": 1.0}, reduce="median"), r"no reduction 'median'; choose one of avg"),
        (lambda s: s.scalar({"loss/": 1.0}), r"'loss/' is no name"),
        (lambda s: s.denominator("tokens", [0.5]), r"'tokens': a mask holds true and false"),
        (lambda s: s.stat("reward", [1.0], denominator="tokens"), r"no denominator 'tokens'.*\(there: none\)"),
        (
            lambda s: (s.denominator("tokens", [1, 1]), s.stat("reward", [1.0], denominator="tokens")),
            r"'reward' has shape \(1,\), its denominator 'tokens' \(2,\)",
        ),
    ],
)
def test_what_is_no_statistic_is_refused_by_name(record, complaint):
    """A wrong record names its key and what is wrong; none is dropped in silence."""
    with pytest.raises(ValueError, match=complaint):
        record(Stats())


@pytest.mark.parametrize(
    "broken", [{"sum": [1.5, 0]}, {"sum": [1, 10**6]}, {"count": -1}, {"reduce": "first"}, {"x": 1}]
)
def test_what_is_no_dump_is_refused(broken):
    """A dump from elsewhere is judged before it is used; key and place are named."""
    stats = Stats()
    stats.scalar(loss=1.0)
    dump = stats.export()
    dump["loss"] |= broken

    with pytest.raises(ValueError, match="statistic 'loss' of dump 1"):
        merge([{}, dump])


def test_a_mask_of_an_outer_scope_serves_inside_and_an_inner_one_ends_with_its_scope():
    """Masks are looked for in the scope and in those around it."""
    stats = Stats()
    stats.denominator("tokens", [1, 0])
    with stats.scope("actor"):
        stats.stat("outer", [2.0, 9.0], denominator="tokens", reduce="sum")
        stats.denominator("tokens", [0, 1])
        stats.stat("inner", [2.0, 9.0], denominator="tokens", reduce="sum")
    stats.stat("again", [2.0, 9.0], denominator="tokens", reduce="sum")

    found = values(stats.export())
    assert (found["actor/outer"], found["actor/inner"], found["again"]) == (2.0, 9.0, 2.0)


def test_a_dump_travels():
    """The codec carries a dump with sums beyond 64 bits, and it merges as before."""
    stats = Stats()
    for number in (1e300, 1e-300, -1.0, math.inf):
        stats.scalar(loss=number)
    dump = stats.export()
    assert abs(dump["loss"]["sum"][0]) > 2**64

    assert merge([decode(encode(dump))]) == dump


def test_tensors_are_taken_as_arrays_are():
    """A tensor of any float type, with a graph or without, and boolean masks."""
    torch = pytest.importorskip("torch")
    stats = Stats()
    loss = torch.tensor([1.0, 3.0], requires_grad=True)
    stats.scalar(loss=loss.mean(), half=torch.tensor(0.5, dtype=torch.bfloat16))
    stats.denominator("tokens", torch.tensor([True, False]))
    stats.stat("logp", loss, denominator="tokens", reduce="sum")

    assert values(stats.export()) == {"loss": 2.0, "half": 0.5, "tokens": 1.0, "logp": 1.0}


def test_concurrent_records_are_all_counted():
    """No record of any thread is lost, also while others export."""
    stats = Stats()
    dumps = []

    def record():
        for _ in range(200):
            stats.scalar(hits=1)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        dumps.append(stats.export())
    dumps.append(stats.export())

    assert values(merge(dumps), counts=True)["hits__count"] == 800
