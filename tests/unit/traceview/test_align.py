from __future__ import annotations

from traceview.align import Anchor, Shift, align, anchor_of

BOOT = ("boot-a", 1)


def test_processes_of_one_boot_and_time_namespace_share_a_clock_exactly():
    """The shift between two of them is the difference of their epochs on the one monotonic clock."""
    controller = Anchor(0, "controller", clock=BOOT, epoch_mono_ns=1_000, epoch_wall_ns=5_000)
    actor = Anchor(0, "actor", clock=BOOT, epoch_mono_ns=1_700, epoch_wall_ns=999_999)
    assert align([actor, controller]) == [Shift(700, "shared", 0), Shift(0, "reference", 0)]


def test_another_host_is_matched_by_wall_clock_and_says_so():
    """Without a shared clock the wall anchors decide, and the way is named."""
    controller = Anchor(0, "controller", clock=BOOT, epoch_mono_ns=1_000, epoch_wall_ns=5_000)
    actor = Anchor(0, "actor", clock=("boot-b", 1), epoch_mono_ns=77, epoch_wall_ns=5_400)
    assert align([controller, actor])[1] == Shift(400, "wall")


def test_another_time_namespace_is_another_clock():
    """The same boot id with another time namespace is not taken for one clock."""
    controller = Anchor(0, "controller", clock=("boot-a", 1), epoch_mono_ns=0, epoch_wall_ns=0)
    actor = Anchor(0, "actor", clock=("boot-a", 2), epoch_mono_ns=0, epoch_wall_ns=9)
    assert align([controller, actor])[1].how == "wall"


def test_no_time_becomes_negative():
    """If a file begins before the reference, all are moved so that the first is at 0."""
    controller = Anchor(10, "controller", clock=BOOT, epoch_mono_ns=1_000)
    actor = Anchor(0, "actor", clock=BOOT, epoch_mono_ns=400)
    assert [shift.add_ns for shift in align([controller, actor])] == [600, 0]


def test_times_since_the_unix_epoch_are_brought_to_the_run():
    """A profiler's file in µs since 1970 is put on the run's time line by wall clock."""
    controller = Anchor(0, "controller", clock=BOOT, epoch_mono_ns=0, epoch_wall_ns=1_796_000_000_000_000_000)
    torch = Anchor(1_796_000_000_500_000_000)
    assert align([controller, torch])[1] == Shift(-1_796_000_000_000_000_000, "wall")
    assert align([torch])[0].add_ns == -1_796_000_000_500_000_000


def test_an_anchor_with_missing_or_odd_fields_is_none():
    """A header whose clock cannot be read counts as a file without one."""
    assert anchor_of({"mono_ns": 1, "wall_ns": "x", "epoch_mono_ns": 0, "boot_id": ""}, 0.0) is None
    assert anchor_of({}, None) is None
