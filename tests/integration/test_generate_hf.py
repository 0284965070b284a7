from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from waiting import scaled
from workers.engines.generate import TorchRolloutEngine
from zbus.engine import Mesh
from zbus.errors import ConfigError
from zbus.rl import Completion, Sampling
from zbus.runtime.context import Context

torch = pytest.importorskip("torch", reason="generation is on torch: install zbus-runtime[torch]")
transformers = pytest.importorskip("transformers", reason="models of Hugging Face: install zbus-runtime[hf]")

pytestmark = [pytest.mark.ci, pytest.mark.timeout(scaled(300))]

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def _qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True))


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def _gpt2() -> Any:
    sizes = {"vocab_size": 320, "n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=0))


def _mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=16))


def directory(root: Path, make: Callable[[], Any]) -> Path:
    """Write a tiny model, random but lively, and return its directory."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(root)
    return root


def engine_of(path: Path, **kwargs: Any) -> TorchRolloutEngine:
    """Return an engine that is set up."""
    made = TorchRolloutEngine({"hf": str(path)}, **{"dtype": "float64", **kwargs})
    made.setup(Context(role="rollout", rank=0, world_size=1, mesh=Mesh({"dp": 1})))
    return made


@pytest.mark.parametrize("make", [_qwen2, _llama, _gpt2])
def test_greedy_answers_are_those_of_generate(tmp_path: Path, make: Callable[[], Any]):
    """Rows that come, go and are filled up on the left get the tokens that the model's own generate gives alone."""
    engine = engine_of(directory(tmp_path, make), max_batch=5)
    chance = np.random.default_rng(0)
    prompts = [chance.integers(1, 320, 1 + 3 * number % 31).tolist() for number in range(16)]
    limits = [3 + number % 9 for number in range(16)]

    async def all_at_once() -> list[Completion]:
        asked = zip(prompts, limits, strict=True)
        return await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=n, temperature=0)) for p, n in asked))

    try:
        answers = asyncio.run(asyncio.wait_for(all_at_once(), scaled(60)))
        for prompt, limit, answer in zip(prompts, limits, answers, strict=True):
            with torch.inference_mode():
                text = engine.model.generate(torch.tensor([prompt]), max_new_tokens=limit, do_sample=False)[0]
                ahead = torch.log_softmax(engine.model(text[None]).logits[0], -1)
            own = text[len(prompt) :]
            expected = ahead[len(prompt) - 1 : -1].gather(1, own[:, None])[:, 0]
            assert answer.ids.tolist() == own.tolist()
            np.testing.assert_allclose(answer.logprobs, expected.numpy().astype(np.float32), atol=1e-6)
            assert answer.finish == ("stop" if own[-1] == 0 else "length")
        assert len({tuple(answer.ids.tolist()) for answer in answers}) > 8, "the model is not lively"
    finally:
        engine.teardown()


def test_a_model_with_a_sliding_window_is_refused_with_what_it_keeps(tmp_path: Path):
    """Nothing is generated wrong in silence."""
    with pytest.raises(ConfigError, match="MistralForCausalLM keeps DynamicSlidingWindowLayer"):
        engine_of(directory(tmp_path, _mistral))


def test_the_length_of_a_model_bounds_an_answer(tmp_path: Path):
    """Its max_position_embeddings is the most that prompt and answer have together."""
    engine = engine_of(directory(tmp_path, _llama))
    try:
        answer = asyncio.run(engine.generate([5] * 510, Sampling(max_tokens=9, ignore_eos=True)))
        assert (len(answer.ids), answer.finish) == (2, "length")
    finally:
        engine.teardown()
