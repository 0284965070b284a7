from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller import Controller, Role
from launching import HERE, launch
from sidecar_kit import TrialFiles
from waiting import scaled, wait_until
from zbus.config import Config
from zbus.config.schema import TraceConfig
from zbus.errors import CallTimeout, RemoteError, RewardError, WorkerLost
from zbus.ids import WorkerName
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records
from zbus.rl import Completion, Episode, Sampling, VersionSpan
from zbus.runtime.processes import children_of, is_alive, start_time

pytest.importorskip("torch", reason="generation is on torch: install zbus-runtime[torch]")

pytestmark = [pytest.mark.alone, pytest.mark.timeout(scaled(300))]

GREEDY = Sampling(max_tokens=8, temperature=0)


def rollout(**kwargs: Any) -> Role:
    """Return a role of one rank that generates with a small model."""
    names = ("Distance", "rejecting", "raising", "hanging_reward")
    kwargs = {
        "model": "generate_models.py:Cached",
        "dtype": "float64",
        "workflows": {name: f"rollout_workflows.py:{name}" for name in names},
        "rewards": {name: f"reward_functions.py:{name}" for name in ("distance", "hang")},
        **kwargs,
    }
    return Role("workers.engines.generate:TorchRolloutEngine", replicas=1, kwargs=kwargs, sys_path=[str(HERE)])


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """Give a bus with one rollout worker."""
    root: Path = tmp_path_factory.mktemp("generate")
    with launch(root, {"rollout": rollout()}) as bus:
        yield bus


def test_answers_come_through_the_bus_as_completions(bus: Controller):
    """A call gives tokens, log-probabilities, the reason of the end and the versions; many at once give the same."""
    group = bus.group("rollout")
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]

    alone = [group.generate(prompt, GREEDY) for prompt in prompts]
    calls = [group.generate.submit(prompt, GREEDY) for prompt in prompts * 10]
    together = [call.result() for call in calls]

    assert all(isinstance(answer, Completion) for answer in alone)
    assert alone[0].finish == "length"
    assert alone[0].versions == (VersionSpan(0, 0, 8),)
    assert alone[0].ids.dtype == np.int64
    assert alone[0].logprobs.dtype == np.float32
    for place, answer in enumerate(together):
        assert answer.ids.tolist() == alone[place % 3].ids.tolist()
        np.testing.assert_allclose(answer.logprobs, alone[place % 3].logprobs, atol=1e-6)


def test_a_stream_gives_each_token_as_it_is_made(bus: Controller):
    """The items of a stream are the tokens and log-probabilities of the answer."""
    group = bus.group("rollout")
    whole = group.generate([1, 2, 3], GREEDY)

    streamed = list(group.generate_stream.stream([1, 2, 3], GREEDY))

    assert [token for token, _ in streamed] == whole.ids.tolist()
    assert [logprob for _, logprob in streamed] == pytest.approx(whole.logprobs.tolist(), abs=1e-6)


def test_an_episode_at_the_worker_comes_back_as_trajectories(bus: Controller):
    """The workflow and its reward run at the worker; arrays arrive as they were."""
    episode = bus.group("rollout").run_episode("Distance", {"prompt": [1, 2], "truth": [3], "seed": 1})

    assert isinstance(episode, Episode)
    assert (episode.oldest, episode.newest) == (0, 0)
    for item in episode.value:
        assert item["ids"].dtype == np.int64
        assert item["logprobs"].shape == item["ids"].shape
        assert item["reward"] <= 0
    assert bus.group("rollout").run_episode("rejecting", None).value is None


def test_errors_of_workflows_and_rewards_come_with_their_lines(bus: Controller):
    """The driver catches what the workflow raised, and sees where; a reward that hangs is named."""
    group = bus.group("rollout")
    with pytest.raises(KeyError, match="the item") as caught:
        group.run_episode("raising", "the item")
    assert isinstance(caught.value, RemoteError)
    assert "rollout_workflows.py" in str(caught.value.remote_traceback)
    with pytest.raises(RewardError, match="rollout/0: reward 'hang' took longer than") as hung:
        group.run_episode("hanging_reward", scaled(0.3))
    assert (hung.value.reward, hung.value.hung) == ("hang", True)
    with pytest.raises(RemoteError, match="has no workflow 'Distanc'; it has 'Distance'"):
        group.run_episode("Distanc", None)


def test_a_paused_engine_answers_after_resume_and_forgets_whom_nobody_waits_for(bus: Controller):
    """A call that comes meanwhile waits; one whose deadline passes frees its place at the worker."""
    group = bus.group("rollout")
    assert group.pause("keep") == [0]
    try:
        waits = group.generate.submit([1, 2, 3], GREEDY)
        gone = group.generate.options(deadline=scaled(0.2)).submit([4], GREEDY)
        with pytest.raises(CallTimeout):
            gone.result()
        [state] = wait_until(lambda: [s for s in group.state() if s["waiting"] == 1], what="one that waits")
        assert state["paused"] is True
        assert not waits.done()
    finally:
        assert group.resume() == [True]
    assert len(waits.result().ids) == 8
    assert group.state()[0]["waiting"] == 0


def test_weights_of_a_trainer_come_in_between_two_tokens(tmp_path: Path):
    """While requests run, an update from a training engine changes what follows, and spans say where: exactly there."""
    import torch

    from controller.weights import WeightSync
    from generate_models import Cached

    def model_of(seed: int) -> Cached:
        torch.manual_seed(seed)
        return Cached().double().eval()

    train = Role(
        "workers.engines.train:TorchTrainEngine",
        kwargs={"model": "generate_models.py:Cached", "dtype": "float64", "seed": 5},
        sys_path=[str(HERE)],
    )
    chance = np.random.default_rng(0)
    prompts = [chance.integers(0, 23, 1 + number % 5).tolist() for number in range(60)]
    long = Sampling(max_tokens=55, temperature=0)
    with launch(tmp_path, {"train": train, "rollout": rollout(seed=2, max_batch=2, workflows={}, rewards={})}) as bus:
        trainer, group = bus.group("train"), bus.group("rollout")
        trainer.create_process_group()
        trainer.initialize()
        calls = [group.generate.submit(prompt, long) for prompt in prompts]
        wait_until(lambda: group.state()[0]["running"] == 2, what="requests that run")
        with contextlib.closing(WeightSync(trainer, group)) as sync:
            report = sync.update(1)
        answers = [call.result() for call in calls]
        assert group.weights() == [{"version": 1, "digest": report.digest, "torn": "", "paused": False}]

    models = {0: model_of(2), 1: model_of(5)}
    assert sum(len(answer.versions) == 2 for answer in answers) == 2, "those that ran when it came"
    for prompt, answer in zip(prompts, answers, strict=True):
        for span in answer.versions:
            text = torch.tensor([[*prompt, *answer.ids[: span.end]]])
            with torch.inference_mode():
                likeliest = models[span.version](text)[0].argmax(-1)[:-1]
            made = slice(len(prompt) - 1 + span.start, None)
            assert likeliest[made].tolist() == answer.ids[span.start : span.end].tolist()


def test_statistics_of_the_ranks_merge(bus: Controller):
    """What a rank counted since the last time is a dump of zbus.rl.stats."""
    from zbus.rl.stats import merge, values

    group = bus.group("rollout")
    group.export_stats()
    group.generate([1, 2, 3], GREEDY)

    counted = values(merge(group.export_stats()))

    assert counted["generate/prefill_tokens"] == 3
    assert counted["generate/decode_tokens"] == 7
    assert counted["generate/finish_length"] == 1


def test_a_killed_worker_leaves_no_reward_process_and_its_trace_shows_the_episodes(tmp_path: Path):
    """Reward processes end with their worker; spans, counters and sessions of what it did are in its files."""
    with launch(tmp_path, {"rollout": rollout()}, config=Config(trace=TraceConfig(level="full"))) as bus:
        group = bus.group("rollout")
        calls = [group.run_episode.submit("Distance", {"prompt": [1, 2], "truth": [3]}) for _ in range(4)]
        calls.append(group.run_episode.submit("rejecting", None))
        for call in calls:
            call.result()
        bus.save_perf_tracer(0, force=True)
        registry = FileRegistry(bus.trial.registry, create=False)
        [record] = Records(registry).workers("rollout")
        registry.close()
        trial = Path(bus.trial.path)

        def sessions() -> list[dict[str, Any]]:
            file = trial / "traces" / "rollout" / "sessions_0.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            return [row for row in map(json.loads, lines) if "phases" in row]

        wait_until(lambda: len(sessions()) == 5, what="five sessions")
        rewards = [(pid, start_time(pid) or 0) for pid in children_of(record.pid)]
        assert len(rewards) == 1
        os.kill(record.pid, signal.SIGKILL)
        for pid, started in rewards:
            wait_until(lambda pid=pid, started=started: not is_alive(pid, started), what=f"the end of process {pid}")

    assert sorted(row["status"] for row in sessions()) == [*["accepted"] * 4, "rejected"]
    scored = [row for row in sessions() if row["status"] == "accepted"]
    assert all(row["phases"].keys() == {"generate", "reward"} for row in scored)
    assert all(row["generate_s"] > 0 and row["reward_s"] > 0 for row in scored)
    trace = TrialFiles(trial, "rollout")
    answers = trace.named("generate")
    assert len(answers) == 9
    assert all(span["args"]["tokens"] > 0 and span["args"]["version"] == 0 for span in answers)
    assert len(trace.named("queue")) == 9
    assert len(trace.named("episode")) == 5
    assert sum(span["args"]["tokens"] for span in trace.named("prefill")) == 4 * 2 * 2 + 1
    assert {event["args"]["rows"] for event in trace.named("generation")} <= set(range(1, 10))
    assert trace.named("generation")


def test_a_rank_that_can_generate_no_more_ends_and_is_restarted(tmp_path: Path):
    """The thread that computes is the rank: with it goes the process, so that restart policy and routing see it."""
    role = replace(rollout(model="generate_models.py:Fatal"), restart="one")
    with launch(tmp_path, {"rollout": role}) as bus:
        group = bus.group("rollout")
        before = bus.statuses()[WorkerName("rollout", 0)]["pid"]
        with pytest.raises(WorkerLost) as caught:
            group.options(retries=0).generate([1, 22], GREEDY)
        assert caught.value.exit_code_of_worker == 70
        wait_until(lambda: group.ready, 60, "the rank to be there again")
        assert len(group.generate([1, 2], GREEDY).ids) == 8
        assert bus.statuses()[WorkerName("rollout", 0)]["pid"] != before
