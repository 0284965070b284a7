"""Owners of kept values are told what is let go: soon, and no more often than it takes."""

from __future__ import annotations

import pytest

from controller import refs
from controller.refs import Hold, RefBook


class Later:
    """Jobs as ``Background`` takes them, run when the test says so."""

    def __init__(self) -> None:
        self.jobs = []

    def call(self, job, delay_s=0.0):
        """Take a job."""
        self.jobs.append((delay_s, job))

    def run(self, most_s=1.0):
        """Run what is there now and due in that time; return how many."""
        chosen = [job for delay_s, job in self.jobs if delay_s <= most_s]
        self.jobs = [entry for entry in self.jobs if entry[0] > most_s]
        for job in chosen:
            job()
        return len(chosen)


class Owners:
    """A link that notes what is told."""

    def __init__(self, answer=None) -> None:
        self.tells = []
        self.answer = answer

    def tell(self, tell, done):
        """See ``Link``."""
        self.tells.append((tell, done))
        if self.answer is not None:
            done(self.answer)


@pytest.fixture
def later(monkeypatch):
    """Return the jobs of later."""
    made = Later()
    monkeypatch.setattr(refs, "shared", lambda: made)
    return made


def let_go(book, owners, claims):
    """Let go of what calls made on each owner."""
    for claim in claims:
        hold = Hold(book, claim)
        for owner in owners:
            hold.placed_on(owner)
        hold.release()


def test_unreachable_owners_are_told_again_by_one_job(later):
    """Three that fail cost one job each half second, not three times as many each time."""
    link = Owners(answer=False)
    book = RefBook(None, link, renew_s=1000)
    let_go(book, "abc", [1])
    let_go(book, "abc", [2])
    later.run(0)
    for _ in range(5):
        assert later.run() == 1
    link.tells.clear()
    link.answer = None
    assert later.run() == 1
    assert sorted(tell.owner for tell, _ in link.tells) == ["a", "b", "c"]
    assert {tell.claims for tell, _ in link.tells} == {(1, 2)}


def test_what_is_let_go_while_an_owner_is_told_goes_once_it_has_heard(later):
    """Neither what came meanwhile nor what was too much for one message waits for the next renewal."""
    link = Owners()
    book = RefBook(None, link, renew_s=1000)
    let_go(book, "a", [1])
    later.run(0)
    let_go(book, "a", range(2, 2000))
    later.run(0)
    told = []
    while link.tells:
        (tell, done), link.tells = link.tells[0], link.tells[1:]
        told += tell.claims
        done(True)
        later.run(0)
    assert told == list(range(1, 2000))
    assert not later.run(), "nothing is left to tell"


def test_an_owner_that_cannot_be_told_is_told_again_and_delays_no_other(later, caplog):
    """Whatever telling one of them raises: the others are told now, and it with the next try."""
    link = Owners(answer=True)
    told = link.tell

    def tell(tell, done):
        if tell.owner == "a" and not link.tells:
            msg = "planted"
            raise RuntimeError(msg)
        told(tell, done)

    link.tell = tell
    book = RefBook(None, link, renew_s=1000)
    let_go(book, "ab", [1])
    later.run(0)
    assert [tell.owner for tell, _ in link.tells] == ["b"]
    assert "planted" in caplog.text
    later.run()
    assert [tell.owner for tell, _ in link.tells] == ["b", "a"]
