"""From logits to tokens: each row by its own parameters and its own chance, whatever rows stand beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zbus.rl.generation import Sampling
from zbus.rl.seeds import mix

__all__ = ["Sampler", "uniforms"]

_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)


def uniforms(seeds: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), a function of seed and place alone: nothing has to be remembered between two tokens."""
    with np.errstate(over="ignore"):
        mixed = mix(mix(seeds) + _GOLDEN * (places + np.uint64(1)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Sampler:
    """Chooses the next token of each of several rows.

    Args:
        rows: How each row samples.
        seeds: Of each row's chance.
        eos: Tokens that end an answer: a row below its ``min_tokens`` does not choose them.
        device: Where the logits are.
    """

    def __init__(self, rows: Sequence[Sampling], seeds: Sequence[int], eos: Sequence[int], device: str) -> None:
        self._device = device
        self._seeds = np.array([seed % 2**64 for seed in seeds], np.uint64)
        hot = [row.temperature if row.temperature > 0 else 1.0 for row in rows]
        self._temperature = torch.tensor(hot, dtype=torch.float64, device=device)
        self._greedy = torch.tensor([row.temperature == 0 for row in rows], device=device)
        self._all_greedy = all(row.temperature == 0 for row in rows)
        cut = [number for number, row in enumerate(rows) if row.temperature > 0 and (row.top_k or row.top_p < 1)]
        self._cut = torch.tensor(cut, dtype=torch.int64, device=device) if cut else None
        self._top_k = torch.tensor([rows[number].top_k for number in cut], device=device)
        self._top_p = torch.tensor([rows[number].top_p for number in cut], dtype=torch.float64, device=device)
        self._eos = torch.tensor(list(eos), dtype=torch.int64, device=device)
        self._least = [0 if row.ignore_eos or not eos else row.min_tokens for row in rows]
        self._any_least = max(self._least, default=0)

    def __call__(self, logits: Tensor, made: Sequence[int]) -> tuple[list[int], list[float]]:
        """Choose.

        Args:
            logits: ``[rows, vocabulary]``.
            made: Tokens that each row's answer has so far.

        Returns:
            The tokens, and of each the logarithm of the probability that the model itself gives it.
        """
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        offered = self._without_eos(logits, made)
        choice = offered.argmax(-1)
        if not self._all_greedy:
            choice = torch.where(self._greedy, choice, self._drawn(offered, made))
        logprobs = logits.gather(1, choice[:, None])[:, 0] - logits.logsumexp(-1)
        return choice.tolist(), logprobs.tolist()

    def _without_eos(self, logits: Tensor, made: Sequence[int]) -> Tensor:
        if not self._any_least:
            return logits
        early = [row for row, (count, least) in enumerate(zip(made, self._least, strict=True)) if count < least]
        if not early:
            return logits
        offered = logits.clone()
        offered[torch.tensor(early, device=self._device)[:, None], self._eos] = float("-inf")
        return offered

    def _drawn(self, logits: Tensor, made: Sequence[int]) -> Tensor:
        chances = torch.softmax(logits.double() / self._temperature[:, None], -1)
        if self._cut is not None:
            chances[self._cut] = self._cut_off(chances[self._cut])
        sums = chances.cumsum(-1)
        draws = torch.from_numpy(uniforms(self._seeds, np.array(made, np.uint64))).to(self._device)
        # The first token whose sum exceeds the draw: one of chance zero adds nothing to its sum, so it is never it.
        return torch.searchsorted(sums, (draws * sums[:, -1])[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)

    def _cut_off(self, chances: Tensor) -> Tensor:
        """Leave the ``top_k`` likeliest and of these the likeliest that make up ``top_p``; of equals the first."""
        ordered, order = torch.sort(chances, dim=-1, descending=True, stable=True)
        rank = torch.arange(chances.shape[1], device=self._device)
        most = torch.where(self._top_k > 0, self._top_k, chances.shape[1])[:, None]
        ordered = ordered.masked_fill(rank >= most, 0.0)
        before = ordered.cumsum(-1) - ordered
        share = torch.where(self._top_p < 1, self._top_p, torch.inf)[:, None] * ordered.sum(-1, keepdim=True)
        ordered = ordered.masked_fill(before >= share, 0.0)
        return torch.zeros_like(chances).scatter(1, order, ordered)
