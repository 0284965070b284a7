from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from waiting import scaled

torch = pytest.importorskip("torch", reason="the example trains with torch: install zbus-runtime[torch]")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


G2P = Path(__file__).resolve().parents[3] / "examples" / "g2p"


@pytest.fixture
def trainer_class():
    """Give the example's ``Trainer``."""
    from training import Trainer

    return Trainer


def _weights(trainer) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).numpy()


def _mean(scores) -> float:
    return scores["loss_sum"] / scores["tokens"]


def test_the_model_has_the_stated_size(trainer_class):
    """The README's number of parameters is the model's."""
    assert sum(p.numel() for p in trainer_class().model.parameters()) == 239_040


def test_a_place_sees_nothing_to_its_right(words):
    """Changing later tokens, padding included, changes no earlier logits."""
    from model import G2P

    tokens = torch.from_numpy(words[0].take(slice(0, 4))["tokens"].astype(np.int64))
    changed = tokens.clone()
    changed[:, 8:] = 5
    model = G2P()

    assert torch.equal(model(tokens)[:, :8], model(changed)[:, :8])


def test_only_the_answer_is_learnt(data):
    """Targets are the phonemes and EOS; letters, SEP and padding count nothing."""
    from model import targets

    row = data.encode("CAT", ["K", "AE", "T"])
    tokens = torch.tensor([[*row, data.PAD, data.PAD]])

    assert [t for t in targets(tokens)[0].tolist() if t != data.PAD] == row[4:]


def test_greedy_answers_within_the_width_and_stops_at_the_end(words, data):
    """A decoded row keeps its letters, never exceeds WIDTH, and is padding after its EOS."""
    from model import G2P, greedy

    tokens = torch.from_numpy(words[1].take(slice(0, 50))["tokens"].astype(np.int64))
    answer = greedy(G2P(), tokens)

    letters = (tokens == data.SEP).cumsum(1) == 0
    assert answer.shape == (50, data.WIDTH)
    assert torch.equal(answer[:, : tokens.shape[1]][letters], tokens[letters])
    for row in answer.tolist():
        if data.EOS in row:
            assert not any(row[row.index(data.EOS) + 1 :])


def test_greedy_does_not_see_the_answer(words):
    """Decoding depends on the letters alone: scrambling the given answer changes nothing."""
    from model import G2P, greedy

    tokens = torch.from_numpy(words[1].take(slice(0, 20))["tokens"].astype(np.int64))
    scrambled = tokens.clone()
    after = (tokens == 2).cumsum(1) - (tokens == 2).int() > 0
    scrambled[after] = 7
    model = G2P()

    assert torch.equal(greedy(model, tokens), greedy(model, scrambled))


def test_the_loss_falls(words, trainer_class):
    """Forty steps bring the held-out loss from ignorance (about 4.4) well below 3."""
    training, heldout = words
    trainer, exam = trainer_class(), heldout.take(slice(0, 200))

    before = _mean(trainer.evaluate(exam, decode=False))
    for step in range(40):
        trainer.train(training.batch(step, 64, 0), step, 0.003)

    assert before == pytest.approx(4.4, abs=0.2)
    assert _mean(trainer.evaluate(exam, decode=False)) < 2.6


def test_a_resumed_run_equals_an_uninterrupted_one(words, trainer_class, tmp_path: Path):
    """Six steps, and three, a checkpoint, a fresh process's trainer and three more, end in the same weights."""
    training, _ = words
    whole, first, second = (trainer_class(seed=seed, dtype=torch.float64) for seed in (0, 0, 99))
    path = tmp_path / "sub" / "step-000003.npz"

    for step in range(6):
        whole.train(training.batch(step, 16, 0), step, 0.002)
    for step in range(3):
        first.train(training.batch(step, 16, 0), step, 0.002)
    first.save(path)
    assert second.load(path) == 3
    for step in range(3, 6):
        second.train(training.batch(step, 16, 0), step, 0.002)

    assert np.array_equal(_weights(whole), _weights(second))


def test_a_checkpoint_of_an_untrained_model_can_be_taken_over(trainer_class, tmp_path: Path):
    """Step 0 is a checkpoint like any other."""
    trainer, other = trainer_class(seed=1), trainer_class(seed=2)

    trainer.save(tmp_path / "zero.npz")

    assert other.load(tmp_path / "zero.npz") == 0
    assert np.array_equal(_weights(trainer), _weights(other))


def test_a_failed_save_leaves_the_old_checkpoint_and_no_debris(trainer_class, tmp_path: Path, monkeypatch):
    """A disk that fills during a save costs that save only."""
    trainer, path = trainer_class(), tmp_path / "step-000000.npz"
    trainer.save(path)
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(path)

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_foreign_file_is_refused_and_changes_nothing(trainer_class, tmp_path: Path):
    """Arrays of another model are named as such and never half taken over."""
    trainer, path = trainer_class(), tmp_path / "other.npz"
    np.savez(path, weight=np.zeros(3))
    before = _weights(trainer).copy()

    with pytest.raises(ValueError, match=r"other\.npz is not a checkpoint of this model"):
        trainer.load(path)

    assert np.array_equal(_weights(trainer), before)


def test_a_step_lost_or_repeated_is_refused(words, trainer_class):
    """A step runs exactly once: its number must be the next one."""
    trainer, batch = trainer_class(), words[0].batch(0, 8, 0)
    trainer.train(batch, 0, 0.001)

    with pytest.raises(ValueError, match="asked for step 0 with 1 steps taken"):
        trainer.train(batch, 0, 0.001)
    with pytest.raises(ValueError, match="asked for step 2 with 1 steps taken"):
        trainer.train(batch, 2, 0.001)


RANK = """
import sys

rank, example, store, out = int(sys.argv[1]), *sys.argv[2:]
sys.path.insert(0, example)

import data
import numpy as np
import torch
import torch.distributed as dist
from training import Trainer

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
words, _ = data.load()
trainer = Trainer(dtype=torch.float64)
for step in range(3):
    whole = words.batch(step, 12, 0)
    cut = 0 if step == 1 else 1
    rows = (slice(0, cut), slice(cut, 12))[rank]
    trainer.train({name: column[rows] for name, column in whole.items()}, step, 0.002)
np.save(out, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).numpy())
dist.destroy_process_group()
"""


@pytest.mark.timeout(scaled(240))
def test_uneven_and_empty_shares_give_the_single_process_result(words, trainer_class, tmp_path: Path):
    """Two ranks with 1 and 11 words, even 0 and 12, end in the weights of one rank with all 12 (float64)."""
    training, _ = words
    single = trainer_class(dtype=torch.float64)
    for step in range(3):
        single.train(training.batch(step, 12, 0), step, 0.002)
    outs = [tmp_path / f"rank{rank}.npy" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(G2P), str(tmp_path / "store"), str(out)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, out in enumerate(outs)
    ]
    try:
        codes = [process.wait(scaled(200)) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()

    assert codes == [0, 0]
    for out in outs:
        np.testing.assert_allclose(np.load(out), _weights(single), rtol=0, atol=1e-10)
