from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import rollout_workflows
from reward_functions import distance
from waiting import scaled
from workers.engines.generate.engine import TorchRolloutEngine
from workers.engines.generate.episodes import load_workflow
from zbus.errors import ConfigError, EngineLoadError, RewardError
from zbus.rl import Sampling
from zbus.rl.stats import values
from zbus.rl.weights import TensorInfo

FLOWS = Path(rollout_workflows.__file__)
REWARDS = {
    "distance": f"{FLOWS.parent}/reward_functions.py:distance",
    "hang": f"{FLOWS.parent}/reward_functions.py:hang",
}


@pytest.fixture
def flows(engine) -> Any:
    """Give an engine with the test workflows."""
    names = ("Distance", "one", "rejecting", "raising", "hanging_reward", "forgetful", "made")
    return engine(workflows={name: f"{FLOWS}:{name}" for name in names}, rewards=REWARDS)


@pytest.fixture
def bare(engine) -> Any:
    """Give an engine with workflows and no reward."""
    names = ("rejecting", "raising", "hanging_reward", "forgetful", "too_long")
    return engine(workflows={name: f"{FLOWS}:{name}" for name in names})


def test_an_episode_generates_scores_and_returns_its_trajectories(flows, run):
    """Samples of a prompt are drawn with seeds of their own and scored in the reward's process."""
    data = {"prompt": [1, 2, 3], "truth": [5, 6], "seed": 4}
    first, again = (run(flows.run_episode("Distance", data)) for _ in range(2))

    assert (first.oldest, first.newest) == (0, 0)
    assert [item["ids"].tolist() for item in first.value] == [item["ids"].tolist() for item in again.value]
    left, right = first.value
    assert left["ids"].tolist() != right["ids"].tolist()
    alone = run(flows.generate([1, 2, 3], Sampling(max_tokens=6, seed=4)))
    assert left["ids"].tolist() == alone.ids.tolist()
    for item in first.value:
        assert item["reward"] == -distance(item["ids"], [5, 6])


def test_several_answers_to_one_prompt_end_together_with_the_first_error(engine, run):
    """The error is the model's own, and the places of the answers that are given up are free at once."""
    one = engine("Picky", workflows={"made": f"{FLOWS}:made"}, rewards=REWARDS)

    with pytest.raises(RuntimeError, match="token 13 is bad luck"):
        run(one.run_episode("made", {"prompt": [1, 13], "truth": [1]}))

    assert one.do_state() == {"running": 0, "waiting": 0}
    counted = values(one.do_stats())
    assert counted["generate/failed"] + counted.get("generate/cancelled", 0) == 3


def test_many_episodes_share_the_steps_of_the_model(flows, run):
    """Episodes run side by side."""

    async def many() -> list[Any]:
        each = [{"prompt": [1 + n % 9, 2], "truth": [n % 7]} for n in range(40)]
        return await asyncio.gather(*(flows.run_episode("Distance", data) for data in each))

    assert sum(len(episode.value) for episode in run(many())) == 80
    assert flows.do_stats()["generate/decode_steps"]["sum"][0] < 400


def test_classes_functions_and_objects_are_workflows(engine, flows, run):
    """By path, with arguments, or as attributes of a subclass; an argument of the role comes before these."""

    class Own(TorchRolloutEngine):
        workflows: ClassVar = {"a": rollout_workflows.one, "b": rollout_workflows.Distance}
        rewards: ClassVar = REWARDS

    own = engine(cls=Own, workflows={"b": {"path": f"{FLOWS}:Distance", "kwargs": {"samples": 5}}})

    assert run(own.run_episode("a", [1, 2])).value["ids"].shape == (4,)
    assert len(run(own.run_episode("b", {"prompt": [1], "truth": [1]})).value) == 5
    assert len(run(flows.run_episode("made", {"prompt": [1], "truth": [1]})).value) == 3


def test_a_workflow_rejects_with_none(bare, run):
    """None is an outcome, not an error."""
    assert run(bare.run_episode("rejecting", None)).value is None


def test_an_error_of_a_workflow_is_its_own(bare, run):
    """It is raised as it is, from the user's line."""
    with pytest.raises(KeyError, match="the item") as caught:
        run(bare.run_episode("raising", "the item"))
    assert caught.traceback[-1].path == FLOWS
    with pytest.raises(ValueError, match="a prompt of 64 tokens leaves no room"):  # of one of several answers
        run(bare.run_episode("too_long", None))
    assert bare.do_state() == {"running": 0, "waiting": 0}


def test_a_reward_that_hangs_fails_its_episode_alone(flows, run):
    """The episode gets the error; the next one has a reward process again."""
    with pytest.raises(RewardError, match="rollout/0: reward 'hang' took longer"):
        run(flows.run_episode("hanging_reward", scaled(0.3)))
    assert run(flows.run_episode("Distance", {"prompt": [1], "truth": [1]})).value


@pytest.mark.parametrize(("value", "said"), [([1], r"list|int \(item 0\)"), ("x", "str"), ({1: 2}, "dict"), (3, "int")])
def test_what_is_no_trajectory_is_refused_with_the_workflows_name(bare, run, value, said):
    """The error comes where the workflow is still known."""
    with pytest.raises(TypeError, match=f"workflow 'forgetful' returned ({said}), not a dict of arrays"):
        run(bare.run_episode("forgetful", value))


def test_trajectories_may_be_one_or_several(bare, run):
    """A dict, a list or tuple of dicts, also an empty one."""
    for value in ({"a": np.arange(3)}, [], [{"a": 1}], ({"a": 1}, {"a": 2})):
        assert run(bare.run_episode("forgetful", value)).value == value


def test_an_unknown_workflow_or_reward_is_named_with_those_there_are(bare, run):
    """The error says what to declare."""
    with pytest.raises(ConfigError, match="rollout/0 has no workflow 'forgetfull'; it has 'rejecting'") as caught:
        run(bare.run_episode("forgetfull", None))
    assert caught.value.hint == "did you mean 'forgetful'?"
    with pytest.raises(ConfigError, match="rollout/0 has no reward 'hang': its role declares none"):
        run(bare.run_episode("hanging_reward", 1.0))


@pytest.mark.parametrize(
    ("spec", "error", "said"),
    [
        (f"{FLOWS}:sync", ConfigError, "has no `async def run_episode"),
        (f"{FLOWS}:Distanc", EngineLoadError, "no name 'Distanc' for workflow 'w'"),
        ({"path": f"{FLOWS}:one", "kwargs": {"a": 1}}, ConfigError, "is no class to be made with them"),
        ({"file": "x"}, ConfigError, "workflow 'w' is {'file': 'x'}"),
        (TensorInfo, TypeError, "missing"),
    ],
)
def test_what_is_no_workflow_is_refused_at_the_start(spec, error, said):
    """The worker does not start with a workflow that cannot run."""
    with pytest.raises(error, match=said):
        load_workflow("w", spec)
