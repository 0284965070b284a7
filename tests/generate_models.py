"""Small models for the tests of generation."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY = 23


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, shared * self.size)
        self.value = nn.Linear(width, shared * self.size)

    def parts(self, x: Tensor) -> list[Tensor]:
        shape = (*x.shape[:2], -1, self.size)
        return [part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value)]


class Cached(nn.Module):
    """A causal model with a cache, grouped heads and places; weights large enough that prompts matter."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 4, shared: int = 2, places: int = 64) -> None:
        super().__init__()
        self.max_length = places
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(places, width)
        self.attentions = nn.ModuleList(_Attention(width, heads, shared) for _ in range(layers))
        self.feeds = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        places = torch.arange(tokens.shape[1]) if cache is None else cache.positions
        x = self.token(tokens) + self.place(places)
        for layer, (attention, feed) in enumerate(zip(self.attentions, self.feeds, strict=True)):
            query, key, value = attention.parts(x)
            if cache is None:
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            else:
                mixed = cache.attend(layer, query, key, value)
            x = x + mixed.transpose(1, 2).flatten(2)
            x = x + torch.tanh(feed(x))
        return 3 * self.head(x)


class Plain(Cached):
    """The same without a cache."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens)


class Held(Cached):
    """Stands still in a step until it is let go, wherever a test says so."""

    hold_at = 0
    steps = 0
    held = threading.Event()
    go = threading.Event()

    @classmethod
    def hold(cls, step: int) -> None:
        """Stand still in this step from now on, from 1; 0: in none."""
        cls.hold_at, cls.steps = step, 0
        cls.held.clear()
        cls.go.clear()

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        Held.steps += 1
        if Held.steps == Held.hold_at:
            self.held.set()
            self.go.wait()
        return super().forward(tokens, cache)


class Picky(Cached):
    """Breaks where a row holds token 13, and makes no numbers of token 17."""

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        if (tokens == 13).any():
            raise RuntimeError("token 13 is bad luck")
        logits = super().forward(tokens, cache)
        return torch.where((tokens == 17).any(1)[:, None, None], torch.nan, logits)


class Lame(Cached):
    """Computes prompts, and fails at every token after."""

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        if tokens.shape[1] == 1:
            raise RuntimeError("no legs")
        return super().forward(tokens, cache)


class Fatal(Cached):
    """A model that ends the thread it runs on when it sees token 22."""

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        if (tokens == VOCABULARY - 1).any():
            raise SystemExit("token 22")
        return super().forward(tokens, cache)
