from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType

import pytest

from waiting import scaled
from zbus.engine import Mesh
from zbus.rl import Sampling
from zbus.runtime.context import Context

torch = pytest.importorskip("torch", reason="generation is on torch: install zbus-runtime[torch]")

MODEL = Path(__file__).resolve().parents[3] / "examples" / "g2p" / "model.py"


def test_the_generation_engine_spells_as_the_models_own_greedy_decoding(data: ModuleType, words):
    """With the cache and all words at once, each answer is what greedy gives with neither."""
    from workers.engines.generate import TorchRolloutEngine

    engine = TorchRolloutEngine(f"{MODEL}:G2P", dtype="float64", eos=data.EOS, seed=3)
    engine.setup(Context(role="rollout", rank=0, world_size=1, mesh=Mesh({"dp": 1})))
    import model

    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(3)  # far from uniform, so that answers differ and end
    rows = torch.from_numpy(words[1].tokens[:200].astype("int64"))
    prompts = [row[: row.index(data.SEP) + 1] for row in rows.tolist()]

    async def spell() -> list[list[int]]:
        sampling = Sampling(max_tokens=data.MAX_PHONEMES + 1, temperature=0)
        answers = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
        return [answer.ids.tolist() for answer in answers]

    try:
        spelt = asyncio.run(asyncio.wait_for(spell(), scaled(60)))
    finally:
        engine.teardown()
    for prompt, answer, text in zip(prompts, spelt, model.greedy(engine.model, rows).tolist(), strict=True):
        assert [*prompt, *answer] == text[: len(prompt) + len(answer)]
        assert answer[-1] == data.EOS or len(answer) == data.MAX_PHONEMES + 1
    assert len(set(map(tuple, spelt))) > 20
