from __future__ import annotations

import pytest

from zbus.errors import RegistryError
from zbus.registry import FileRegistry, Lease, LeaseObserver, LeaseRenewer, LeaseState, Records
from zbus.registry.fs import LocalFS
from zbus.testing.registry_fs import FaultyFS

S = 1_000_000_000
TTL_S = 6.0


def lease(counter, holder="agent.1", ttl_s=TTL_S):
    """One look's worth of leases."""
    return {holder: Lease(holder=holder, counter=counter, ttl_s=ttl_s)}


def watch(observer, looks, start_s=0.0, step_s=1.0):
    """Show an observer one snapshot per step; return the time of the last look in seconds."""
    now_s = start_s
    for snapshot in looks:
        observer.observe(snapshot, int(now_s * S))
        now_s += step_s
    return now_s - step_s


def test_a_lease_whose_counter_stands_still_for_its_ttl_is_expired():
    """B23, M3, R4: silence is judged by the observer's own clock, whatever the holder's clocks say."""
    observer = LeaseObserver()
    watch(observer, [lease(7)] * 6)
    assert observer.state("agent.1") is LeaseState.LATE
    assert observer.expired() == ()
    watch(observer, [lease(7)], start_s=6.0)
    assert observer.state("agent.1") is LeaseState.EXPIRED
    assert observer.expired() == ("agent.1",)
    assert observer.silence_s("agent.1") == TTL_S


def test_a_lease_whose_counter_moves_never_expires():
    """Any other value is a sign of life: also a smaller one, from a holder that started again."""
    observer = LeaseObserver()
    watch(observer, [lease(counter) for counter in (1, 2, 3, 4, 1, 2, 2**60, 5)] * 5, step_s=4.0)
    assert observer.state("agent.1") is LeaseState.LIVE
    assert observer.silence_s("agent.1") == 0.0


def test_an_expired_lease_that_moves_again_is_live():
    """A partition that heals before anybody acted costs nothing."""
    observer = LeaseObserver()
    end_s = watch(observer, [lease(7)] * 10)
    assert observer.expired() == ("agent.1",)
    watch(observer, [lease(8)], start_s=end_s + 1)
    assert observer.state("agent.1") is LeaseState.LIVE


def test_an_observer_that_did_not_look_expires_nobody():
    """Row 58: a paused observer, or one that could not read, looks again before it judges."""
    observer = LeaseObserver()
    watch(observer, [lease(7)])
    observer.observe(lease(7), 600 * S)
    assert observer.state("agent.1") is not LeaseState.EXPIRED
    observer.observe(lease(8), 601 * S)
    assert observer.state("agent.1") is LeaseState.LIVE


def test_rare_looks_still_expire_a_dead_holder():
    """The cap on one gap delays a verdict by some looks, never for ever."""
    observer = LeaseObserver()
    watch(observer, [lease(7)] * 3, step_s=100.0)
    assert observer.state("agent.1") is LeaseState.EXPIRED


def test_a_lease_that_vanished_ages_like_one_that_stands_still():
    """Row 51: a deleted directory is no death; a holder that is alive writes again in time."""
    observer = LeaseObserver()
    watch(observer, [lease(7), {}, {}, {}])
    assert observer.state("agent.1") is LeaseState.LIVE
    watch(observer, [lease(8), {}, {}], start_s=4.0)
    assert observer.silence_s("agent.1") == 2.0
    watch(observer, [{}] * 5, start_s=7.0)
    assert observer.expired() == ("agent.1",)


def test_an_unknown_holder_is_unknown_and_a_forgotten_one_too():
    """Nothing is said of who was never seen; a goodbye ends the watch."""
    observer = LeaseObserver()
    assert observer.state("agent.1") is LeaseState.UNKNOWN
    assert observer.silence_s("agent.1") == 0.0
    watch(observer, [lease(7)] * 9)
    observer.forget("agent.1")
    observer.forget("agent.1")
    assert observer.state("agent.1") is LeaseState.UNKNOWN
    assert observer.expired() == ()


def test_a_clock_that_seems_to_go_back_ages_nobody():
    """Silence never shrinks and never jumps."""
    observer = LeaseObserver()
    for now_s in (10, 12, 5, 13):
        observer.observe(lease(7), now_s * S)
    assert observer.silence_s("agent.1") == 3.0


def test_a_changed_ttl_counts_from_the_renewal_that_brought_it():
    """The holder may choose another TTL with any renewal."""
    observer = LeaseObserver()
    watch(observer, [lease(1), lease(2, ttl_s=2.0), lease(2, ttl_s=2.0), lease(2, ttl_s=2.0)])
    assert observer.expired() == ("agent.1",)


def test_a_renewer_is_due_at_once_and_then_three_times_per_ttl():
    """Two renewals may fail before an observer can call the lease expired."""
    renewer = LeaseRenewer("agent.1", TTL_S)
    assert renewer.due(0)
    assert renewer.wait_s(0) == 0.0
    assert renewer.next(0) == Lease(holder="agent.1", counter=1, ttl_s=TTL_S)
    renewer.renewed()
    assert not renewer.due(int(1.9 * S))
    assert renewer.wait_s(S) == 1.0
    assert renewer.due(2 * S)
    assert renewer.next(2 * S).counter == 2


def test_a_failed_renewal_is_due_again_soon_with_a_new_counter():
    """R8: a full disk is tried again each tenth of the TTL; the counter moves on, as the write may have happened."""
    renewer = LeaseRenewer("agent.1", TTL_S, counter=40)
    renewer.next(0)
    renewer.failed()
    assert not renewer.due(int(0.5 * S))
    assert renewer.due(int(0.6 * S))
    assert renewer.next(S).counter == 42
    renewer.failed()
    assert renewer.failures == 2
    renewer.next(2 * S)
    renewer.renewed()
    assert renewer.failures == 0


def test_a_holder_stops_trusting_its_lease_before_any_observer_does():
    """0.8 of the TTL, counted from the start of the last good write: a slow disk makes nobody bold."""
    renewer = LeaseRenewer("agent.1", TTL_S)
    assert not renewer.held(0)
    renewer.next(0)
    assert not renewer.held(0)
    renewer.renewed()
    assert renewer.held(int(4.7 * S))
    assert not renewer.held(int(4.8 * S))
    renewer.next(5 * S)
    renewer.failed()
    assert not renewer.held(5 * S)


@pytest.mark.parametrize("ttl_s", [0, -1.0])
def test_a_lease_without_time_is_refused(ttl_s):
    """A TTL must be positive."""
    with pytest.raises(ValueError, match="not positive"):
        LeaseRenewer("agent.1", ttl_s)


def test_a_dead_holders_lease_expires_and_a_live_ones_does_not_over_real_files(tmp_path):
    """B23: two agents, one killed: only its lease expires, in one TTL of the observer's clock."""
    records = Records(FileRegistry(tmp_path / "registry"))
    alive, dead = LeaseRenewer("alive", TTL_S), LeaseRenewer("dead", TTL_S)
    observer = LeaseObserver()
    for now_s in range(20):
        for renewer in (alive, dead):
            if renewer.due(now_s * S) and (renewer is alive or now_s < 5):
                records.renew_lease(renewer.next(now_s * S))
                renewer.renewed()
        observer.observe(records.leases(), now_s * S)
        # the last renewal of the dead one was at 4 s
        assert observer.expired() == (("dead",) if now_s >= 10 else ())


def test_a_disk_that_is_full_for_a_while_costs_no_lease(tmp_path):
    """R8, row 43: renewals fail for less than the TTL, then work again; nobody is called dead."""
    fs = FaultyFS(LocalFS(tmp_path / "registry"), error=28, once=False)
    records = Records(FileRegistry(tmp_path / "registry", fs=fs))
    reader = Records(FileRegistry(tmp_path / "registry"))
    renewer, observer = LeaseRenewer("agent.1", TTL_S), LeaseObserver()
    failed = 0
    for tenth in range(200):
        now_ns = tenth * S // 10
        fs.fail_at = fs.count + 1 if 50 <= tenth < 90 else 0
        if renewer.due(now_ns):
            try:
                records.renew_lease(renewer.next(now_ns))
                renewer.renewed()
            except RegistryError:
                renewer.failed()
                failed += 1
        if tenth % 10 == 0:
            observer.observe(reader.leases(), now_ns)
        assert observer.expired() == ()
    assert failed >= 5
    assert renewer.held(199 * S // 10)
