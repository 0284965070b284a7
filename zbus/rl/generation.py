"""What is asked of a generation engine and what it answers: sampling parameters, completions, versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from zbus.codec import register, register_exception
from zbus.errors import ConfigError, RewardError

__all__ = ["Completion", "Episode", "Finish", "Sampling", "VersionSpan"]

register_exception(RewardError)  # here, since whoever calls a rollout engine has this module

Finish = Literal["stop", "length", "abort"]
"""``stop``: an end token or a stop sequence; ``length``: a limit; ``abort``: cut off, what there was is kept."""


@register(tag="zbus.rl.Sampling")
@dataclass(frozen=True, slots=True)
class Sampling:
    """How to generate.

    Attributes:
        max_tokens: Most tokens of an answer.
        min_tokens: No end token and no stop sequence ends it before so many.
        temperature: Of the softmax; 0 takes the likeliest token.
        top_p: Tokens beyond this cumulative probability are left out; 1 keeps all.
        top_k: Only so many likeliest tokens; 0 keeps all.
        stop: Token sequences that end the answer; the sequence itself is part of it.
        ignore_eos: The model's own end tokens end nothing.
        seed: Makes this one answer a function of prompt, weights and seed; None: the engine's own generator.
    """

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no engine can do."""
        wrong = {
            "max_tokens": self.max_tokens < 1,
            "min_tokens": not 0 <= self.min_tokens <= self.max_tokens,
            "temperature": not self.temperature >= 0,  # NaN too
            "top_p": not 0 < self.top_p <= 1,
            "top_k": self.top_k < 0,
            "stop": not all(self.stop),
        }
        for name in (name for name, bad in wrong.items() if bad):
            msg = f"sampling: {name}={getattr(self, name)!r} cannot be"
            raise ConfigError(msg, hint="see zbus.rl.Sampling for what each parameter may be")


@register(tag="zbus.rl.VersionSpan")
class VersionSpan(NamedTuple):
    """Tokens ``start`` to ``end`` (excluded) of an answer were made by the weights of ``version``."""

    version: int
    start: int
    end: int


@register(tag="zbus.rl.Completion")
@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One answer.

    Attributes:
        ids: Its tokens, int64 ``[n]``, the end token included.
        logprobs: float32 ``[n]``: of each token by the model itself, ``log_softmax(logits)``, whatever the temperature.
        finish: Why it ended.
        versions: Which weights made which tokens, in order and without gaps; empty for an empty answer.
    """

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    finish: Finish
    versions: tuple[VersionSpan, ...] = ()

    @property
    def oldest(self) -> int | None:
        """The oldest version that made a token of it."""
        return min((span.version for span in self.versions), default=None)


@register(tag="zbus.rl.Episode")
class Episode(NamedTuple):
    """What one episode at a worker came to.

    Attributes:
        value: What the workflow returned; None: it rejects the episode.
        oldest: The version of the weights when it began; no token of it is older.
        newest: The version when it ended.
    """

    value: Any
    oldest: int
    newest: int
