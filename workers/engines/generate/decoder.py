"""The thread that computes: takes requests from any event loop, steps the model, gives answers back to those loops.

Everything that is asked of it from outside is decided under one lock and takes effect between two steps; a step itself
holds ``step_lock``, so whoever holds that changes the model inside none.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import torch

import zbus
from workers.engines.generate.requests import Request, Told, deliver
from workers.engines.generate.rows import Rows
from workers.engines.generate.sampling import Sampler
from workers.engines.generate.scheduler import Scheduler, Step
from zbus import trace
from zbus.rl.generation import Finish
from zbus.runtime.gil import name_thread
from zbus.trace.tracer import SPAN, get_tracer

__all__ = ["Decoder"]

_FATAL: Final[tuple[type[Exception], ...]] = tuple(filter(None, [getattr(torch, "AcceleratorError", None)]))
"""What ends an accelerator for this process, such as an index out of range there: all that follows would fail, too."""

_CHECK_S: Final = 0.05
"""How often a pause that waits looks whether its caller still wants it."""


class Decoder:
    """Steps one model for many requests. All methods may be called from any thread.

    Args:
        rows: The model's rows.
        scheduler: Decides what is next; used by this alone from now on.
        eos: Tokens that end an answer.
        device: Where the model is.
        name: ``role/rank``, for messages.
        on_death: Called on the thread with what ended it, before anybody is told; None: nobody but who asks hears.

    Attributes:
        version: Of the weights that the next token is made with.
        step_lock: Held while the model computes.
    """

    def __init__(
        self,
        rows: Rows,
        scheduler: Scheduler,
        *,
        eos: Sequence[int],
        device: str,
        name: str,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.version = 0
        self.step_lock = threading.Lock()
        self._rows = rows
        self._scheduler = scheduler
        self._eos = tuple(eos)
        self._device = device
        self._name = name
        self._keys = itertools.count()
        self._requests: dict[int, Request] = {}
        self._sampler = self._sampler_of(())
        self._sampled: tuple[int, ...] = ()
        self._changed = threading.Condition()
        self._stepping = False
        self._quieters = 0
        self._closed = False
        self._why = "it is being stopped"
        self._on_death = on_death
        self._steps = 0
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._thread = threading.Thread(target=self._run, name="zbus-decode", daemon=True)

    # -- from outside ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests.

        Raises:
            RuntimeError: This is closed.
            ValueError: One is too long ever to be admitted; those before it are taken.
        """
        with self._changed:
            if self._closed:
                msg = f"{self._name} generates no more: {self._why}"
                raise RuntimeError(msg)
            for request in requests:
                request.key = next(self._keys)
                self._scheduler.submit(request.key, len(request.prompt), len(request.prompt) + request.limit)
                self._requests[request.key] = request
            self._changed.notify_all()

    def forget(self, requests: Sequence[Request]) -> None:
        """Give up those that nobody waits for any more; their places are free from the next step on."""
        with self._changed:
            left = [request for request in requests if not request.ended and request.key in self._requests]
            for request in left:
                self._drop(request, "cancelled", error="cancelled")
            if left:
                self._changed.notify_all()

    def freeze(self) -> int:
        """Make no further token; return how many requests had begun."""
        with self._changed:
            self._scheduler.mode = "freeze"
            self._changed.wait_for(lambda: not self._stepping)
            return len(self._scheduler.begun)

    def drain(self) -> int:
        """Let those that have begun go on to their end, then freeze; return how many they were. Blocks.

        Ends early when the call that it works for is no longer wanted, and then all is as before.
        """
        with self._changed:
            running = len(self._scheduler.begun)
            before, self._scheduler.mode = self._scheduler.mode, "drain"
            self._changed.notify_all()
            try:
                while self._scheduler.begun or self._stepping:
                    self._changed.wait(_CHECK_S)
                    zbus.checkpoint()
            except BaseException:
                self._scheduler.mode = before
                self._changed.notify_all()
                raise
            self._scheduler.mode = "freeze"
            return running

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._scheduler.mode = "run"
            self._changed.notify_all()

    def abort(self, *, waiting: bool) -> int:
        """End those that have begun with what they have, and on request the others with nothing; return how many."""
        with self._quiet():
            keys = self._scheduler.keys if waiting else self._scheduler.begun
            deliver([self._end(self._requests[key], "abort") for key in keys])
            return len(keys)

    def reset(self) -> None:
        """Forget all keys and values: requests that have begun are computed anew from their tokens."""
        with self._quiet():
            self._scheduler.clear()
            self._rows.clear()

    def counts(self) -> tuple[int, int]:
        """Return how many requests have begun and how many have not."""
        with self._changed:
            return len(self._scheduler.begun), self._scheduler.waiting

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last time."""
        with self._changed:
            taken, self._counts = self._counts, defaultdict(float)
            return dict(taken)

    def close(self) -> None:
        """End the thread; who still waits gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._end_all(RuntimeError(f"{self._name} was stopped while it generated"))

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Hold the lock between two steps."""
        with self._changed:
            self._quieters += 1
            try:
                self._changed.wait_for(lambda: not self._stepping)
                yield
            finally:
                self._quieters -= 1
                self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        name_thread("decode")
        try:
            while True:
                with self._changed:
                    step = self._next()
                    if step is None:
                        return
                    rows = [self._requests[key] for key in step.keys]
                    self._stepping = True
                try:
                    with self.step_lock, torch.inference_mode():
                        self._step(step, rows)
                finally:
                    with self._changed:
                        self._stepping = False
                        self._changed.notify_all()
        except BaseException as error:
            self._why = f"the thread that computes ended with {type(error).__name__}: {error}"
            if self._on_death is not None:
                self._on_death(error)
            self._end_all(error)
            raise

    def _next(self) -> Step | None:
        while not self._closed:
            step = None if self._quieters else self._scheduler.next()
            if step is not None:
                return step
            self._changed.wait()
        return None

    def _step(self, step: Step, rows: Sequence[Request]) -> None:
        begin = time.monotonic_ns()
        new = rows[len(rows) - len(step.prefill) :]
        try:
            if step.rows is not None:
                self._rows.keep(step.rows)
            if new:
                self._prefill(rows, new, step.longest, begin)
            elif step.decode:
                self._decode(rows, step.keys, begin)
        except _FATAL:
            raise
        except Exception as error:  # the model's; nobody but those whom it hits is to know  # noqa: BLE001
            self._suspect(new or rows, error)

    def _prefill(self, rows: Sequence[Request], new: Sequence[Request], longest: int, begin: int) -> None:
        sequences = [[*request.prompt, *request.ids] for request in new]
        tokens = sum(map(len, sequences))
        tracer = get_tracer()
        for request in new:
            if tracer.on and request.queued:
                tracer.append((SPAN, "queue", "scheduler", request.since_ns, begin, {"request": request.key}, None))
            request.queued = False
        with trace.span("prefill", "compute", requests=len(new), tokens=tokens):
            self._rows.reserve(len(rows), longest)
            logits = self._rows.prefill(sequences)
            told = self._advance(new, logits, self._sampler_of(new))
        self._count(begin, "prefill", tokens)
        deliver(told)

    def _decode(self, rows: Sequence[Request], keys: tuple[int, ...], begin: int) -> None:
        if keys != self._sampled:
            self._sampler, self._sampled = self._sampler_of(rows), keys
        tokens = torch.tensor([request.ids[-1] for request in rows], device=self._device)
        told = self._advance(rows, self._rows.decode(tokens), self._sampler)
        self._count(begin, "decode", len(rows))
        deliver(told)  # whoever has an answer finds it counted
        trace.counter("generation", rows=len(rows), steps=self._steps)
        self._steps += 1

    def _sampler_of(self, rows: Sequence[Request]) -> Sampler:
        return Sampler([r.sampling for r in rows], [r.seed for r in rows], self._eos, self._device)

    def _advance(self, rows: Sequence[Request], logits: torch.Tensor, sampler: Sampler) -> list[Told]:
        """Give each row its next token, and end those that have all; return what is to be told of it."""
        ids, logprobs = sampler(logits, [len(request.ids) for request in rows])
        told: list[Told] = []
        with self._changed:
            for request, token, logprob in zip(rows, ids, logprobs, strict=True):
                if request.ended:  # given up during the step
                    continue
                if math.isnan(logprob):
                    told.append(self._fail(request, FloatingPointError(self._nan(request))))
                    continue
                if not request.spans or request.spans[-1][0] != self.version:
                    request.spans.append((self.version, len(request.ids)))
                request.ids.append(token)
                request.logprobs.append(logprob)
                self._scheduler.token(request.key)
                if request.tokens is not None:
                    told.append((request, partial(request.tokens.put_nowait, (token, logprob))))
                finish = self._finish(request, token)
                if finish is not None:
                    told.append(self._end(request, finish))
        return told

    def _finish(self, request: Request, token: int) -> Finish | None:
        sampling, made = request.sampling, request.ids
        if len(made) >= sampling.min_tokens:
            if token in self._eos and not sampling.ignore_eos:
                return "stop"
            if any(made[-len(stop) :] == list(stop) for stop in sampling.stop):
                return "stop"
        return "length" if len(made) >= request.limit else None

    def _suspect(self, requests: Sequence[Request], error: Exception) -> None:
        """Compute each request of a step that failed alone; one that fails alone, or twice, ends with the error."""
        self._rows.clear()
        with self._changed:
            ends = [request for request in requests if request.suspected or len(requests) == 1]
            for request in requests:
                request.suspected = True
            self._scheduler.suspect([request.key for request in requests])
            deliver([self._fail(request, error) for request in ends if not request.ended])

    def _nan(self, request: Request) -> str:
        place = len(request.prompt) + len(request.ids)
        return f"{self._name}: the logits of token {place} are not numbers; weights of version {self.version}"

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end(self, request: Request, finish: Finish) -> Told:
        self._drop(request, f"finish_{finish}", finish=finish)
        return request, partial(request.resolve, request.completion(finish))

    def _fail(self, request: Request, error: BaseException) -> Told:
        self._drop(request, "failed", error=type(error).__name__)
        return request, partial(request.reject, error)

    def _drop(self, request: Request, why: str, **told: str) -> None:
        tracer = get_tracer()
        if tracer.on:
            facts = {"prompt": len(request.prompt), "tokens": len(request.ids), "version": self.version, **told}
            tracer.append((SPAN, "generate", "compute", request.since_ns, time.monotonic_ns(), facts, None))
        request.ended = True
        del self._requests[request.key]
        self._scheduler.end(request.key)
        self._counts[why] += 1

    def _end_all(self, error: BaseException) -> None:
        with self._changed:
            self._closed = True
            deliver([self._fail(request, error) for request in [*self._requests.values()]])

    def _count(self, begin: int, phase: str, tokens: int) -> None:
        with self._changed:
            self._counts[f"{phase}_tokens"] += tokens
            self._counts[f"{phase}_s"] += (time.monotonic_ns() - begin) / 1e9
            self._counts[f"{phase}_steps"] += 1
