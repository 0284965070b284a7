"""A small decoder-only transformer: d=96, 2 layers, 4 heads, 239,040 parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every torch reader expects

from data import EOS, MAX_PHONEMES, PAD, SEP, VOCABULARY, WIDTH

__all__ = ["G2P", "greedy", "loss_sum", "targets"]


class Block(nn.Module):
    """Attention and a feed-forward part, each normalised before and added after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cache: Any = None, layer: int = 0) -> Tensor:
        """Map ``[batch, seq, width]`` to the same shape; a place sees itself and what is left of it."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if cache is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = cache.attend(layer, query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm_feed(x))


class G2P(nn.Module):
    """Next-token model over letters and phonemes. Rows are padded on the right, which causal attention never sees."""

    max_length = WIDTH

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(WIDTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Map tokens ``[batch, seq]`` int64 to logits ``[batch, seq, VOCABULARY]``.

        Args:
            tokens: Whole rows; with a cache, what follows the tokens that it has seen.
            cache: Keys and values of earlier tokens, as a generation engine hands it in.
        """
        places = self.place.weight[: tokens.shape[1]] if cache is None else self.place(cache.positions)
        x = self.token(tokens) + places
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def targets(tokens: Tensor) -> Tensor:
    """Return ``[batch, seq - 1]``: the next token where it is a phoneme or EOS of the answer, PAD elsewhere."""
    answer = (tokens == SEP).cumsum(1)[:, :-1] > 0
    return torch.where(answer, tokens[:, 1:], PAD)


def loss_sum(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the summed cross entropy (nats) of the answers; divide by the number of their tokens for the mean."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets(tokens).flatten(), ignore_index=PAD, reduction="sum")


@torch.no_grad()
def greedy(model: nn.Module, tokens: Tensor) -> Tensor:
    """Answer each row of ``[batch, seq]`` with the likeliest next token until EOS.

    Returns:
        ``[batch, WIDTH]``: the given letters and SEP, the answer, PAD after its EOS.
    """
    rows = torch.arange(len(tokens))
    seen = (tokens == SEP).cumsum(1)
    prompt = torch.where((seen == 0) | (tokens == SEP), tokens, PAD)
    text = F.pad(prompt, (0, WIDTH - tokens.shape[1]), value=PAD)
    place = (tokens == SEP).int().argmax(1)
    alive = torch.ones(len(tokens), dtype=torch.bool)
    for _ in range(MAX_PHONEMES + 1):
        longest = int(place.max()) + 1 if len(tokens) else 1
        choice = model(text[:, :longest])[rows, place].argmax(-1)
        place = (place + 1).clamp(max=WIDTH - 1)
        text[rows[alive], place[alive]] = choice[alive]
        alive = alive & (choice != EOS)
        if not alive.any():
            break
    return text
