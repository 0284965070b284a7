"""Results of a batch, which may leave the worker together: none waits for a long call behind it, none is lost."""

from __future__ import annotations

import time

import pytest

import zbus
from launching import launch
from waiting import scaled


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory):
    """One rank."""
    with launch(tmp_path_factory.mktemp("runs")) as bus:
        yield bus.group("actor")[0]


def test_a_result_does_not_wait_for_a_long_call_behind_it(one):
    """The quick calls of a batch are answered while the slow one runs."""
    batch = one.batch()
    batch.echo(1)
    batch.echo(2)
    batch.sleep(scaled(1.0))
    batch.echo(3)
    first, second, slow, last = batch.submit()
    assert (first.result(), second.result()) == (1, 2)
    assert not slow.done()
    assert not last.done()
    assert last.result() == 3


def test_results_before_and_behind_slow_calls_arrive_in_time(one):
    """Each quick call between slow ones is answered before the slow one after it ends."""
    batch = one.batch()
    for number in range(3):
        batch.sleep(scaled(0.4))
        batch.echo(number)
    futures = batch.submit()
    for number in range(3):
        assert futures[2 * number + 1].result() == number
        assert all(not future.done() for future in futures[2 * number + 2 :])


def test_every_call_of_a_large_batch_has_its_own_result(one):
    """Short, long and big results, in order, among failures."""
    batch = one.batch()
    big = "x" * 5000
    expected = []
    for number in range(600):
        if number % 97 == 50:
            batch.fail("value")
            expected.append(None)
        else:
            value = big if number % 31 == 7 else number
            batch.echo(value)
            expected.append(value)
    for future, value in zip(batch.submit(), expected, strict=True):
        if value is None:
            with pytest.raises(ValueError, match="bad value"):
                future.result()
        else:
            assert future.result() == value


def test_a_strict_batch_of_small_calls_stops_at_its_failure(one):
    """What was answered before the failure stands, what comes behind it is not executed."""
    batch = one.batch(strict=True)
    for number in range(5):
        batch.echo(number)
    batch.fail("value")
    batch.echo(6)
    *good, bad, never = batch.submit()
    assert [future.result() for future in good] == list(range(5))
    with pytest.raises(ValueError, match="bad value"):
        bad.result()
    with pytest.raises(zbus.NotExecuted):
        never.result()


def test_a_batch_waits_at_its_end_and_raises_its_first_error(one):
    """Leaving the block waits for every call; answers can be asked for afterwards."""
    began = time.monotonic()
    with one.batch() as batch:
        value = batch.echo("v")
        batch.sleep(0.2)
    assert time.monotonic() - began >= 0.2
    assert value.result() == "v"
    batch = one.batch()
    batch.fail("value")
    kept = batch.echo(1)
    with pytest.raises(ValueError, match="bad value"):
        batch.__exit__(None)
    assert kept.result() == 1
