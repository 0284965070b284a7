import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(1))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


def weighted(model, batch, power: float = 1.0):
    """Cross entropy of each row, weighed by its reward."""
    tokens, mask = batch["input_ids"], batch["attention_mask"][:, 1:]
    logs = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    weight = batch["reward"][:, None] ** power * mask
    return (
        -(logs * weight).sum(),
        weight.sum(),
        {"nats": -(logs * weight).sum().detach(), "longest": ("max", tokens.shape[1])},
    )
