from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import scaled

pytestmark = [pytest.mark.ci, pytest.mark.alone, pytest.mark.timeout(scaled(400))]

transformers = pytest.importorskip("transformers", reason="Hugging Face models: install zbus-runtime[hf]")

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")


def write_model(path: Path) -> None:
    """Make a tiny causal model with a tokenizer of bytes, and write both as they are published."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["one plus two is three"],
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, special_tokens=["<end>"]),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=0,
            pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def test_three_roles_learn_on_a_hugging_face_model_by_their_directory(tmp_path: Path):
    """The config with shared specs runs as it stands: FSDP2 actor, frozen reference, generation, episodes, traces."""
    write_model(tmp_path / "model")
    questions = [
        {"question": f"{WORDS[a]} plus {WORDS[b]} is", "answer": WORDS[a + b]} for a in range(5) for b in range(4)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    command = [
        *(Path(sys.executable).with_name("zbus-controller"), "run", "--json", ROOT / "examples/hf_grpo/grpo.yaml"),
        *("params.steps=4", "params.batch=4"),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=scaled(390)
    )
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    found = json.loads(done.stdout)
    rows = [json.loads(line) for line in (Path(found["trial_dir"]) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)  # the actor is the reference before its first step
    assert rows[-1]["kl"] > 0
    assert max(row["staleness"] for row in rows) <= 2
    traces = Path(found["trial_dir"]) / "traces"
    for role in ("actor", "ref", "rollout"):
        assert (traces / role / "traces_0.jsonl").is_file()
