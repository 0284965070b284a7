from __future__ import annotations

import os

from zbus.testing.chaos.memory import Memory


def sampled(memory: Memory, held: list[bytearray] | None) -> tuple[float, float]:
    """Take samples while buffers are made, held or freed at once; return the lows."""
    for _ in range(9):
        piece = bytearray(b"x") * (4 << 20)
        if held is not None:
            held.append(piece)
        del piece
        memory._take()
    return memory.lows()


def test_what_is_held_grows_and_what_was_freed_does_not():
    """A list that grows shows as a slope; buffers that were freed are given back before the sample."""
    memory = Memory(1.0, lambda: [("parent", os.getppid()), ("gone", 2**22 - 1)])
    first, last = sampled(memory, [])
    assert last - first > 20
    slopes = memory.slopes()
    assert set(slopes) == {"parent", "self"}
    assert slopes["self"] > 20
    first, last = sampled(Memory(1.0, list), None)
    assert abs(last - first) < 3


def test_the_thread_samples_until_it_is_stopped():
    """One sample each period, and a last one."""
    memory = Memory(3600.0, list)
    memory.start()
    memory.stop()
    assert memory.lows()[0] > 1
    assert memory.slopes() == {}
