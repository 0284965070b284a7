"""Memory that is used again: never while anybody sees it, and not kept without bounds."""

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from zbus.data.warm import WARM_FROM, WarmMemory


def test_memory_is_used_again_once_the_last_view_is_gone():
    """A view of a view keeps it; after that the next array of its size gets it."""
    warm = WarmMemory()
    first = warm.empty((8, WARM_FROM), np.float32)
    first[:] = 1
    view = first[3].T
    del first
    second = warm.empty((8, WARM_FROM), np.float32)
    second[:] = 2
    assert warm.made == 2
    assert (view == 1).all()
    del view
    third = warm.empty((WARM_FROM, 8), np.float32)
    assert warm.made == 2
    assert third.flags.writeable
    assert third.flags.c_contiguous
    assert (second == 2).all()


def test_a_small_array_and_one_of_objects_are_ordinary():
    """What is quick anyway comes from where it always came from."""
    warm = WarmMemory()
    for array in (warm.empty((4,), np.int64), warm.empty((0, 1 << 20), np.int8), warm.empty((1 << 16,), object)):
        assert array.base is None
    assert warm.made == 0


@pytest.mark.parametrize("bounds", [{"kept_bytes": 3 * WARM_FROM}, {"kept_ns": -1}])
def test_what_is_kept_unused_is_bounded(bounds):
    """The oldest goes first when it is too much, and all that is too old."""
    warm = WarmMemory(**bounds)
    arrays = [warm.empty((WARM_FROM,), np.uint8) for _ in range(5)]
    assert warm.idle_bytes == 0
    arrays.clear()
    assert warm.idle_bytes == (0 if "kept_ns" in bounds else 3 * WARM_FROM)


def resident_bytes():
    """Return the memory of this process that is there, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_comes_back_is_let_go_though_nobody_asks_again():
    """The bound holds from the moment memory comes back: the last arrays of a run are not kept until its end."""
    warm = WarmMemory(kept_bytes=1 << 20)
    arrays = [warm.empty((16 << 20,), np.uint8) for _ in range(4)]
    for array in arrays:
        array[:] = 1
    before = resident_bytes()
    del array
    arrays.clear()
    assert before - resident_bytes() > 48 << 20


def test_what_comes_back_while_another_looks_is_seen_by_that_one():
    """Memory that comes back amid a look waits for no lock, and is not forgotten."""
    warm = WarmMemory(kept_bytes=0)
    array = warm.empty((WARM_FROM,), np.uint8)
    settle, seen = warm._settle, []

    def settled(now_ns):
        settle(now_ns)
        nonlocal array
        if array is not None:
            array = None  # as the garbage collector would, with the lock held
            seen.append(len(warm._returned))

    warm._settle = settled
    warm.empty((2 * WARM_FROM,), np.uint8)
    assert seen == [1]
    assert not warm._returned


def test_an_array_in_a_cycle_comes_back_when_it_is_collected():
    """The garbage collector may give it back at any moment, also inside the pool."""
    warm = WarmMemory()
    knot: list[object] = [warm.empty((WARM_FROM,), np.uint8)]
    knot.append(knot)
    del knot
    gc.collect()
    assert warm.idle_bytes == WARM_FROM


def test_a_forked_child_keeps_what_it_saw():
    """Memory is private: what the parent does with it afterwards, a child does not see."""
    warm = WarmMemory()
    array = warm.empty((WARM_FROM,), np.uint8)
    array[:] = 5
    told, tell = os.pipe()
    wait, go = os.pipe()
    child = os.fork()
    if not child:
        os.read(wait, 1)
        os.write(tell, bytes([int(array.min()), int(array.max())]))
        os._exit(0)
    try:
        del array
        warm.empty((WARM_FROM,), np.uint8)[:] = 6
        assert warm.made == 1
        os.write(go, b"x")
        assert os.read(told, 2) == b"\x05\x05"
    finally:
        os.waitpid(child, 0)
        for descriptor in (told, tell, wait, go):
            os.close(descriptor)
