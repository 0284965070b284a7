from __future__ import annotations

import pytest

import zbus
from fake_placer import make_group
from zbus.errors import NotExecuted, WorkerLost
from zbus.protocol.messages import Outcome, OutcomeKind

HOW = "killed by SIGKILL"


class Actor(zbus.Engine):
    @zbus.endpoint()
    def train(self):
        return None


@pytest.mark.parametrize(
    ("kind", "words", "cls", "message", "fact"),
    [
        (
            OutcomeKind.UNKNOWN,
            "executed, reply lost",
            WorkerLost,
            "actor/0 died before it answered `train` (batch 1)",
            "the call ran: it was executed, reply lost",
        ),
        (
            OutcomeKind.UNKNOWN,
            "running: began, no end",
            WorkerLost,
            "actor/0 died during `train` (batch 1)",
            "the call may have run: it was running (began, no end)",
        ),
        (
            OutcomeKind.NOT_EXECUTED,
            "not started: the worker died before",
            NotExecuted,
            "actor/0 died before it started `train` (batch 1)",
            "the call did not start",
        ),
    ],
)
def test_the_error_says_what_the_journal_told(kind, words, cls, message, fact) -> None:
    """Executed, begun and never started calls read differently, in the message and in the facts."""
    group, placer, _ = make_group(Actor, 1)
    outcome = Outcome(kind, None, "worker_exit", f"{HOW}; the call was {words}", 1)
    placer.auto = lambda request: request.answer(outcome)
    with pytest.raises(cls) as caught:
        group[0].options(retries=0).train()
    assert str(caught.value).startswith(message)
    assert caught.value.facts["outcome"] == fact
    assert caught.value.facts["exit"] == HOW
