"""What a process keeps for others: never a wrong value, never one too long, whatever comes in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zbus.data.refstore import OWN, Full, Held, RefStore

LEASE_NS = 100
HOLDERS = (b"a", b"b", OWN)


def store(limit: int = 1000) -> RefStore:
    """Return an empty store."""
    return RefStore(77, limit, LEASE_NS)


def numbers(dropped) -> list[int]:
    """Return which values an event dropped."""
    return [held.number for held in dropped]


def test_a_value_lives_until_its_claim_or_its_number_is_released():
    """Each release drops what it names, of that holder alone, and twice does no harm."""
    kept = store()
    first, _ = kept.put(b"a", 1, 10, "x", "f", 0)
    second, _ = kept.put(b"a", 2, 10, "y", "f", 0)
    third, _ = kept.put(b"b", 1, 10, "z", "f", 0)

    assert kept.find(77, first).value == "x"
    assert numbers(kept.release(b"a", claims=[1], now_ns=1)) == [first]
    assert kept.release(b"a", claims=[1], now_ns=1) == []
    assert numbers(kept.release(b"a", numbers=[second, third], now_ns=1)) == [second]
    assert kept.find(77, third).value == "z", "another holder's"
    assert kept.total == 10


def test_what_was_released_before_it_came_is_not_kept():
    """A call that its caller gave up may still end: its result goes at once."""
    kept = store()
    assert kept.release(b"a", claims=[5], now_ns=0) == []
    number, dropped = kept.put(b"a", 5, 10, "late", "f", 1)

    assert numbers(dropped) == [number]
    assert kept.total == 0
    assert "let go" in kept.find(77, number)


def test_what_was_released_before_it_came_is_remembered_for_longer_than_the_lease():
    """The call may wait behind a long one while its holder has nothing here to renew; then its result goes at once."""
    kept = store()
    kept.release(b"a", claims=[5], now_ns=0)
    for now in range(0, 100 * LEASE_NS, LEASE_NS):
        assert kept.tick(now) == []
    other, _ = kept.put(b"a", 6, 10, "wanted", "f", 100 * LEASE_NS)
    number, dropped = kept.put(b"a", 5, 10, "late", "f", 100 * LEASE_NS)

    assert numbers(dropped) == [number]
    assert kept.tick(101 * LEASE_NS) == [], "the lease of the other began as it was kept"
    assert isinstance(kept.find(77, other), Held)
    kept.over(b"a")
    assert not kept.holders
    kept.validate()


def test_claims_whose_values_came_do_not_displace_one_whose_value_did_not():
    """However many calls come and go meanwhile; what is remembered stays bounded."""
    kept = store()
    kept.release(b"a", claims=[1], now_ns=0)
    for claim in range(2, 40_000):
        kept.put(b"a", claim, 10, "x", "f", claim)
        assert len(kept.release(b"a", claims=[claim], now_ns=claim)) == 1
    number, dropped = kept.put(b"a", 1, 10, "late", "f", 40_000)

    assert numbers(dropped) == [number]
    assert len(kept.holders[b"a"].early) < 20_000


def test_a_silent_holder_loses_what_it_has_and_one_that_is_heard_does_not():
    """Silence beyond the lease drops; any message of the holder counts, and the process's own values are safe."""
    kept = store()
    silent, _ = kept.put(b"a", 1, 10, "x", "f", 0)
    heard, _ = kept.put(b"b", 1, 10, "y", "f", 0)
    own, _ = kept.put(OWN, 0, 10, "z", "put", 0)
    kept.release(b"b", now_ns=90)

    assert kept.tick(LEASE_NS) == []
    assert numbers(kept.tick(LEASE_NS + 1)) == [silent]
    assert isinstance(kept.find(77, heard), Held)
    assert isinstance(kept.find(77, own), Held)
    assert "silent" in kept.find(77, silent)


def test_time_in_which_nobody_listened_is_no_silence():
    """An owner that stood still reads the renewals after it wakes; silence before and after it counts."""
    kept = RefStore(77, 1000, LEASE_NS, deaf_ns=30)
    kept.tick(0)
    number, _ = kept.put(b"a", 1, 10, "x", "f", 0)
    assert kept.tick(20) == []

    assert kept.tick(1020) == [], "it was stopped for 1000"
    for now in (1050, 1080, 1100):
        assert kept.tick(now) == []
    assert numbers(kept.tick(1101)) == [number]


def test_a_holder_that_is_over_loses_what_it_has():
    """Its farewell, or a newer controller in its place."""
    kept = store()
    number, _ = kept.put(b"a", 1, 10, "x", "f", 0)

    assert numbers(kept.tick(1, lambda holder: holder == b"a")) == [number]
    assert "has ended" in kept.find(77, number)
    assert kept.over(b"a") == ()


def test_a_handle_of_another_store_finds_nothing():
    """The generation tells stores apart; numbers that were never given are told from released ones."""
    kept = store()
    number, _ = kept.put(b"a", 1, 10, "x", "f", 0)

    assert "anew" in kept.find(78, number)
    assert "never" in kept.find(77, number + 1)


def test_a_full_store_says_who_holds_what():
    """The limit is of bytes; the refusal names holders and methods, largest first, and changes nothing."""
    kept = store(100)
    kept.put(b"a", 1, 60, "x", "rollout", 0)
    kept.put(b"b", 1, 30, "y", "score", 0)
    with pytest.raises(Full) as full:
        kept.put(b"b", 2, 11, "z", "score", 5)

    assert [(one.holder, one.nbytes, one.methods) for one in full.value.holdings] == [
        (b"a", 60, (("rollout", 60),)),
        (b"b", 30, (("score", 30),)),
    ]
    assert kept.total == 90
    kept.put(b"b", 3, 10, "fits", "score", 5)
    with pytest.raises(Full):
        kept.check(0)
    kept.validate()


class Model(RuleBasedStateMachine):
    """The store beside a plain list of what should be there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.store = store(200)
        self.there: dict[int, tuple[bytes, int, int, str]] = {}  # number: holder, claim, bytes, value
        self.heard: dict[bytes, int] = {}
        self.early: dict[bytes, set[int]] = {}
        self.made = 0

    def forget(self, dropped, chosen) -> None:
        """The store dropped exactly these, each once."""
        assert sorted(numbers(dropped)) == sorted(chosen)
        for number in chosen:
            del self.there[number]
        for holder in [one for one in self.heard if not self.early.get(one) and not self.held(one)]:
            del self.heard[holder]

    def held(self, holder: bytes) -> list[int]:
        """Return what a holder should have."""
        return [number for number, entry in self.there.items() if entry[0] == holder]

    @rule(holder=st.sampled_from(HOLDERS), claim=st.integers(0, 4), nbytes=st.integers(0, 60))
    def put(self, holder, claim, nbytes):
        if holder == OWN:
            claim = 0
        self.made += 1
        value = f"value {self.made}"
        early = bool(claim) and claim in self.early.get(holder, ())
        total = sum(entry[2] for entry in self.there.values())
        if not early and (total + nbytes > 200 or (nbytes == 0 and total >= 200)):
            with pytest.raises(Full):
                self.store.put(holder, claim, nbytes, value, "f", self.now)
            return
        number, dropped = self.store.put(holder, claim, nbytes, value, "f", self.now)
        assert number not in self.there
        if early:
            assert numbers(dropped) == [number]
        else:
            assert not dropped
            if not self.held(holder):
                self.heard[holder] = self.now
            self.there[number] = (holder, claim, nbytes, value)

    @rule(holder=st.sampled_from(HOLDERS[:2]), claims=st.sets(st.integers(1, 4), max_size=2), data=st.data())
    def release(self, holder, claims, data):
        some = data.draw(st.sets(st.sampled_from([*self.there, 999]), max_size=2)) if self.there else set()
        chosen = [
            number
            for number, entry in self.there.items()
            if entry[0] == holder and (entry[1] in claims or number in some)
        ]
        if holder in self.heard or claims:
            self.heard[holder] = self.now
        self.early.setdefault(holder, set()).update(claims)
        self.forget(self.store.release(holder, claims=claims, numbers=some, now_ns=self.now), chosen)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def release_any(self, data):
        number = data.draw(st.sampled_from(list(self.there)))
        self.forget(self.store.release_any([number, number]), [number])

    @rule(holder=st.sampled_from(HOLDERS[:2]))
    def over(self, holder):
        chosen = self.held(holder)
        self.early.pop(holder, None)
        self.heard.pop(holder, None)
        self.forget(self.store.over(holder), chosen)

    @rule(passed=st.integers(0, 60))
    def tick(self, passed):
        self.now += passed
        silent = [one for one, at in self.heard.items() if one != OWN and self.now - at > LEASE_NS]
        chosen = [number for one in silent for number in self.held(one)]
        self.forget(self.store.tick(self.now), chosen)

    @invariant()
    def exactly_what_should_be_there_is_found(self):
        self.store.validate()
        for number, entry in self.there.items():
            found = self.store.find(77, number)
            assert isinstance(found, Held)
            assert (found.holder, found.value) == (entry[0], entry[3])
        assert set(self.store.values) == set(self.there)


TestModel = Model.TestCase
