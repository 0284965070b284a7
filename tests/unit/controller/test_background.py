"""Jobs of the bus: each runs once, in time order, whatever thread or collection of garbage it comes from."""

from __future__ import annotations

import gc
import threading
import weakref

from controller.background import Background
from waiting import wait_until


def test_jobs_run_in_the_order_of_their_times():
    """Those of one time in the order in which they came; one that raises does not end the others."""
    background, ran = Background("test-background"), []
    background.call(lambda: ran.append("later"), 0.05)
    background.call(lambda: 1 / 0)
    for number in range(100):
        background.call(lambda number=number: ran.append(number))
    wait_until(lambda: len(ran) == 101)
    assert ran == [*range(100), "later"]


def test_a_job_that_comes_out_of_the_garbage_collector_is_run():
    """Also where the collection happens on the thread that runs jobs, between any two of its steps."""
    background, ran = Background("test-background"), []

    class Circle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            background.call(lambda: ran.append(1))

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            background.call(Circle)
    finally:
        gc.set_threshold(*threshold)
    wait_until(lambda: gc.collect() is not None and len(ran) == 300, what="the jobs of all circles")


def test_nothing_of_a_job_lives_on_when_it_has_run():
    """While the next job is waited for, the last one is forgotten, with all that it held."""
    background = Background("test-background")
    held = threading.Event()
    gone = weakref.ref(held)
    background.call(held.is_set)
    del held
    wait_until(lambda: gone() is None, what="the job to be forgotten")
