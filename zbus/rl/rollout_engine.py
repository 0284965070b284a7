"""The contract of generation engines: endpoints declared once, hooks that an engine fills in.

The order of an update (pause, weights, version, cache, resume) is kept here, not left to callers or engines: new
weights are taken only while paused, an engine whose weights are torn or unverified answers no prompt, and the cache of
prefixes is dropped before the next token.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Literal

import zbus
from zbus.engine import AnyOne, Everywhere, PerRank
from zbus.errors import ConfigError
from zbus.rl.generation import Completion, Episode, Sampling

__all__ = ["PauseMode", "RolloutEngine"]

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of running requests: ended with what they have, waited for, or frozen until ``resume``."""


class RolloutEngine(zbus.Engine):
    """Base of engines that generate. ``generate`` and ``run_episode`` run on the worker's loop, the rest on ``main``.

    An engine overrides the ``do_…`` hooks. Hooks of control endpoints run on the main thread, one at a time.
    """

    def __init__(self) -> None:
        self._version = 0
        self._digest = ""
        self._paused = False
        self._torn = ""
        self._state = threading.Lock()

    # -- generation --------------------------------------------------------------------------------------------------

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen", concurrency=256)
    async def generate(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """Answer one prompt of token ids."""
        return await self.do_generate(prompt, sampling or Sampling())

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen")
    async def generate_stream(
        self, prompt: Sequence[int], sampling: Sampling | None = None
    ) -> AsyncIterator[tuple[int, float]]:
        """Answer one prompt: each token and its log-probability as it is made."""
        async with contextlib.aclosing(self.do_stream(prompt, sampling or Sampling())) as tokens:
            async for token in tokens:
                yield token

    @zbus.endpoint(AnyOne(), effect="pure", lane="gen")
    async def run_episode(self, workflow: str, data: Any) -> Episode:
        """Run one episode of a workflow that this role declares."""
        oldest = self._version
        value = await self.do_episode(workflow, data)
        return Episode(value, oldest, self._version)

    # -- pausing -----------------------------------------------------------------------------------------------------

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def pause(self, mode: PauseMode = "keep") -> int:
        """Make no further token; requests that come meanwhile wait. Returns how many requests were running."""
        running = self.do_pause(mode)
        self._paused = True
        return running

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def resume(self) -> bool:
        """Go on. False, and nothing changes, while the weights are torn: only a complete update helps."""
        if self._torn:
            return False
        self.do_resume()
        self._paused = False
        return True

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def abort(self) -> int:
        """End all running requests with what they have; returns how many."""
        return self.do_abort()

    # -- weights -----------------------------------------------------------------------------------------------------

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def update_weights(self, pieces: Sequence[Mapping[str, Any]], version: int, digest: str) -> str:
        """Take tensors from memory: pieces (in most cases one ``Ref``, which is mapped, not sent), in order.

        Args:
            pieces: Each ``{"manifest", "data", "full"}`` as ``TrainEngine.publish_weights`` makes it.
            version: What the weights are called afterwards.
            digest: What *all* weights must hash to afterwards.

        Returns:
            The digest of all weights afterwards; it equals ``digest``, or the engine is torn and refuses to resume.
        """
        return self._take("memory", version, digest, lambda: self.do_update(pieces))

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def load_weights(self, paths: Sequence[str], version: int, digest: str) -> str:
        """Take tensors from directories of safetensors, in order; returns and refuses as ``update_weights``."""
        return self._take(", ".join(paths), version, digest, lambda: self.do_load(paths))

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="once", start="together")
    def receive_weights(
        self,
        name: str,
        manifest: Sequence[Sequence[Any]],
        version: int,
        digest: str,
        full: bool = True,  # noqa: FBT001, FBT002  # as it is called
    ) -> str:
        """Take tensors broadcast over a weights group in the order of ``manifest``; returns as ``update_weights``.

        Args:
            name: Of the group.
            manifest: What comes.
            version: What the weights are called afterwards.
            digest: What *all* weights must hash to afterwards.
            full: Whether the manifest holds all tensors of the model.
        """
        return self._take(f"group {name}", version, digest, lambda: self.do_receive(name, manifest, full))

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="once")
    def join_weights_group(
        self, name: str, host: str, port: int, first_rank: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Join the group that weights are broadcast in, as its rank ``first_rank``; blocks until all have joined.

        An engine of several processes takes the ranks from ``first_rank`` on.
        """
        self.do_join(name, host, port, first_rank, world_size, backend, timeout_s)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def leave_weights_group(self, name: str) -> None:
        """Leave it; harmless where it was not joined."""
        self.do_leave(name)

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def weights(self) -> dict[str, Any]:
        """Tell ``version``, ``digest`` (of what is in memory, computed anew), ``torn`` and ``paused``."""
        return {
            "version": self._version, "digest": self.do_digest(anew=True), "torn": self._torn, "paused": self._paused,
        }  # fmt: skip

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure")
    def get_version(self) -> int:
        """Tell the version of the weights."""
        return self._version

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def set_version(self, version: int) -> int:
        """Name the weights that are there; updates do it themselves."""
        self.do_version(version)
        self._version = version
        return version

    # -- the rest ----------------------------------------------------------------------------------------------------

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="pure", lane="state")
    async def state(self) -> dict[str, Any]:
        """Tell ``running``, ``waiting``, ``version``, ``paused`` and ``torn``; answered while ``main`` is busy."""
        return {**self.do_state(), "version": self._version, "paused": self._paused, "torn": self._torn}

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="once")
    def export_stats(self) -> dict[str, Any]:
        """Hand over what was counted since the last time, as ``zbus.rl.stats`` merges it."""
        return self.do_stats()

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def offload(self) -> None:
        """Give the accelerator's memory back, weights kept elsewhere; only while paused."""
        self._need_pause("offload")
        self.do_offload()

    @zbus.endpoint(Everywhere(), collect=PerRank(), effect="idempotent")
    def onload(self) -> None:
        """Undo ``offload``."""
        self.do_onload()

    # -- order -------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._version

    def _need_pause(self, what: str) -> None:
        if not self._paused:
            msg = f"{what} needs a paused engine, this one generates"
            raise ConfigError(msg, hint="pause first; RolloutController.update_weights keeps the order")

    def _take(self, source: str, version: int, digest: str, change: Any) -> str:
        self._need_pause("an update of the weights")
        before, self._torn = self._torn, f"an update to version {version} from {source} did not end"
        try:
            change()
        except ConfigError:  # refused before the first write
            self._torn = before
            raise
        found = self.do_digest(anew=False)
        if found != digest:
            self._torn = f"version {version} from {source} has digest {found}, not {digest}"
            return found
        self.do_reset_cache()
        self.do_version(version)
        self._digest, self._version, self._torn = digest, version, ""
        return found

    # -- hooks -------------------------------------------------------------------------------------------------------

    async def do_generate(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        """Answer one prompt; on the worker's loop, many at once."""
        raise NotImplementedError

    async def do_episode(self, workflow: str, data: Any) -> Any:
        """Run one episode of a declared workflow; on the worker's loop, many at once. None: the workflow rejects it."""
        raise NotImplementedError

    def do_stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[tuple[int, float], None]:
        """Yield each token of an answer and its log-probability as they are made."""
        raise NotImplementedError

    def do_pause(self, mode: PauseMode) -> int:
        """Stop between two tokens; return how many requests were running."""
        raise NotImplementedError

    def do_resume(self) -> None:
        """Go on."""
        raise NotImplementedError

    def do_abort(self) -> int:
        """End all running requests with what they have."""
        raise NotImplementedError

    def do_update(self, pieces: Sequence[Mapping[str, Any]]) -> None:
        """Copy tensors into the model by name, one piece after the other.

        Raises:
            ConfigError: A name is unknown or a shape differs. Only raised before the first copy: the weights are as
                they were. Any other error leaves the engine torn.
        """
        raise NotImplementedError

    def do_load(self, paths: Sequence[str]) -> None:
        """Load directories of safetensors into the model, refusing as ``do_update``."""
        raise NotImplementedError

    def do_join(
        self, name: str, host: str, port: int, first_rank: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Join a torch process group that is not the default one."""
        raise NotImplementedError

    def do_leave(self, name: str) -> None:
        """Leave it."""
        raise NotImplementedError

    def do_receive(self, name: str, manifest: Sequence[Sequence[Any]], full: bool) -> None:  # noqa: FBT001  # a hook mirrors its endpoint
        """Receive broadcasts of a group in the order of the manifest into the model, refusing as ``do_update``."""
        raise NotImplementedError

    def do_digest(self, anew: bool) -> str:  # noqa: FBT001  # called by this class alone
        """Return the digest of all weights, as ``zbus.rl.weights`` defines it, in the dtypes they last came in.

        Args:
            anew: Hash all of them, not only what was written since.
        """
        raise NotImplementedError

    def do_version(self, version: int) -> None:
        """Be told the version of the weights that the next token is made with."""

    def do_reset_cache(self) -> None:
        """Forget prefixes computed with older weights."""

    def do_state(self) -> dict[str, Any]:
        """Tell running and waiting requests."""
        return {"running": 0, "waiting": 0}

    def do_stats(self) -> dict[str, Any]:
        """Hand over what was counted."""
        return {}

    def do_offload(self) -> None:
        """Give memory back."""

    def do_onload(self) -> None:
        """Take it again."""
