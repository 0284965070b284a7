"""The model that pages on reinforcement learning name: tiny, causal, with a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every torch reader expects


class Policy(nn.Module):
    """One layer of attention over 64 places."""

    max_length = 64

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(100, width), nn.Embedding(64, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, 100)

    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Map tokens to logits."""
        places = torch.arange(tokens.shape[1]) if cache is None else cache.positions
        x = self.token(tokens) + self.place(places)
        query, key, value = self.qkv(x)[:, None].chunk(3, -1)
        if cache is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = cache.attend(0, query, key, value)
        logits: Tensor = self.head(x + mixed[:, 0])
        return logits
