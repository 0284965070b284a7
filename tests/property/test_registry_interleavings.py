"""Several clients of one simulated file server, in seeded interleavings of their file operations."""

from __future__ import annotations

import errno
import random
import threading

import pytest

from zbus.errors import RegistryError
from zbus.registry import FileRegistry, Records
from zbus.registry.records import EpochRecord
from zbus.testing.registry_fs import Quirks, SimulatedDisk, SimulatedFS

SEEDS = 150


class Interleaver:
    """Runs threads one at a time; a seeded choice says who goes next at every file operation."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.turns: dict[int, threading.Semaphore] = {}
        self.local = threading.local()
        self.errors: list[BaseException] = []

    def switch(self) -> None:
        me = getattr(self.local, "me", None)
        if me is None:
            return
        chosen = self.rng.choice(sorted(self.turns))
        if chosen != me:
            self.turns[chosen].release()
            self.turns[me].acquire()

    def run(self, *bodies) -> None:
        self.turns = {number: threading.Semaphore(0) for number in range(len(bodies))}
        threads = [threading.Thread(target=self._body, args=item) for item in enumerate(bodies)]
        for thread in threads:
            thread.start()
        self.turns[0].release()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _body(self, me, body) -> None:
        self.local.me = me
        self.turns[me].acquire()
        try:
            body()
        except BaseException as error:  # noqa: BLE001  # carried to the test's thread
            self.errors.append(error)
        finally:
            del self.turns[me]
            if self.turns:
                self.turns[self.rng.choice(sorted(self.turns))].release()


def world(seed, registry_class=FileRegistry, clients=3, **quirks):
    """Return the interleaver and one handle per client host, on one empty disk."""
    rng = random.Random(seed)
    disk = SimulatedDisk()
    turns = Interleaver(rng)

    def pause(_):
        turns.switch()

    handles = []
    for _ in range(clients):
        fs = SimulatedFS(disk, rng, quirks=Quirks(**quirks), switch=turns.switch)
        handles.append(registry_class(fs.root, fs=fs, sleep=pause))
    return turns, handles


QUIRKS = [{}, {"resend": 0.3}, {"stale": 0.2}, {"absent_for": 20}, {"resend": 0.3, "stale": 0.1, "absent_for": 10}]


def race_for_claims(seed, registry_class=FileRegistry, **quirks):
    """Let three clients claim the same keys; return each one's answers."""
    turns, handles = world(seed, registry_class, **quirks)
    told = [[] for _ in handles]

    def claimer(me):
        def body():
            for number in range(3):
                told[me].append(handles[me].claim(f"claims/{number}", b"%d" % me))

        return body

    turns.run(*(claimer(me) for me in range(len(handles))))
    return told


@pytest.mark.parametrize("quirks", QUIRKS, ids=str)
def test_a_claim_has_one_winner_in_every_interleaving(quirks):
    """R2, B18: whoever comes when, and whatever replies are lost, all clients agree on one winner."""
    for seed in range(SEEDS):
        told = race_for_claims(seed, **quirks)
        assert all(len({answers[number] for answers in told}) == 1 for number in range(3)), f"seed {seed}"


class TrustsLink(FileRegistry):
    """The mistake R2 forbids: a claim judged by what link() returned."""

    def _link(self, directory, name, value):
        temp = self._write_temp(directory, value, durable=True)
        try:
            directory.link(temp, name)
        except FileExistsError:
            return self._read(directory, name, absent_is_proof=False) or b"somebody else"
        else:
            return value
        finally:
            self._discard(directory, temp)


class ChecksThenRenames(FileRegistry):
    """The mistake of B18: look, then rename over."""

    def _link(self, directory, name, value):
        self._replace(directory, name, value, durable=True)
        return value


class LosesTheWinner(TrustsLink):
    """As ``TrustsLink``, and told EEXIST it calls itself a loser."""

    def _link(self, directory, name, value):
        standing = super()._link(directory, name, value)
        links = standing == value and self._stands(directory, name, value)
        return standing if links else b"somebody else"


@pytest.mark.parametrize("mutant", [ChecksThenRenames, LosesTheWinner])
def test_the_race_above_catches_a_registry_that_judges_wrongly(mutant):
    """A test that no mistake fails proves nothing: known mistakes must be seen."""

    def caught(seed):
        told = race_for_claims(seed, mutant, resend=0.3)
        return any(len({answers[number] for answers in told}) > 1 for number in range(3))

    assert any(caught(seed) for seed in range(SEEDS))


def test_epochs_strictly_rise_in_every_interleaving():
    """R3, I8: no two controllers hold one number, and each sees its own rise."""
    for seed in range(SEEDS):
        turns, handles = world(seed, resend=0.2, absent_for=10)
        epochs = [[] for _ in handles]

        def controller(me, handles=handles, epochs=epochs):
            def body():
                for number in range(2):
                    record = EpochRecord(session=f"{me}{number}")
                    epochs[me].append(Records(handles[me]).claim_epoch(record).epoch)

            return body

        turns.run(*(controller(me) for me in range(len(handles))))
        assert sorted(number for mine in epochs for number in mine) == [1, 2, 3, 4, 5, 6], f"seed {seed}"
        assert all(mine == sorted(mine) for mine in epochs), f"seed {seed}"


def listings_miss_a_live_record(seed, registry_class=FileRegistry):
    """Replace records while listings run; return whether any listing passed one over."""
    turns, (writer, other, reader) = world(seed, registry_class)
    names = {f"area/{name}" for name in ("a", "b", "c", "live")}
    for name in sorted(names):
        writer.put(name, b"0")
    assert set(reader.list("area").entries) == names
    missed = []

    def renew():
        for number in range(5):
            writer.put("area/live", b"%d" % number, durable=False)
            writer.put("area/b", b"%d" % number, durable=False)

    def come_and_go():
        for _ in range(5):
            other.put("area/guest", b"g", durable=False)
            other.delete("area/guest", b"g")

    def look():
        for _ in range(5):
            listing = reader.list("area")
            assert not listing.junk
            missed.extend(names - set(listing.entries))

    turns.run(renew, come_and_go, look)
    return bool(missed)


class Forgets(FileRegistry):
    """The mistake of M1: it believes one pass over the directory."""

    def _names(self, directory):
        self._seen.clear()
        return set(directory.names())


def test_a_live_record_is_in_every_listing_in_every_interleaving():
    """M1: replaced while a listing runs, a record known to the reader is never passed over."""
    assert not [seed for seed in range(SEEDS) if listings_miss_a_live_record(seed)]
    assert any(listings_miss_a_live_record(seed, Forgets) for seed in range(SEEDS)), "the mistake must be seen"


def late_owner_wins(seed, registry_class=FileRegistry):
    """Race an old owner's delete against its successor's put; return whether the successor's record is gone."""
    turns, (old, new, reader) = world(seed, registry_class, resend=random.Random(seed).choice([0.0, 0.2]))
    old.put("area/x", b"old")
    turns.run(lambda: old.delete("area/x", b"old"), lambda: new.put("area/x", b"new"))
    return reader.get("area/x") != b"new"


class LooksThenUnlinks(FileRegistry):
    """The mistake of B19, narrowed: it compares, then removes whatever stands by then."""

    def _delete(self, directory, name, expected):
        return self._stands(directory, name, expected) and super()._delete(directory, name, None)


def test_a_late_owner_never_deletes_its_successors_record():
    """B19: delete(expected) against a replacement at any point leaves the replacement standing."""
    assert not [seed for seed in range(2 * SEEDS) if late_owner_wins(seed)]
    assert any(late_owner_wins(seed, LooksThenUnlinks) for seed in range(2 * SEEDS)), "the mistake must be seen"


def test_siblings_that_come_and_go_never_fail_each_other():
    """B21: register and unregister of distinct names in one area is free of errors."""
    for seed in range(SEEDS):
        turns, handles = world(seed, stale=0.1)

        def sibling(me, handles=handles):
            def body():
                for number in range(3):
                    value = b"%d" % number
                    handles[me].put(f"area/s.{me}", value, durable=False)
                    assert handles[me].get(f"area/s.{me}") == value
                    assert handles[me].delete(f"area/s.{me}", value)

            return body

        turns.run(*(sibling(me) for me in range(len(handles))))
        assert not handles[0].list("area").entries


def test_a_root_deleted_at_any_moment_is_made_again():
    """Row 51: whoever writes next makes the root again, and what each process wrote returns with its next write."""
    for seed in range(SEEDS):
        turns, (first, second, vandal) = world(seed)
        first.put("workers/first", b"1")
        second.put("workers/second", b"2")

        def renew(handle, holder):
            for number in range(4):
                handle.put(f"leases/{holder}", b"%d" % number, durable=False)

        def delete_root(vandal=vandal):
            vandal._fs.step()
            vandal._fs.disk.areas = None

        turns.run(lambda f=first: renew(f, "a"), lambda s=second: renew(s, "b"), delete_root)
        renew(first, "a")
        renew(second, "b")
        assert set(vandal.list("workers").entries) == {"workers/first", "workers/second"}, f"seed {seed}"
        assert set(vandal.list("leases").entries) == {"leases/a", "leases/b"}, f"seed {seed}"


def test_a_disk_that_fails_for_good_is_reported_within_bounded_attempts():
    """No method retries for ever."""
    disk = SimulatedDisk()
    fs = SimulatedFS(disk, random.Random(0))
    slept: list[float] = []
    registry = FileRegistry(fs.root, fs=fs, sleep=slept.append)
    fs.quirks = Quirks(stale=1.0)
    for call in (
        lambda: registry.put("a/b", b"c"),
        lambda: registry.claim("a/b", b"c"),
        lambda: registry.get("a/b"),
        lambda: registry.list("a"),
        lambda: registry.delete("a/b"),
        lambda: FileRegistry(fs.root, fs=fs, sleep=slept.append),
    ):
        with pytest.raises(RegistryError) as caught:
            call()
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.ESTALE
    assert sum(slept) < 60
