from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.engines.generate.sampling import Sampler, uniforms
from zbus.rl.generation import Sampling
from zbus.rl.seeds import sub_seed

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]], dtype=torch.float64)


def _counts(sampling: Sampling, draws: int = 20_000) -> np.ndarray:
    """Return how often each token is drawn, with many seeds."""
    sampler = Sampler([sampling] * draws, range(draws), (), "cpu")
    tokens, _ = sampler(LOGITS.expand(draws, -1), [0] * draws)
    return np.bincount(tokens, minlength=LOGITS.shape[1]) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_by_their_chance(temperature):
    """Over many seeds, each token comes as often as softmax(logits / temperature) says."""
    expected = torch.softmax(LOGITS[0] / temperature, -1).numpy()
    np.testing.assert_allclose(_counts(Sampling(temperature=temperature)), expected, atol=0.012)


def test_top_k_leaves_the_likeliest_in_their_proportions():
    """With top_k=2 only the two likeliest come, each by its share of the two."""
    kept = torch.softmax(LOGITS[0, :2], -1).tolist()
    np.testing.assert_allclose(_counts(Sampling(top_k=2)), [*kept, 0, 0, 0], atol=0.012)


@pytest.mark.parametrize(("top_p", "left"), [(0.1, 1), (0.63, 1), (0.65, 2), (0.88, 3), (0.999999, 5)])
def test_top_p_leaves_the_least_that_make_up_the_share(top_p, left):
    """The likeliest tokens stay until their sum reaches top_p, the one that reaches it included."""
    assert np.count_nonzero(_counts(Sampling(top_p=top_p))) == left


def test_top_k_and_top_p_together_count_the_share_among_what_top_k_left():
    """Of the three likeliest, two make up 0.9 of the three."""
    assert np.count_nonzero(_counts(Sampling(top_k=3, top_p=0.9))) == 2


def test_of_equally_likely_tokens_the_first_stay():
    """Cuts do not depend on the order in which a sort leaves equals."""
    sampler = Sampler([Sampling(top_k=2)] * 500, range(500), (), "cpu")
    tokens, _ = sampler(torch.zeros(500, 9), [0] * 500)
    assert set(tokens) == {0, 1}


def test_each_row_samples_by_its_own_parameters_and_seed_alone():
    """A row's token is the same alone and among rows with other parameters."""
    rows = [
        Sampling(temperature=0),
        Sampling(temperature=0.7),
        Sampling(top_k=3),
        Sampling(top_p=0.5),
        Sampling(temperature=3.0, top_k=4, top_p=0.8),
        Sampling(min_tokens=9),
    ] * 20
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = [row % 7 for row in range(len(rows))]

    together = Sampler(rows, range(len(rows)), (3,), "cpu")(logits, made)
    alone = [Sampler([r], [n], (3,), "cpu")(logits[n : n + 1], made[n : n + 1]) for n, r in enumerate(rows)]

    assert together[0] == [tokens[0] for tokens, _ in alone]
    assert together[1] == pytest.approx([logprobs[0] for _, logprobs in alone], abs=1e-12)


def test_the_likeliest_token_is_taken_at_temperature_zero():
    """Temperature 0 draws nothing, also beside rows that do."""
    tokens, _ = Sampler([Sampling(temperature=0), Sampling()], [0, 1], (), "cpu")(LOGITS.expand(2, -1), [0, 0])
    assert tokens[0] == 0


def test_log_probabilities_are_the_models_own():
    """Temperature, cuts and forbidden tokens change what is drawn, not what is reported."""
    rows = [Sampling(temperature=0.2), Sampling(top_k=1), Sampling(min_tokens=5, temperature=0)]
    tokens, logprobs = Sampler(rows, [1, 2, 3], (0,), "cpu")(LOGITS.expand(3, -1), [0, 0, 0])
    expected = torch.log_softmax(LOGITS[0], -1)
    assert tokens[2] == 1  # 0 would end it too early
    assert logprobs == pytest.approx([expected[token].item() for token in tokens], abs=1e-12)


def test_end_tokens_do_not_come_before_min_tokens():
    """They are not even drawn below min_tokens, are from there on, and at any time where they end nothing."""
    rows = [Sampling(min_tokens=2, temperature=0), Sampling(min_tokens=2, temperature=0, ignore_eos=True)]
    sampler = Sampler(rows, [1, 2], (0, 1), "cpu")
    assert [sampler(LOGITS.expand(2, -1), [made, made])[0] for made in range(3)] == [[2, 0], [2, 0], [0, 0]]


def test_half_precision_logits_are_judged_in_single():
    """Log-probabilities of a bfloat16 model are sums in float32."""
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, logprobs = Sampler([Sampling(temperature=0)], [0], (), "cpu")(logits, [0])
    assert logprobs[0] == pytest.approx(torch.log_softmax(logits.double(), -1)[0, tokens[0]].item(), abs=1e-5)


def test_chances_are_even_and_independent_of_their_neighbours():
    """Numbers of neighbouring seeds and places are uniform in [0, 1) and not correlated."""
    count = 200_000
    by_seed = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64))
    by_place = uniforms(np.full(count, 7, np.uint64), np.arange(count, dtype=np.uint64))
    for numbers in (by_seed, by_place):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        filled = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert np.square(filled - count / 100).sum() / (count / 100) < 160  # chi square, 99 degrees of freedom
        for lag in (1, 2, 3):
            assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 0.01


def test_answers_to_one_prompt_have_seeds_of_their_own():
    """Answer 0 keeps the seed; others differ from each other and from those of the next seed."""
    assert sub_seed(5, 0) == 5
    seeds = [sub_seed(seed, number) for seed in range(50) for number in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
