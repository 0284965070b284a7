"""Episodes at the worker: workflows and rewards that the role names, and the handle that a workflow works with."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from zbus import trace
from zbus.errors import ConfigError
from zbus.rl.generation import Completion, Sampling
from zbus.rl.workflow import samplings_of
from zbus.runtime.loader import load_object

__all__ = ["Episodes", "Handle", "Runner", "load_workflow"]

Runner = Callable[[Any, Any], Awaitable[Any]]
"""``run_episode`` of a workflow, with the handle and the data."""


def load_workflow(name: str, spec: Any) -> Runner:
    """Return what runs an episode of a workflow.

    Args:
        name: What the role calls it.
        spec: ``"file.py:name"``, ``{"path": …, "kwargs": {…}}``, or the thing itself: an object with an async method
            ``run_episode(engine, data)``, a class of such objects, or an async function of the same arguments.

    Raises:
        ConfigError: It is none of these.
        EngineLoadError: The path cannot be imported.
    """
    kwargs: Mapping[str, Any] = {}
    found = spec
    if isinstance(spec, Mapping):
        if not spec.keys() <= {"path", "kwargs"} or not isinstance(spec.get("path"), str):
            msg = f"workflow {name!r} is {dict(spec)!r}"
            raise ConfigError(msg, hint='give "file.py:Name" or {"path": "file.py:Name", "kwargs": {...}}')
        found, kwargs = spec["path"], spec.get("kwargs", {})
    if isinstance(found, str):
        found = load_object(found, f"workflow {name!r}")
    if isinstance(found, type):
        found = found(**kwargs)
    elif kwargs:
        msg = f"workflow {name!r} has kwargs, but {found!r} is no class to be made with them"
        raise ConfigError(msg, hint="name the class, or leave the kwargs out")
    run: Any = getattr(found, "run_episode", found)
    if not inspect.iscoroutinefunction(run):
        msg = f"workflow {name!r} has no `async def run_episode(engine, data)`"
        raise ConfigError(msg, hint="see zbus.rl.Workflow")
    return run  # type: ignore[no-any-return]  # what it takes and gives is the user's to hold


class Episodes:
    """Runs episodes of declared workflows; on the worker's event loop.

    Args:
        name: ``role/rank``, for messages.
        workflows: By name.
    """

    def __init__(self, name: str, workflows: Mapping[str, Runner]) -> None:
        self._name = name
        self._workflows = dict(workflows)

    async def run(self, workflow: str, handle: Any, data: Any) -> Any:
        """Run one episode as a session of the trace; None: the workflow rejects it.

        Raises:
            ConfigError: No workflow has this name.
            TypeError: It returned something else. What the workflow raises passes through.
        """
        run = self._workflows.get(workflow)
        if run is None:
            raise unknown_name("workflow", workflow, self._workflows, self._name)  # noqa: EM101  # a word, no message
        with trace.session_context(), trace.span("episode", "compute", workflow=workflow):
            value = await run(handle, data)
            if value is None:
                trace.trace_session_event("set_status", status="rejected", reason="the workflow returned None")
            return _checked(workflow, value)


class Handle:
    """What a workflow at the worker gets: see ``zbus.rl.EpisodeEngine``.

    Args:
        generate: Answers one prompt once for each of some samplings, at once.
        reward: Calls a reward by name, with its arguments and its timeout in seconds or None.
        version: Tells the version of the weights.
    """

    def __init__(
        self,
        generate: Callable[[Sequence[int], Sequence[Sampling]], Awaitable[list[Completion]]],
        reward: Callable[[str, tuple[Any, ...], float | None], Awaitable[Any]],
        version: Callable[[], int],
    ) -> None:
        self._generate = generate
        self._reward = reward
        self._version = version

    @property
    def version(self) -> int:
        """Version of the weights that the next token is made with."""
        return self._version()

    async def generate(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """Answer a prompt of token ids."""
        async with trace.atrace_session_phase("generate"):
            [answer] = await self._generate(prompt, [sampling or Sampling()])
            return answer

    async def samples(self, prompt: Sequence[int], count: int, sampling: Sampling | None = None) -> list[Completion]:
        """Answer a prompt several times, at once; with a seed each answer has its own that follows from it."""
        async with trace.atrace_session_phase("generate"):
            return await self._generate(prompt, samplings_of(count, sampling)) if count else []

    async def reward(self, name: str, /, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a reward function of the role, in another process."""
        async with trace.atrace_session_phase("reward"):
            return await self._reward(name, args, timeout_s)


def unknown_name(what: str, name: str, known: Mapping[str, Any], where: str) -> ConfigError:
    """Return the error for a name that the role does not declare, with the nearest one that it does."""
    near = difflib.get_close_matches(str(name), known, n=1)
    msg = f"{where} has no {what} {name!r}; it has {', '.join(map(repr, known)) or 'none'}"
    hint = f"did you mean {near[0]!r}?" if near else f"declare it in the kwargs of the role: {what}s: {{{name}: …}}"
    return ConfigError(msg, hint=hint)


def _checked(workflow: str, value: Any) -> Any:
    """Refuse what cannot be trajectories, where the workflow is still known."""
    many = value if isinstance(value, list | tuple) else [value]
    for place, item in enumerate(() if value is None else many):
        if not isinstance(item, Mapping) or not all(isinstance(key, str) for key in item):
            at = f" (item {place})" if many is value else ""
            msg = f"workflow {workflow!r} returned {type(item).__name__}{at}, not a dict of arrays by name, or None"
            raise TypeError(msg)
    return value
