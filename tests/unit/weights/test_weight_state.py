from __future__ import annotations

import pytest

from controller.weights.chain import Chain, Piece
from controller.weights.standing import Standings


def piece(source, names, nbytes=10, *, full=False):
    """Return a publication."""
    return Piece(source, frozenset(names), nbytes, full)


def after(before, version, one, *, on_disk=False):
    """Return a chain with one more publication."""
    return Chain.after(before, version, f"d{version}", one, on_disk=on_disk)


def test_a_chain_is_one_whole_and_the_changes_since():
    """A full publication begins anew; a change is added, and takes the place of those that it repeats in full."""
    chain = after(None, 1, piece("all", "abc", 100, full=True))
    chain = after(chain, 2, piece("two", "ab"))
    chain = after(chain, 3, piece("three", "b"))
    assert [one.source for one in chain.pieces] == ["all", "two", "three"]
    chain = after(chain, 4, piece("four", "bc"))
    assert [one.source for one in chain.pieces] == ["all", "two", "four"]
    assert (chain.last.source, chain.version, chain.digest) == ("four", 4, "d4")
    chain = after(chain, 5, piece("again", "abc", 100, full=True))
    assert [one.source for one in chain.pieces] == ["again"]


def test_changes_as_large_as_the_whole_are_a_long_chain():
    """Then it costs less to publish all of it again than to keep them."""
    chain = after(None, 1, piece("all", "abc", 100, full=True))
    chain = after(chain, 2, piece("two", "a", 60))
    assert not chain.is_long
    assert after(chain, 3, piece("three", "b", 60)).is_long
    assert not after(chain, 3, piece("three", "a", 60)).is_long


def test_changes_of_nothing_that_is_kept_are_refused():
    """Without a whole, or with one that lies elsewhere, they make no version."""
    with pytest.raises(ValueError, match="not what they change"):
        after(None, 1, piece("one", "a"))
    chain = after(None, 1, piece("all", "a", full=True))
    with pytest.raises(ValueError, match="not what they change"):
        after(chain, 2, piece("two", "a"), on_disk=True)


def test_a_rank_is_current_stale_or_not_known():
    """It holds a version once it has acknowledged it, until it misses one; a version of None is none."""
    standings = Standings(3)
    for rank in range(3):
        standings.seen(rank, 10 + rank)
    assert (standings.stale(), standings.not_stale([0, 1]), standings.has(0, None)) == ({}, [0, 1], False)
    standings.updated(0, 10, 1)
    standings.updated(1, 11, 1)
    standings.missed(1, "it was late")
    assert [standings.has(rank, 1) for rank in range(3)] == [True, False, False]
    assert standings.stale() == {1: "it was late"}
    assert standings.version(1) == 1, "what it had acknowledged before"
    standings.restored(1, 1)
    assert standings.has(1, 1)


def test_a_rank_that_was_started_anew_is_stale_whatever_it_was():
    """Also where it was stale before; but not where nobody has told it anything yet."""
    standings = Standings(2)
    standings.seen(0, 1)
    standings.seen(0, 2)
    assert standings.stale() == {}
    standings.updated(0, 2, 5)
    standings.seen(0, 2)
    assert standings.has(0, 5)
    standings.seen(0, 3)
    assert (standings.stale(), standings.version(0)) == ({0: "it was started anew"}, None)


def test_an_acknowledgement_of_an_earlier_start_does_not_count():
    """The digest came from a process that is no more."""
    standings = Standings(1)
    standings.seen(0, 1)
    standings.updated(0, 1, 1)
    standings.seen(0, 2)
    standings.updated(0, 1, 2)
    assert (standings.has(0, 2), standings.incarnation(0)) == (False, 2)
