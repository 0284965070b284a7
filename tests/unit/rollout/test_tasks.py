from __future__ import annotations

import random
from collections import Counter

import pytest

from controller.rollouts.results import Outcome
from controller.rollouts.staleness import Limits
from controller.rollouts.tasks import State, Task, Tasks

OWNERS = ["a", "b", "free"]
OUTCOMES = [Outcome.ACCEPTED, Outcome.ACCEPTED, Outcome.REJECTED, Outcome.FAILED, Outcome.LOST]


def made(*, ordered=False, **limits) -> Tasks:
    """Make tasks under limits."""
    return Tasks(Limits(**{"batch_size": 2, "max_concurrent": 4, "max_staleness": None, **limits}), ordered=ordered)


def start(tasks: Tasks, count: int, owner="a"):
    """Submit so many and start what may."""
    for _ in range(count):
        tasks.submit(owner, None, 0.0)
    return tasks.startable(1.0)


def test_tasks_start_in_order_as_there_is_room():
    """The lowest number first, as many as may run."""
    tasks = made(max_concurrent=2)
    started = start(tasks, 3)
    assert [task.number for task in started] == [0, 1]
    tasks.finish(started[1], Outcome.REJECTED, 2.0)
    assert [task.number for task in tasks.startable(2.0)] == [2]


def test_a_pause_withholds_no_result():
    """B48: what runs when a pause begins ends and is handed out during the pause."""
    tasks = made(max_concurrent=2)
    running = start(tasks, 3)
    tasks.paused = True
    for task in running:
        tasks.finish(task, Outcome.ACCEPTED, 2.0)
    assert not tasks.startable(2.0)
    assert [task.number for task in tasks.take("a", 5)] == [0, 1]
    tasks.paused = False
    assert [task.number for task in tasks.startable(3.0)] == [2]


def test_results_that_nobody_takes_slow_the_producers_and_cancel_nothing():
    """B50: at the bound nothing more starts; taking one lets one start."""
    tasks = made(results=2, max_concurrent=4)
    running = start(tasks, 5)
    assert len(running) == 2
    for task in running:
        tasks.finish(task, Outcome.ACCEPTED, 2.0)
    assert not tasks.startable(2.0)
    assert "2 results are not taken" in tasks.holds_up("a")
    tasks.take("a", 1)
    assert [task.number for task in tasks.startable(3.0)] == [2]
    assert tasks.counts[Outcome.CANCELLED] == 0


def test_results_that_nobody_takes_hold_up_their_own_kind_only():
    """An evaluation runs though a trainer takes nothing."""
    tasks = made(results=2, queue=8)
    for task in start(tasks, 6):
        tasks.finish(task, Outcome.ACCEPTED, 2.0)
    assert len(start(tasks, 2, owner="evaluation")) == 2


def test_what_staleness_holds_back_does_not_hold_back_what_it_does_not():
    """A task that counts and may not start lets one pass that does not count."""
    tasks = made(batch_size=1, max_staleness=0)
    assert len(start(tasks, 2)) == 1
    free = tasks.submit("evaluation", None, 0.0, counts=False)
    assert tasks.startable(1.0) == [free]


def test_a_version_wakes_what_waits_for_it():
    """B51: after ``advance`` the tasks that it gave room start."""
    tasks = made(batch_size=4, max_staleness=0, max_concurrent=8)
    for task in start(tasks, 8):
        tasks.finish(task, Outcome.ACCEPTED, 2.0, oldest=0)
    assert not tasks.startable(2.0)
    assert "a new version must count first" in tasks.holds_up("a")
    tasks.take("a", 4)
    tasks.advance(1)
    assert [task.number for task in tasks.startable(3.0)] == [4, 5, 6, 7]


def test_a_result_that_became_too_old_is_stale_and_makes_room():
    """It is not handed out as good, it is counted, and another may take its place."""
    tasks = made(batch_size=2, max_staleness=0)
    for task in start(tasks, 4):
        tasks.finish(task, Outcome.ACCEPTED, 2.0, oldest=0)
    tasks.advance(1)
    assert [task.outcome for task in tasks.take("a", 4)] == [Outcome.STALE] * 2
    assert (tasks.counts[Outcome.STALE], tasks.counts[Outcome.ACCEPTED]) == (2, 0)
    assert len(tasks.startable(3.0)) == 2


def test_a_task_that_ends_too_old_is_stale_at_once():
    """A version that came while it ran."""
    tasks = made(batch_size=2, max_staleness=0)
    (first, second) = start(tasks, 2)
    tasks.advance(1)
    tasks.finish(first, Outcome.ACCEPTED, 2.0, oldest=0)
    tasks.finish(second, Outcome.ACCEPTED, 2.0, oldest=1)
    assert [task.outcome for task in tasks.take("a", 2)] == [Outcome.STALE, Outcome.ACCEPTED]


def test_in_order_means_in_order():
    """``ordered``: what ended is held back behind what was submitted before it, however it ended."""
    tasks = made(ordered=True)
    first, second, third = start(tasks, 3)
    tasks.finish(third, Outcome.ACCEPTED, 2.0)
    tasks.finish(second, Outcome.FAILED, 2.0)
    assert tasks.takeable("a") == 0
    tasks.finish(first, Outcome.ACCEPTED, 3.0)
    assert [task.number for task in tasks.take("a", 9)] == [0, 1, 2]


def test_what_nobody_received_is_put_back_in_its_place():
    """B47: a take that was undone is taken again, in the same order."""
    tasks = made()
    for task in start(tasks, 3):
        tasks.finish(task, Outcome.ACCEPTED, 2.0)
    taken = tasks.take("a", 2)
    tasks.put_back(taken)
    assert [task.number for task in tasks.take("a", 3)] == [0, 1, 2]


def test_what_is_put_back_too_old_is_stale():
    """A version that came while nobody had it."""
    tasks = made(batch_size=1, max_staleness=0)
    (task,) = start(tasks, 1)
    tasks.finish(task, Outcome.ACCEPTED, 2.0, oldest=0)
    taken = tasks.take("a", 1)
    tasks.advance(1)
    tasks.put_back(taken)
    assert [one.outcome for one in tasks.take("a", 1)] == [Outcome.STALE]


def test_kinds_of_callers_start_in_order_of_submission():
    """None is preferred: the oldest that may start is next, whoever submitted it."""
    tasks = made(max_concurrent=3)
    for owner in ("b", "a", "c", "a"):
        tasks.submit(owner, None, 0.0)
    assert [task.number for task in tasks.startable(1.0)] == [0, 1, 2]


def test_what_is_accepted_after_it_was_forgotten_counts_for_no_version():
    """It ended well in spite of its cancel; nobody uses it, so another takes its place."""
    tasks = made(batch_size=1, max_staleness=0)
    (task,) = start(tasks, 1)
    tasks.abandon("a")
    tasks.finish(task, Outcome.ACCEPTED, 2.0, oldest=0)
    tasks.submit("a", None, 3.0)
    assert [one.number for one in tasks.startable(3.0)] == [1]


def test_a_cancelled_task_has_an_outcome_of_its_own():
    """Those that wait end at once; those that run are to be stopped and end when they do."""
    tasks = made(max_concurrent=1)
    (running,) = start(tasks, 2)
    ended, stopping = tasks.cancel(tasks.open("a"), 2.0)
    assert ([task.number for task in ended], stopping) == ([1], [running])
    tasks.finish(running, Outcome.CANCELLED, 3.0)
    assert [task.outcome for task in tasks.take("a", 2)] == [Outcome.CANCELLED] * 2


def test_what_is_abandoned_ends_unseen():
    """Nobody takes it, nothing of it is left, and its places are free."""
    tasks = made(max_concurrent=2)
    running = start(tasks, 4)
    tasks.finish(running[0], Outcome.ACCEPTED, 2.0)
    open_ = tasks.open("a")
    tasks.abandon("a")
    tasks.cancel(open_, 2.0)
    tasks.finish(running[1], Outcome.CANCELLED, 3.0)
    assert tasks.open() == []
    assert tasks.taken == tasks.counts["submitted"] == 4
    assert tasks.staleness.running == 0


def test_a_task_ends_once():
    """A second end is a fault of the driver and is refused."""
    tasks = made()
    (task,) = start(tasks, 1)
    tasks.finish(task, Outcome.FAILED, 2.0)
    with pytest.raises(RuntimeError, match="task 0 is ready"):
        tasks.finish(task, Outcome.ACCEPTED, 2.0)


class Story:
    """Random events; after each, what must always hold is checked."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        batch = rng.randint(1, 4)
        stale = rng.choice([None, 0, 1, 3])
        self.limits = Limits(batch, rng.randint(1, 6), stale, rng.randint(1, 8), rng.randint(batch, 9))
        self.tasks = Tasks(self.limits, ordered=rng.random() < 0.4)
        self.running: list[Task] = []
        self.delivered: Counter[int] = Counter()
        self.submitted: set[int] = set()
        self.forgotten: set[int] = set()
        self.last: dict[str, int] = {}

    @property
    def owner(self) -> str:
        return self.rng.choice(OWNERS)

    def submit(self) -> None:
        owner = self.owner
        if self.tasks.room(owner):
            self.submitted.add(self.tasks.submit(owner, None, 0.0, counts=owner != "free").number)

    def finish(self) -> None:
        if self.running:
            task = self.running.pop(self.rng.randrange(len(self.running)))
            version = self.tasks.staleness.version
            self.tasks.finish(
                task, self.rng.choice(OUTCOMES), 0.0, self.rng.choice([None, version, max(0, version - 1)])
            )

    def take(self) -> None:
        owner = self.owner
        taken = self.tasks.take(owner, self.rng.randint(1, 4))
        numbers = [task.number for task in taken]
        assert numbers == sorted(numbers)
        if self.tasks.ordered and numbers:
            assert numbers[0] > self.last.get(owner, -1)
            self.last[owner] = numbers[-1]
        for task in taken:
            good = task.outcome is Outcome.ACCEPTED and task.counts
            assert not (good and self.tasks.staleness.is_stale(task.oldest))
        self.delivered.update(numbers)

    def put_back(self) -> None:
        self.tasks.put_back(self.tasks.take(self.owner, self.rng.randint(1, 4)))

    def advance(self) -> None:
        self.tasks.advance(self.tasks.staleness.version + self.rng.randint(0, 2))

    def pause(self) -> None:
        self.tasks.paused = True

    def resume(self) -> None:
        self.tasks.paused = False

    def cancel(self) -> None:
        open_ = self.tasks.open(self.owner)
        if open_:
            self._stop([self.rng.choice(open_)])

    def abandon(self) -> None:
        owner = self.owner
        open_ = self.tasks.open(owner)
        self.forgotten.update(task.number for task in open_)
        self.tasks.abandon(owner)
        self._stop(open_)

    def _stop(self, tasks: list[Task]) -> None:
        for task in self.tasks.cancel(tasks, 0.0)[1]:
            self.running.remove(task)
            self.tasks.finish(task, Outcome.CANCELLED, 0.0)

    def pump(self) -> None:
        """Start what may start, then look whether all is as it must be."""
        self.running.extend(self.tasks.startable(0.0))
        staleness = self.tasks.staleness
        assert len(self.running) == staleness.running + staleness.free <= self.limits.max_concurrent
        assert all(task.state is State.RUNNING for task in self.running)
        for owner in OWNERS:
            queued, _, _ = self.tasks.tally(owner)
            assert queued <= self.limits.queue
            assert not queued or self.tasks.holds_up(owner), f"{owner} has {queued} queued, and nothing holds them up"

    def end(self) -> None:
        """Let everything end, and take it."""
        self.tasks.paused = False
        for _ in range(len(self.submitted) * 3 + 3):
            self.tasks.advance(self.tasks.staleness.version + 1)
            self.pump()
            while self.running:
                self.tasks.finish(self.running.pop(), Outcome.ACCEPTED, 0.0)
            for owner in OWNERS:
                self.delivered.update(task.number for task in self.tasks.take(owner, 99))


EVENTS = {
    Story.submit: 10, Story.finish: 10, Story.take: 8, Story.advance: 2, Story.pause: 1, Story.resume: 3,
    Story.cancel: 1, Story.put_back: 1, Story.abandon: 0.2,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(80))
def test_whatever_happens_each_task_has_one_outcome(seed):
    """Random events: never more running than allowed, never one idle that may start, none lost or doubled."""
    story = Story(seed)
    for _ in range(400):
        story.rng.choices(list(EVENTS), list(EVENTS.values()))[0](story)
        story.pump()
    story.end()
    tasks = story.tasks
    assert story.delivered == Counter(story.submitted - story.forgotten)
    assert tasks.taken == tasks.counts["submitted"] == sum(tasks.counts[one] for one in Outcome)
    assert tasks.staleness.running == tasks.staleness.free == 0
