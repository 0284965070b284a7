"""The generation engine on torch: one model, many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

import zbus
from workers.engines.models import build_model, check_model
from workers.engines.weights import Receiver, ReceivesWeights
from workers.engines.weights.tensors import tensors_of
from zbus.errors import ConfigError
from zbus.rl.generation import Completion, Sampling
from zbus.rl.rewards import RewardPool
from zbus.rl.rollout_engine import PauseMode, RolloutEngine
from zbus.rl.stats import Stats

if TYPE_CHECKING:
    from torch import nn

    from workers.engines.generate.decoder import Decoder
    from workers.engines.generate.requests import Answers, Request

__all__ = ["TorchRolloutEngine"]

log = logging.getLogger("zbus.generate")

_EXIT_DEAD: Final = 70
"""Exit code of a rank that can generate no more."""


class TorchRolloutEngine(ReceivesWeights, RolloutEngine):
    """Generates with a torch model, whose requests share each step; runs workflows, whose rewards run beside it.

    What the model may be: any causal one that maps tokens ``[batch, length]`` to logits; with a parameter ``cache`` in
    its ``forward`` it is not computed anew for each token (see ``workers.engines.generate.rows.Cache``); or a causal
    model of Hugging Face.

    Args:
        model: As ``workers.engines.models.build_model`` takes it.
        device: Of the model.
        dtype: Of the weights; None: as the model is made.
        max_batch: Most requests that run at once; more wait.
        max_tokens_total: Most places for tokens in all of them: requests that run, times the longest one's prompt and
            ``max_tokens``.
        max_prefill: Most places of one step that computes prompts.
        max_length: Most tokens of prompt and answer; None: the model's ``max_length`` or, of Hugging Face,
            ``max_position_embeddings``, if it has one.
        eos: Token or tokens that end an answer; None: those of a Hugging Face model, else none.
        seed: Of the weights that a factory makes, and of requests without a seed of their own.
        workflows: By name, as ``workers.engines.generate.episodes.load_workflow`` takes them.
        rewards: Functions by name, as ``zbus.rl.rewards.RewardPool`` takes them.
        reward_processes: Most processes that call them.
        reward_timeout_s: How long one call may take, in seconds, if the workflow does not say otherwise.

    Attributes:
        model: The model, once set up. Its weights are changed while paused, or while ``step_lock`` is held.
        step_lock: Held by the thread that computes, during each step.
        workflows: Those of a subclass; the argument adds to them.
        rewards: As ``workflows``.
    """

    workflows: ClassVar[Mapping[str, Any]] = {}
    rewards: ClassVar[Mapping[str, Any]] = {}

    model: nn.Module
    step_lock: threading.Lock

    def __init__(
        self,
        model: Any,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        max_batch: int = 256,
        max_tokens_total: int = 65_536,
        max_prefill: int = 8_192,
        max_length: int | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int = 0,
        workflows: Mapping[str, Any] | None = None,
        rewards: Mapping[str, Any] | None = None,
        reward_processes: int = 1,
        reward_timeout_s: float = 10.0,
    ) -> None:
        super().__init__()
        check_model(model)
        for name, value in (
            ("max_batch", max_batch),
            ("max_tokens_total", max_tokens_total),
            ("max_prefill", max_prefill),
        ):
            if value < 1:
                msg = f"{name}={value} lets nothing run"
                raise ConfigError(msg, hint="give at least 1, or leave it out")
        self._spec = model
        self._device = device
        self._dtype = dtype
        self._limits = max_batch, max_tokens_total, max_prefill
        self._max_length = max_length
        self._eos = eos
        self._seed = seed
        self._declared = {**self.workflows, **(workflows or {})}
        self._rewards = {**self.rewards, **(rewards or {})}
        self._reward_limits = reward_processes, reward_timeout_s
        self._pool: RewardPool | None = None
        self._offloaded = False
        self._stats = Stats()

    # -- life --------------------------------------------------------------------------------------------------------

    def setup(self, ctx: zbus.Context) -> None:
        """Build the model, load the workflows, start the thread that computes."""
        import torch

        from workers.engines.generate.decoder import Decoder
        from workers.engines.generate.episodes import Episodes, Handle, load_workflow
        from workers.engines.generate.rows import rows_of
        from workers.engines.generate.scheduler import Scheduler

        name = f"{ctx.role}/{ctx.rank}"
        self._name = name
        if self._rewards:  # its process starts meanwhile
            processes, timeout_s = self._reward_limits
            self._pool = RewardPool(self._rewards, processes=processes, timeout_s=timeout_s, name=name)
        torch.manual_seed(self._seed)
        self.model = build_model(self._spec, dtype=self._dtype, device=self._device).eval().requires_grad_(False)  # noqa: FBT003  # its only parameter
        self.receiver = Receiver(lambda: tensors_of(self.model))
        self._max_length = self._max_length or _longest(self.model)
        self._words = _words(self.model)
        self._chance = np.random.default_rng([self._seed, ctx.rank, ctx.start])
        self._decoder: Decoder = Decoder(
            rows_of(self.model, device=self._device, places=self._limits[1]),
            Scheduler(*self._limits),
            eos=_ends(self._eos, self.model),
            device=self._device,
            name=name,
            on_death=self._end_process if ctx.owns_process else None,
        )
        self.step_lock = self._decoder.step_lock
        self._episodes = Episodes(name, {key: load_workflow(key, spec) for key, spec in self._declared.items()})
        self._handle = Handle(self._answer, self._reward, lambda: self._version)
        if self._pool is not None:
            self._pool.wait_ready()
        self._decoder.start()
        gc.freeze()  # what is made and imported by now stays; a look at all of it would stop whoever generates

    def teardown(self) -> None:
        """End what ``setup`` started."""
        self._decoder.close()
        if self._pool is not None:
            self._pool.close()

    # -- generation --------------------------------------------------------------------------------------------------

    async def do_generate(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        """Answer one prompt."""
        [answer] = await self._answer(prompt, [sampling])
        return answer

    async def do_stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[tuple[int, float], None]:
        """Yield each token of an answer and its log-probability as they are made."""
        tokens: asyncio.Queue[tuple[int, float] | None] = asyncio.Queue()
        requests, answers = self._requests(prompt, [sampling], tokens)
        with self._asked(requests):
            while (item := await tokens.get()) is not None:
                yield item
            await answers.all

    async def do_episode(self, workflow: str, data: Any) -> Any:
        """Run one episode of a declared workflow."""
        return await self._episodes.run(workflow, self._handle, data)

    async def _answer(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[Completion]:
        """Answer one prompt once for each sampling; the first error ends all of them."""
        requests, answers = self._requests(prompt, samplings)
        with self._asked(requests):
            return await answers.all

    async def _reward(self, name: str, args: tuple[Any, ...], timeout_s: float | None) -> Any:
        if self._pool is None:
            msg = f"{self._name} has no reward {name!r}: its role declares none"
            raise ConfigError(
                msg, hint=f'declare it in the kwargs of the role: rewards={{"{name}": "file.py:function"}}'
            )
        return await self._pool.acall(name, *args, timeout_s=timeout_s)

    @contextlib.contextmanager
    def _asked(self, requests: Sequence[Request]) -> Iterator[None]:
        """Have requests answered inside; whoever leaves early gives them up."""
        try:
            self._decoder.submit(requests)
            yield
        finally:
            self._decoder.forget(requests)

    def _requests(
        self,
        prompt: Sequence[int],
        samplings: Sequence[Sampling],
        tokens: asyncio.Queue[tuple[int, float] | None] | None = None,
    ) -> tuple[list[Request], Answers]:
        """Check what is asked, and make a request for each sampling.

        Raises:
            ValueError: The prompt is empty, is no list of token ids, or leaves no room for an answer.
        """
        from workers.engines.generate.requests import Answers, Request

        try:
            ids = np.asarray(prompt)
        except ValueError:  # lists of unequal length
            ids = np.empty((0, 0))
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu" or int(ids.min()) < 0:
            msg = f"{self._name}: a prompt is a list of token ids, at least one, not {_shown(prompt)}"
            raise ValueError(msg)
        if self._words is not None and (most := int(ids.max())) >= self._words:
            msg = f"{self._name}: the prompt has the token id {most}, the model knows 0 to {self._words - 1}"
            raise ValueError(msg)
        tokens_of = ids.tolist()
        answers = Answers(len(samplings))
        chances = self._chance.integers(2**63, size=len(samplings)).tolist()
        requests = [
            Request(
                tokens_of, sampling, self._limit(len(tokens_of), sampling), chance if sampling.seed is None else
                sampling.seed, answers, place, tokens,
            )
            for place, (sampling, chance) in enumerate(zip(samplings, chances, strict=True))
        ]  # fmt: skip
        return requests, answers

    def _limit(self, asked: int, sampling: Sampling) -> int:
        """Return how many tokens an answer may have, to a prompt of so many."""
        limit, room = sampling.max_tokens, self._limits[1] - asked
        if self._max_length is not None:
            limit = min(limit, self._max_length - asked)
        if limit < 1:
            msg = f"{self._name}: a prompt of {asked} tokens leaves no room: the model takes {self._max_length}"
            raise ValueError(msg)
        if limit > room:
            msg = (
                f"{self._name}: a prompt of {asked} tokens and {limit} more (max_tokens) do not fit into "
                f"max_tokens_total={self._limits[1]}"
            )
            raise ValueError(msg)
        return limit

    def _end_process(self, error: BaseException) -> None:
        """End this rank's process, since nothing can be generated any more: others take its calls."""
        log.critical("%s: the thread that computes has ended, and with it this rank", self._name, exc_info=error)
        logging.shutdown()
        os._exit(_EXIT_DEAD)

    # -- pausing -----------------------------------------------------------------------------------------------------

    def do_pause(self, mode: PauseMode | str) -> int:
        """Stop between two tokens; return how many requests were running."""
        if mode == "keep":
            return self._decoder.freeze()
        if mode == "abort":
            self._decoder.freeze()
            return self._decoder.abort(waiting=False)
        if mode != "wait":
            msg = f"pause mode {mode!r} is not known"
            raise ConfigError(msg, hint='"abort", "wait" or "keep"')
        if self._torn and self._decoder.counts()[0]:
            msg = f"{self._name} cannot wait for what runs: its weights are torn ({self._torn})"
            raise ConfigError(msg, hint='update the weights, or pause with mode="abort"')
        return self._decoder.drain()

    def do_resume(self) -> None:
        """Go on."""
        if self._offloaded:
            msg = f"{self._name} cannot resume: its weights are offloaded"
            raise ConfigError(msg, hint="call onload first")
        self._decoder.resume()

    def do_abort(self) -> int:
        """End all requests with what they have; those that still wait get an empty answer."""
        return self._decoder.abort(waiting=True)

    def do_version(self, version: int) -> None:
        """Be told the version of the weights that the next token is made with."""
        self._decoder.version = version

    def do_reset_cache(self) -> None:
        """Have the prefixes of frozen requests computed anew, with the weights that are there when they go on."""
        self._decoder.reset()

    # -- the rest ----------------------------------------------------------------------------------------------------

    def do_state(self) -> dict[str, Any]:
        """Tell running and waiting requests."""
        running, waiting = self._decoder.counts()
        return {"running": running, "waiting": waiting}

    def do_stats(self) -> dict[str, Any]:
        """Hand over what was counted, below ``generate/``."""
        with self._stats.scope("generate"):
            self._stats.scalar(self._decoder.take_counts(), reduce="sum")
        return self._stats.export()

    def do_offload(self) -> None:
        """Move the weights to the host and drop all keys and values."""
        self._decoder.reset()
        with self.step_lock:
            self.model.to("cpu")
        self._offloaded = True

    def do_onload(self) -> None:
        """Move the weights back."""
        with self.step_lock:
            self.model.to(self._device)
        self._offloaded = False


def _longest(model: Any) -> int | None:
    longest = getattr(model, "max_length", None) or getattr(
        getattr(model, "config", None), "max_position_embeddings", None
    )
    return int(longest) if longest else None


def _words(model: Any) -> int | None:
    """Return how many token ids a model can look up, at most."""
    if hasattr(model, "get_input_embeddings"):
        return getattr(model.get_input_embeddings(), "num_embeddings", None)
    # Which of them is that of tokens is not known: what is beyond the largest is beyond that one, too.
    return max((one.num_embeddings for one in model.modules() if hasattr(one, "num_embeddings")), default=None)


def _ends(eos: int | Sequence[int] | None, model: Any) -> tuple[int, ...]:
    if eos is None:
        eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _shown(prompt: Any) -> str:
    text = repr(prompt)
    return text if len(text) <= 60 else f"{text[:60]}…"
