from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from workers.engines.losses import GRPO, grpo, sft, token_logprobs  # noqa: E402  # needs torch


class Table(torch.nn.Module):
    """Logits that depend on the current token alone, so that every probability is known."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def forward(self, tokens):
        return self.logits[tokens]


P = [[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]]


@pytest.fixture
def model():
    """A model whose next-token probabilities are the rows of ``P``."""
    return Table([[math.log(p) for p in row] for row in P])


def columns(**more):
    """Two rows: 0→1→2 whose last two are learned, and 2→0 (padded) whose second is."""
    mask = torch.tensor([[1, 1, 1], [0, 1, 0]])
    return {"input_ids": torch.tensor([[0, 1, 2], [2, 0, 0]]), "loss_mask": mask, **more}


def test_each_token_has_the_probability_that_the_place_before_it_gave_it(model):
    """The first place counts 0 and the entropy is of the distribution that the token was drawn from."""
    logs, entropy = token_logprobs(model, columns())
    torch.testing.assert_close(logs[0], torch.tensor([0, math.log(P[0][1]), math.log(P[1][2])], dtype=torch.float64))
    assert entropy[1, 1].item() == pytest.approx(-sum(p * math.log(p) for p in P[2]))


def test_supervised_loss_is_summed_over_the_masked_tokens(model):
    """The sum of -log p where the mask is true, never at the first place, whatever ``tokens`` are called."""
    found = sft(model, columns())
    right = -math.log(P[0][1]) - math.log(P[1][2]) - math.log(P[2][0])
    assert (found.loss.item(), found.weight.item()) == (pytest.approx(right), 3)
    renamed = columns()
    renamed["tokens"] = renamed.pop("input_ids")
    assert sft(model, renamed).loss.item() == pytest.approx(right)


class Masked(Table):
    """As ``Table``, for tokens that the mask it is given counts; all others make every token as likely."""

    def forward(self, tokens, attention_mask=None):
        return self.logits[tokens] * attention_mask[:, :, None]


def test_a_model_that_takes_an_attention_mask_is_given_the_batch_s():
    """Padding that the batch names is named to the model; a model that takes no mask is given none."""
    model = Masked([[math.log(p) for p in row] for row in P])
    batch = columns(attention_mask=torch.tensor([[0, 1, 1], [1, 1, 0]]))
    logs, _ = token_logprobs(model, batch)
    assert logs[0].tolist() == [0, pytest.approx(math.log(1 / 3)), pytest.approx(math.log(P[1][2]))]
    assert sft(model, batch).loss.item() == pytest.approx(-logs[0].sum().item() - math.log(P[2][0]))
    assert token_logprobs(Table(P), batch)[0].shape == (2, 3)


def test_portions_add_up_to_the_whole(model):
    """Loss, weight and statistics of the rows one by one sum to those of all: how they are shared does not matter."""
    more = {"logprobs": torch.full((2, 3), -1.0), "advantages": torch.tensor([0.5, -2.0])}
    whole = grpo(model, columns(**more))
    parts = [grpo(model, {name: value[row : row + 1] for name, value in columns(**more).items()}) for row in (0, 1)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item())
    assert sum(part.weight.item() for part in parts) == whole.weight.item()
    for name, value in whole.stats.items():
        assert sum(part.stats[name].item() for part in parts) == pytest.approx(value.item()), name


def test_on_the_generating_policy_the_gradient_is_that_of_the_plain_policy_gradient(model):
    """At ratio 1 nothing is clipped, the loss is minus the advantages, its gradient that of advantage times log p."""
    logs, _ = token_logprobs(model, columns())
    advantages = torch.tensor([1.5, -0.5], dtype=torch.float64)
    found = grpo(model, columns(logprobs=logs.detach(), advantages=advantages))
    assert found.loss.item() == pytest.approx(-(2 * 1.5 - 0.5))
    assert (found.stats["clipped"].item(), found.stats["drift"].item()) == (0, pytest.approx(0))
    found.loss.backward()
    own = model.logits.grad.clone()
    model.logits.grad = None
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    (-(token_logprobs(model, columns())[0] * advantages[:, None] * mask).sum()).backward()
    torch.testing.assert_close(own, model.logits.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped", "flows"),
    [
        (1.5, 1.0, True, False),
        (0.5, 1.0, False, True),
        (1.5, -1.0, False, True),
        (0.5, -1.0, True, False),
        (1.1, 1, False, True),
    ],
)
def test_the_ratio_counts_only_within_its_bounds(model, ratio, advantage, clipped, flows):
    """Beyond the bound no gradient flows where moving further would be rewarded, and it does where it is not."""
    logs, _ = token_logprobs(model, columns())
    old = logs.detach() - math.log(ratio)
    batch = columns(logprobs=old, advantages=torch.tensor([advantage] * 2, dtype=torch.float64))
    found = grpo(model, batch)
    found.loss.backward()
    assert (found.stats["clipped"].item() > 0) == clipped
    assert bool(model.logits.grad.abs().max() > 1e-12) == flows
    bound = min(max(ratio, 0.8), 1.2)
    assert found.loss.item() == pytest.approx(-3 * min(ratio * advantage, bound * advantage))


def test_leaving_the_reference_costs_as_declared(model):
    """The price is ``kl`` times exp(d) - 1 - d per token, 0 on the reference itself; without a price none is needed."""
    logs, _ = token_logprobs(model, columns())
    more = {"logprobs": logs.detach(), "advantages": torch.zeros(2, dtype=torch.float64)}
    same = GRPO(kl=0.5)(model, columns(**more, ref_logprobs=logs.detach()))
    away = GRPO(kl=0.5)(model, columns(**more, ref_logprobs=logs.detach() + 0.3))
    assert same.stats["kl"].item() == pytest.approx(0)
    assert away.loss.item() == pytest.approx(0.5 * 3 * (math.exp(0.3) - 1 - 0.3))
    with pytest.raises(KeyError, match="ref_logprobs"):
        GRPO(kl=0.5)(model, columns(**more))


def test_what_is_not_generated_may_hold_anything(model):
    """NaN and infinities outside the mask reach neither loss nor gradient."""
    logs, _ = token_logprobs(model, columns())
    old = logs.detach().clone()
    old[:, 0], old[1, 2] = math.nan, math.inf
    found = grpo(model, columns(logprobs=old, advantages=torch.ones(2, dtype=torch.float64)))
    found.loss.backward()
    assert math.isfinite(found.loss.item())
    assert torch.isfinite(model.logits.grad).all()
    assert all(math.isfinite(value.item()) for value in found.stats.values())


def test_words_that_the_model_rules_out_leave_losses_and_entropy_finite(model):
    """A logit of -inf is a probability of 0: it adds nothing to the entropy, and its gradient is 0."""
    with torch.no_grad():
        model.logits[:, 0] = -math.inf
    batch = columns(logprobs=torch.full((2, 3), -1.0), advantages=torch.tensor([1.0, -1.0]))
    batch["input_ids"] = torch.tensor([[1, 2, 1], [2, 1, 0]])
    for loss in (grpo, GRPO(entropy=0.1), sft):
        model.logits.grad = None
        found = loss(model, batch)
        found.loss.backward()
        assert all(math.isfinite(value.item()) for value in (found.loss, *found.stats.values()))
        assert model.logits.grad.isfinite().all()
        assert not model.logits.grad[:, 0].any()
