from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from generate_models import VOCABULARY, Held
from waiting import wait_until
from workers.engines.weights.tensors import bytes_of, info_of, tensors_of
from zbus.errors import ConfigError
from zbus.rl import Completion, Sampling, VersionSpan
from zbus.rl.weights import digest, offsets
from zbus.trace.tracer import Tracer

GREEDY = Sampling(max_tokens=12, temperature=0)


def reference(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens and their log-probabilities, each from the whole text anew, without a cache."""
    text, logprobs = list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            ahead = torch.log_softmax(model(torch.tensor([text]))[0, -1], -1)
            text.append(int(ahead.argmax()))
            logprobs.append(float(ahead.max()))
    return text[len(prompt) :], logprobs


def prompts(count: int, longest: int = 20) -> list[list[int]]:
    """Return prompts of all lengths."""
    chance = np.random.default_rng(1)
    return [chance.integers(0, VOCABULARY, 1 + n % longest).tolist() for n in range(count)]


async def ask(engine: Any, prompt: Sequence[int], sampling: Sampling = GREEDY) -> Completion:
    """Ask as a call does."""
    answer: Completion = await engine.generate(prompt, sampling)
    return answer


async def ask_all(engine: Any, asked: Sequence[Sequence[int]], sampling: Sampling = GREEDY) -> list[Completion]:
    """Ask all at once."""
    return await asyncio.gather(*(ask(engine, prompt, sampling) for prompt in asked))


async def held(engine: Any, step: int, prompt: Sequence[int], sampling: Sampling) -> asyncio.Task[Completion]:
    """Ask, and return when the model stands still in a step."""
    Held.hold(step)
    task = asyncio.create_task(ask(engine, prompt, sampling))
    await asyncio.to_thread(wait_until, Held.held.is_set)
    return task


async def paused(engine: Any, mode: str) -> int:
    """Pause while the model stands still, then let it go; return what the pause says."""
    pausing = asyncio.create_task(asyncio.to_thread(engine.pause, mode))
    await asyncio.to_thread(wait_until, lambda: engine._decoder._scheduler.mode != "run")
    Held.go.set()
    return await pausing


def with_other_weights(engine: Any, seed: int) -> tuple[Any, list[dict[str, Any]], str]:
    """Return a model of the same kind with other weights, and these as an update takes them."""
    torch.manual_seed(seed)
    other = type(engine.model)().double().eval()
    parts = [(info_of(name, tensor), bytes_of(tensor.detach())) for name, tensor in tensors_of(other).items()]
    manifest = tuple(info for info, _ in parts)
    at = offsets(manifest)
    data = np.zeros(at[-1], np.uint8)
    for (info, raw), begin in zip(parts, at, strict=False):
        data[begin : begin + info.nbytes] = raw
    return other, [{"manifest": manifest, "data": data, "full": True}], digest(parts)


# -- what is generated -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["Cached", "Plain"])
def test_answers_are_those_of_the_whole_text_computed_anew(engine, run, model):
    """Neither the cache nor the neighbours change an answer: prompts of all lengths at once, and each alone."""
    one = engine(model, max_batch=7)
    asked = prompts(30)

    together = run(ask_all(one, asked))
    alone = run(ask(one, asked[3]))

    for prompt, answer in zip(asked, together, strict=True):
        tokens, logprobs = reference(one.model, prompt, 12)
        assert answer.ids.tolist() == tokens
        np.testing.assert_allclose(answer.logprobs, np.float32(logprobs), rtol=1e-6)
        assert answer.finish == "length"
    assert alone.ids.tolist() == together[3].ids.tolist()


def test_log_probabilities_in_single_precision_hardly_depend_on_the_neighbours(engine, run):
    """In float32 the order of sums differs with the batch: by rounding, not more."""
    one = engine(dtype="float32")
    asked = prompts(20)
    together, alone = run(ask_all(one, asked)), [run(ask(one, prompt)) for prompt in asked]
    for left, right in zip(together, alone, strict=True):
        assert left.ids.tolist() == right.ids.tolist()
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=2e-5)


def test_a_seed_makes_an_answer_a_function_of_prompt_and_weights(engine, run):
    """The same seed gives the same tokens alone and in any batch; other seeds and none give others."""
    one = engine(max_batch=5)
    hot = [Sampling(max_tokens=12, temperature=2.0, seed=n, top_p=0.95) for n in range(20)]

    async def all_at_once() -> list[Completion]:
        return await asyncio.gather(*(ask(one, [1, 2, 3], sampling) for sampling in hot))

    together = run(all_at_once())
    again = [run(ask(one, [1, 2, 3], sampling)) for sampling in hot]
    unseeded = run(ask_all(one, [[1, 2, 3]] * 5, Sampling(max_tokens=12, temperature=2.0)))

    assert [answer.ids.tolist() for answer in together] == [answer.ids.tolist() for answer in again]
    assert len({tuple(answer.ids.tolist()) for answer in [*together, *unseeded]}) == 25


def test_equal_prompts_are_computed_once(engine, run, monkeypatch):
    """Samples of one prompt share its prefill."""
    one = engine("Held")
    rows: list[int] = []
    forward = Held.forward

    def watched(self: Any, tokens: Any, cache: Any = None) -> Any:
        rows.append(tokens.shape[0])
        return forward(self, tokens, cache)

    monkeypatch.setattr(Held, "forward", watched)
    one.pause()

    async def eight_at_once() -> list[Completion]:
        tasks = [asyncio.create_task(ask(one, [1, 2, 3, 4])) for _ in range(8)]
        await asyncio.sleep(0)
        one.resume()
        return await asyncio.gather(*tasks)

    answers = run(eight_at_once())
    assert rows == [1, *[8] * 11]
    assert len({tuple(answer.ids.tolist()) for answer in answers}) == 1


def test_an_answer_ends_at_an_end_token_a_stop_sequence_or_a_limit(engine, run):
    """What ended it is part of it, and is told; neither counts before min_tokens."""
    one = engine()
    tokens, _ = reference(one.model, [4, 5], 12)
    end = next(place for place in range(3, 12) if tokens[place] not in tokens[:place])  # comes there first

    def finish(**fields: Any) -> tuple[list[int], str]:
        answer = run(ask(one, [4, 5], Sampling(**{"max_tokens": 12, "temperature": 0, **fields})))
        return answer.ids.tolist(), answer.finish

    stop = (tuple(tokens[end - 1 : end + 1]),)
    assert finish(stop=stop) == (tokens[: end + 1], "stop")
    assert finish(stop=stop, min_tokens=end + 2)[1] == "length"
    assert finish(stop=((99,), *stop)) == (tokens[: end + 1], "stop")
    assert finish(max_tokens=3) == (tokens[:3], "length")
    ending = engine(eos=tokens[end])
    assert run(ask(ending, [4, 5])).ids.tolist() == tokens[: end + 1]
    assert run(ask(ending, [4, 5])).finish == "stop"
    ignoring = run(ask(ending, [4, 5], Sampling(max_tokens=12, temperature=0, ignore_eos=True)))
    assert (ignoring.ids.tolist(), ignoring.finish) == (tokens, "length")
    late = run(ask(ending, [4, 5], Sampling(max_tokens=12, temperature=0, min_tokens=end + 1)))
    assert tokens[end] not in late.ids[: end + 1].tolist()


def test_an_answer_is_cut_where_the_model_has_no_more_places(engine, run):
    """The model's max_length bounds prompt and answer; a prompt that fills it is refused with the numbers."""
    one = engine()
    answer = run(ask(one, [1] * 60, Sampling(max_tokens=12)))
    assert (len(answer.ids), answer.finish) == (4, "length")
    with pytest.raises(ValueError, match="a prompt of 64 tokens leaves no room: the model takes 64"):
        run(ask(one, [1] * 64))


@pytest.mark.parametrize("prompt", [[], [[1, 2]], [1.5], "text", [-1], [[1], [2, 3]], None])
def test_what_is_no_prompt_is_refused(engine, run, prompt):
    """The error shows it."""
    with pytest.raises(ValueError, match="rollout/0: a prompt is a list of token ids"):
        run(ask(engine(), prompt))


def test_a_request_larger_than_the_memory_is_refused(engine, run):
    """It would wait for ever."""
    with pytest.raises(ValueError, match=r"3 tokens and 12 more \(max_tokens\) do not fit into max_tokens_total=14"):
        run(ask(engine(max_tokens_total=14), [1, 2, 3]))


def test_more_requests_than_there_is_room_for_wait_their_turn(engine, run):
    """Whatever the limits, all are answered, and right."""
    for limits in ({"max_batch": 1}, {"max_tokens_total": 40}, {"max_prefill": 1}):
        one = engine(**limits)
        asked = prompts(12)
        for prompt, answer in zip(asked, run(ask_all(one, asked)), strict=True):
            assert answer.ids.tolist() == reference(one.model, prompt, 12)[0]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_request_that_breaks_the_model_fails_alone(engine, run):
    """Its neighbours, running and new, are answered as without it; the error is the model's own."""
    one = engine("Picky")
    good = [prompt for prompt in prompts(24) if not {13, 17} & set(prompt)]
    fine = [prompt for prompt in good if not {13, 17} & set(reference_of(one, prompt))]
    assert len(fine) > 3

    async def mixed() -> list[Any]:
        asked = [fine[0], [1, 13], *fine[1:], [13]]
        return await asyncio.gather(*(ask(one, prompt) for prompt in asked), return_exceptions=True)

    first, bad, *rest, last = run(mixed())

    for prompt, answer in zip(fine, [first, *rest], strict=True):
        assert answer.ids.tolist() == reference_of(one, prompt)
    for error in (bad, last):
        assert isinstance(error, RuntimeError)
        assert str(error) == "token 13 is bad luck"
    assert one.do_state() == {"running": 0, "waiting": 0}


def reference_of(engine: Any, prompt: Sequence[int]) -> list[int]:
    """Return what a sound model of the same weights answers."""
    from generate_models import Cached

    sound = Cached().double()
    sound.load_state_dict(engine.model.state_dict())
    return reference(sound, prompt, 12)[0]


def test_logits_that_are_no_numbers_fail_their_request(engine, run):
    """Nothing is sampled from NaN; the error tells where and which weights."""
    one = engine("Picky")
    with pytest.raises(
        FloatingPointError, match="rollout/0: the logits of token 2 are not numbers; weights of version"
    ):
        run(ask(one, [17, 2]))


def test_a_model_that_always_fails_ends_every_request(engine, run):
    """A step that fails again is not tried for ever."""
    one = engine("Lame")

    async def all_fail() -> list[Any]:
        return await asyncio.gather(*(ask(one, prompt) for prompt in prompts(6)), return_exceptions=True)

    assert [str(error) for error in run(all_fail())] == ["no legs"] * 6


# -- pausing -----------------------------------------------------------------------------------------------------------


def test_keep_freezes_an_answer_which_goes_on_as_if_nothing_had_been(engine, run):
    """A request that comes while paused waits; after resume both are those of an engine that never paused."""
    one = engine("Held")

    async def story() -> tuple[int, dict[str, Any], Completion, Completion]:
        first = await held(one, 5, [1, 2, 3], GREEDY)
        running = await paused(one, "keep")
        second = asyncio.create_task(ask(one, [7, 8]))
        await asyncio.sleep(0)
        state = one.do_state()
        assert not first.done()
        one.resume()
        return running, state, await first, await second

    running, state, first, second = run(story())
    assert running == 1
    assert state == {"running": 1, "waiting": 1}
    assert first.ids.tolist() == reference(one.model, [1, 2, 3], 12)[0]
    assert second.ids.tolist() == reference(one.model, [7, 8], 12)[0]
    assert first.versions == (VersionSpan(0, 0, 12),)


def test_a_frozen_answer_goes_on_with_new_weights_and_says_which_made_what(engine, run):
    """What follows the update is what the new weights make of the whole text so far, not of keys of the old ones."""
    one = engine("Held")
    other, pieces, wanted = with_other_weights(one, 99)
    before = type(one.model)().double()
    before.load_state_dict(one.model.state_dict())

    async def story() -> Completion:
        first = await held(one, 5, [1, 2, 3], GREEDY)
        await paused(one, "keep")
        assert one.update_weights(pieces, 7, wanted) == wanted
        one.resume()
        return await first

    answer = run(story())
    old, _ = reference(before, [1, 2, 3], 5)
    new, logprobs = reference(other, [1, 2, 3, *old], 7)
    assert answer.ids.tolist() == [*old, *new]
    np.testing.assert_allclose(answer.logprobs[5:], np.float32(logprobs), rtol=1e-6)
    assert answer.versions == (VersionSpan(0, 0, 5), VersionSpan(7, 5, 12))
    assert answer.oldest == 0


def test_an_answer_that_is_computed_anew_has_waited_in_the_queue_once(engine, run, monkeypatch):
    """With new weights its prompt is computed again; the trace shows the wait before its first token alone."""
    tracer = Tracer("rollout", 0)
    tracer.set_level("full")
    monkeypatch.setattr("workers.engines.generate.decoder.get_tracer", lambda: tracer)
    one = engine("Held")
    _, pieces, wanted = with_other_weights(one, 99)

    async def story() -> Completion:
        first = await held(one, 5, [1, 2, 3], GREEDY)
        await paused(one, "keep")
        one.update_weights(pieces, 7, wanted)
        one.resume()
        return await first

    assert len(run(story()).versions) == 2
    assert [record[1] for ring in tracer._rings for record in ring.items].count("queue") == 1


def test_torn_weights_make_no_token(engine, run):
    """After an update with another digest the engine does not resume, nor let answers end; a whole one helps."""
    one = engine("Held")
    _, pieces, wanted = with_other_weights(one, 99)

    async def story() -> Completion:
        first = await held(one, 3, [1, 2, 3], GREEDY)
        await paused(one, "keep")
        one.update_weights(pieces, 7, "of something else")
        assert one.resume() is False
        with pytest.raises(ConfigError, match="its weights are torn"):
            one.pause("wait")
        one.update_weights(pieces, 8, wanted)
        assert one.resume() is True
        return await first

    assert run(story()).versions == (VersionSpan(0, 0, 3), VersionSpan(8, 3, 12))


def test_abort_gives_what_there_is_and_lets_those_that_wait_wait(engine, run):
    """pause("abort") ends what runs with its tokens; a request without any is answered after resume."""
    one = engine("Held", max_batch=1)

    async def story() -> tuple[int, Completion, Completion]:
        first = await held(one, 5, [1, 2, 3], GREEDY)
        second = asyncio.create_task(ask(one, [7, 8]))
        await asyncio.sleep(0)
        count = await paused(one, "abort")
        ended = await first
        assert not second.done()
        one.resume()
        return count, ended, await second

    count, first, second = run(story())
    assert count == 1
    assert (first.ids.tolist(), first.finish) == (reference(one.model, [1, 2, 3], 5)[0], "abort")
    assert (len(second.ids), second.finish) == (12, "length")


def test_wait_lets_what_runs_end_and_begins_nothing(engine, run):
    """pause("wait") returns when all that had begun is answered in full; what came later waits for resume."""
    one = engine("Held")

    async def story() -> tuple[int, Completion, Completion]:
        first = await held(one, 3, [1, 2, 3], GREEDY)
        second = asyncio.create_task(ask(one, [7, 8]))
        await asyncio.sleep(0)
        count = await paused(one, "wait")
        ended = await asyncio.wait_for(first, 5)
        assert one.do_state() == {"running": 0, "waiting": 1}
        one.resume()
        return count, ended, await second

    count, first, second = run(story())
    assert count == 1
    assert first.ids.tolist() == reference(one.model, [1, 2, 3], 12)[0]
    assert second.ids.tolist() == reference(one.model, [7, 8], 12)[0]


def test_abort_alone_ends_all_requests_and_pauses_nothing(engine, run):
    """Those that run end with what they have, those that wait with nothing; the next one is answered."""
    one = engine("Held", max_batch=1)

    async def story() -> tuple[int, list[Completion], Completion]:
        tasks = [await held(one, 4, [1, 2, 3], GREEDY), asyncio.create_task(ask(one, [7, 8]))]
        await asyncio.sleep(0)
        aborting = asyncio.create_task(asyncio.to_thread(one.abort))
        await asyncio.to_thread(wait_until, lambda: one._decoder._quieters)
        Held.go.set()
        return await aborting, list(await asyncio.gather(*tasks)), await ask(one, [5])

    count, (first, second), third = run(story())
    assert count == 2
    assert (len(first.ids), first.finish) == (4, "abort")
    assert (len(second.ids), second.finish, second.versions, second.oldest) == (0, "abort", (), None)
    assert len(third.ids) == 12


def test_a_pause_that_waits_ends_with_its_call(engine, run, monkeypatch):
    """When its caller gives up, generation goes on as before."""
    one = engine("Held")

    class GivenUpError(Exception):
        pass

    def given_up() -> None:
        raise GivenUpError

    async def story() -> Completion:
        first = await held(one, 3, [1, 2, 3], GREEDY)
        monkeypatch.setattr("zbus.checkpoint", given_up)
        with pytest.raises(GivenUpError):
            await asyncio.to_thread(one.pause, "wait")
        Held.go.set()
        assert not one._paused
        return await ask(one, [4]) and await first

    assert len(run(story()).ids) == 12


def test_the_weights_do_not_change_inside_a_step(engine, run):
    """Whoever holds the step lock waits for the step that runs and keeps the next one waiting."""
    one = engine("Held")
    seen: list[int] = []

    def change() -> None:
        with one.step_lock:
            seen.append(Held.steps)
            with torch.no_grad():
                one.model.token.weight.add_(0.0)
            seen.append(Held.steps)

    async def story() -> None:
        first = await held(one, 3, [1, 2, 3], GREEDY)
        thread = threading.Thread(target=change)
        thread.start()
        assert not seen
        Held.go.set()
        await first
        thread.join()

    run(story())
    assert len(seen) == 2
    assert seen[0] == seen[1] >= 3


def test_offloaded_weights_make_no_token_until_they_are_back(engine, run):
    """To offload needs a pause, to resume needs onload, and a frozen answer goes on right after both."""
    one = engine("Held")
    with pytest.raises(ConfigError, match="offload needs a paused engine"):
        one.offload()

    async def story() -> Completion:
        first = await held(one, 5, [1, 2, 3], GREEDY)
        await paused(one, "keep")
        one.offload()
        with pytest.raises(ConfigError, match="its weights are offloaded"):
            one.resume()
        one.onload()
        one.resume()
        return await first

    assert run(story()).ids.tolist() == reference(one.model, [1, 2, 3], 12)[0]


# -- who waits ---------------------------------------------------------------------------------------------------------


def test_a_call_that_is_cancelled_frees_its_place(engine, run):
    """With room for one, the next request is answered although the first would have taken long."""
    one = engine("Held", max_batch=1)

    async def story() -> Completion:
        first = await held(one, 3, [1], Sampling(max_tokens=60))
        second = asyncio.create_task(ask(one, [7, 8]))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        Held.go.set()
        return await second

    answer = run(story())
    assert Held.steps == 3 + 12
    assert answer.ids.tolist() == reference(one.model, [7, 8], 12)[0]
    assert one.do_stats()["generate/cancelled"]["sum"] == [1, 0]


def test_a_cancel_during_a_step_disturbs_no_neighbour(engine, run):
    """The step goes on for the others, and none of them is computed anew."""
    one = engine("Held")
    one.pause()

    async def story() -> Completion:
        Held.hold(3)
        gone, stays = (asyncio.create_task(ask(one, prompt)) for prompt in ([1, 2], [7, 8]))
        await asyncio.sleep(0)
        one.resume()
        await asyncio.to_thread(wait_until, Held.held.is_set)
        gone.cancel()
        await asyncio.sleep(0)
        Held.go.set()
        return await stays

    answer = run(story())
    assert one.do_stats()["generate/prefill_steps"]["sum"] == [1, 0]
    assert answer.ids.tolist() == reference(one.model, [7, 8], 12)[0]


def test_a_stream_gives_tokens_while_they_are_made_and_frees_its_place_when_closed(engine, run):
    """The first tokens are there while the model stands still; leaving the loop ends the request."""
    one = engine("Held", max_batch=1)

    async def story() -> list[int]:
        Held.hold(4)
        tokens = []
        stream = one.generate_stream([1, 2, 3], Sampling(max_tokens=50, temperature=0))
        async for token, _ in stream:
            tokens.append(token)
            if len(tokens) == 3:
                assert not Held.go.is_set()
                break
        await stream.aclose()
        Held.go.set()
        await ask(one, [5])
        return tokens

    assert run(story()) == reference(one.model, [1, 2, 3], 3)[0]


def test_a_stream_of_a_request_that_fails_raises_its_error(engine, run):
    """An error ends a stream, and is not its silent end."""
    one = engine("Picky")

    async def story() -> list[Any]:
        return [token async for token in one.generate_stream([13], GREEDY)]

    with pytest.raises(RuntimeError, match="bad luck"):
        run(story())


def test_stopping_tells_who_waits(engine, run):
    """Requests that are not answered when the worker stops fail, and later ones are refused."""
    from zbus.engine import Mesh
    from zbus.runtime.context import Context

    first_one = engine("Held")
    one = type(first_one)(first_one._spec, dtype="float64")
    one.setup(Context(role="rollout", rank=1, world_size=2, mesh=Mesh({"dp": 2})))

    async def story() -> None:
        waiting = await held(one, 2, [1], GREEDY)
        stopping = asyncio.create_task(asyncio.to_thread(one.teardown))
        await asyncio.to_thread(wait_until, lambda: one._decoder._closed)
        Held.go.set()
        await stopping
        with pytest.raises(RuntimeError, match="rollout/1 was stopped while it generated"):
            await waiting
        with pytest.raises(RuntimeError, match="generates no more"):
            await ask(one, [1])

    run(story())


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_statistics_count_tokens_requests_and_time_once(engine, run):
    """Each export hands over what came since the last one."""
    one = engine()
    run(ask_all(one, [[1, 2], [3]]))
    first = one.do_stats()
    sums = {key: entry["sum"][0] * 2.0 ** entry["sum"][1] for key, entry in first.items()}

    assert sums["generate/prefill_tokens"] == 3
    assert sums["generate/decode_tokens"] == 22
    assert sums["generate/finish_length"] == 2
    assert sums["generate/decode_s"] > 0
    assert one.do_stats() == {}


def test_limits_that_let_nothing_run_are_refused_at_once(engine):
    """The error names the argument."""
    with pytest.raises(ConfigError, match="max_batch=0 lets nothing run"):
        engine(max_batch=0)


def test_token_ids_beyond_the_model_are_refused_before_they_reach_it(engine, run):
    """The error names the id and what the model knows, and concerns its caller alone."""
    one = engine()
    with pytest.raises(ValueError, match=r"token id 64, the model knows 0 to 63"):
        run(one.generate([1, 64, 2]))
    assert len(run(one.generate([1, 2], Sampling(max_tokens=3))).ids) == 3
