from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.generate.scheduler import Scheduler, Step


def _admitted(scheduler: Scheduler) -> tuple[int, ...]:
    step = scheduler.next()
    return () if step is None else step.prefill


def test_requests_are_admitted_in_the_order_of_their_arrival():
    """A short request behind a long one that has no room waits: nothing is overtaken, so nothing starves."""
    scheduler = Scheduler(max_batch=8, max_tokens_total=100, max_prefill=1000)
    scheduler.submit(0, 10, 40)
    scheduler.submit(1, 10, 60)  # two rows of 60 do not fit
    scheduler.submit(2, 1, 2)

    assert _admitted(scheduler) == (0,)
    scheduler.token(0)
    assert scheduler.next() == Step(None, (), True, (0,), 40)
    scheduler.end(0)
    assert scheduler.next() == Step((), (1,), False, (1,), 60)


def test_prefill_and_decode_take_turns():
    """However many requests arrive, those that run get a token after each prefill."""
    scheduler = Scheduler(max_batch=100, max_tokens_total=10_000, max_prefill=4)
    for key in range(4):
        scheduler.submit(key, 3, 9)

    steps = [scheduler.next() for _ in range(6)]

    assert [step.prefill for step in steps if step] == [(0,), (), (1,), (), (2,), ()]
    assert [step.decode for step in steps if step] == [False, True, False, True, False, True]


def test_a_prompt_longer_than_a_prefill_is_computed_alone():
    """The bound on one prefill delays a long prompt, and refuses none."""
    scheduler = Scheduler(max_batch=8, max_tokens_total=10_000, max_prefill=8)
    for key, prompt in enumerate((2, 2, 20, 2)):
        scheduler.submit(key, prompt, 30)

    admitted = [_admitted(scheduler) for _ in range(5)]

    assert admitted == [(0, 1), (), (2,), (), (3,)]


def test_what_could_never_run_is_refused_at_once():
    """A request larger than all there is does not wait for ever."""
    scheduler = Scheduler(max_batch=8, max_tokens_total=50, max_prefill=8)
    with pytest.raises(ValueError, match="51 tokens do not fit into 50"):
        scheduler.submit(0, 10, 51)
    assert scheduler.keys == ()


def test_suspects_are_computed_one_by_one():
    """After a step that failed, each of its requests is alone in its next one, and the others are as before."""
    scheduler = Scheduler(max_batch=8, max_tokens_total=10_000, max_prefill=1000)
    for key in range(3):
        scheduler.submit(key, 3, 9)
    scheduler.next()
    for key in range(3):
        scheduler.token(key)
    scheduler.submit(3, 3, 9)

    scheduler.suspect((0, 1))

    prefills = [step.prefill for step in (scheduler.next() for _ in range(6)) if step and step.prefill]
    assert prefills == [(0,), (1,), (2, 3)]


class _Model:
    """What a scheduler may do, said again without its bookkeeping: rows as the computing side sees them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.made: dict[int, int] = {}
        self.prompt: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self.begun: set[int] = set()
        self.order: list[int] = []
        self.rows: list[int] = []
        self.decoded = True
        self.keys = 0

    def submit(self, prompt: int, answer: int) -> None:
        key, self.keys = self.keys, self.keys + 1
        try:
            self.scheduler.submit(key, prompt, prompt + answer)
        except ValueError:
            assert prompt + answer > self.scheduler.max_tokens_total
            return
        self.prompt[key], self.most[key], self.made[key] = prompt, prompt + answer, 0
        self.order.append(key)

    def end(self, key: int) -> None:
        assert self.scheduler.end(key)
        del self.made[key]
        self.begun.discard(key)

    def step(self) -> bool:
        step = self.scheduler.next()
        if step is None:
            return False
        assert self.scheduler.mode != "freeze"
        if step.rows is not None:
            assert all(new <= old for new, old in enumerate(step.rows)), "rows only move to the front"
            assert len(set(step.rows)) == len(step.rows)
            self.rows = [self.rows[old] for old in step.rows]
        assert all(key in self.made for key in self.rows), "a row of a request that ended stays"
        assert not (step.prefill and step.decode)
        if step.prefill:
            fresh = [key for key in step.prefill if key not in self.begun]
            assert not (self.scheduler.mode == "drain" and fresh)
            before = [key for key in self.order if key in self.made and key not in self.begun]
            assert fresh == before[: len(fresh)], "one was overtaken"
            tokens = max(self.prompt[key] + self.made[key] for key in step.prefill) * len(step.prefill)
            assert tokens <= self.scheduler.max_prefill or len(step.prefill) == 1
            assert self.decoded or not self.rows, "a second prefill while rows wait for their token"
            self.rows += step.prefill
        self.decoded = not step.prefill
        assert tuple(self.rows) == step.keys
        assert len(self.rows) <= self.scheduler.max_batch
        longest = max((self.most[key] for key in self.rows), default=0)
        assert step.longest == longest
        assert longest * len(self.rows) <= self.scheduler.max_tokens_total
        for key in step.prefill or (self.rows if step.decode else ()):
            self.scheduler.token(key)
            self.begun.add(key)
            self.made[key] += 1
        for key in list(self.made):
            if self.prompt[key] + self.made[key] >= self.most[key]:
                self.end(key)
        assert set(self.scheduler.begun) == self.begun
        return True


_EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 12), st.integers(1, 12)),
    st.tuples(st.sampled_from(["step", "step", "step", "clear", "run", "drain", "freeze"])),
    st.tuples(st.sampled_from(["end", "suspect"]), st.integers(0, 100)),
)


@given(st.integers(1, 4), st.integers(4, 60), st.integers(1, 30), st.lists(_EVENTS, max_size=60))
def test_whatever_happens_all_requests_end_within_the_limits(batch, places, prefill, events):
    """Limits hold at each step, nothing is overtaken, rows are those of living requests, and once it runs all end."""
    scheduler = Scheduler(batch, places, prefill)
    model = _Model(scheduler)
    for name, *values in events:
        if name == "submit":
            model.submit(*values)
        elif name == "step":
            model.step()
        elif name == "clear":
            scheduler.clear()
        elif name == "suspect":
            chosen = [key for key in model.rows if key in model.made and key % 2 == values[0] % 2]
            scheduler.suspect(chosen)
        elif name == "end" and model.made:
            model.end(sorted(model.made)[values[0] % len(model.made)])
        elif name in ("run", "drain", "freeze"):
            scheduler.mode = name
    scheduler.mode = "drain"
    while model.step():
        pass
    assert not scheduler.begun
    scheduler.mode = "run"
    for _ in range(10_000):
        if not model.step():
            break
    assert not model.made
    assert scheduler.keys == ()
