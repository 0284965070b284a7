"""Who this process is: role, rank and sizes from flags and the launchers' environments, each with its source.

Levels, strongest first: flags, ``ZBUS_*``, torchrun, Slurm, Kubernetes. For each value the first level that speaks
wins. Pure: the environment is handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from zbus import names
from zbus.errors import ConfigError

__all__ = ["Identity", "Value", "detect"]

_NUMBERS: Final = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")

_PAIRS: Final = (("rank", "world_size"), ("local_rank", "local_world_size"))

_ZBUS: Final = {
    "rank": ("ZBUS_RANK",),
    "world_size": ("ZBUS_WORLD_SIZE",),
    "local_rank": ("ZBUS_LOCAL_RANK",),
    "local_world_size": ("ZBUS_LOCAL_WORLD_SIZE",),
    "node_rank": ("ZBUS_NODE_RANK",),
}
_TORCHRUN: Final = {
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "node_rank": ("GROUP_RANK",),
}
_SLURM: Final = {
    "rank": ("SLURM_PROCID",),
    "world_size": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "local_rank": ("SLURM_LOCALID",),
    "local_world_size": ("SLURM_STEP_TASKS_PER_NODE",),
    "node_rank": ("SLURM_NODEID",),
}
_KUBERNETES: Final = {"rank": ("JOB_COMPLETION_INDEX",), "world_size": ("JOB_COMPLETIONS",)}


@dataclass(frozen=True, slots=True)
class Value:
    """One detected number or name and where it came from, such as ``flag --rank`` or ``SLURM_PROCID``."""

    value: int | str
    source: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What was detected. A missing value is None; ``sources`` names the origin of each present one.

    ``rank`` and ``world_size`` count the processes that the launcher started. An agent with several ranks multiplies
    them where they do not come from flags or ``ZBUS_*`` (which count ranks).
    """

    role: str | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def counts_ranks(self, name: str) -> bool:
        """Tell whether ``name`` counts ranks (flags, ``ZBUS_*``), not processes of a launcher."""
        return self.sources.get(name, "").startswith(("flag ", "ZBUS_"))

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``zbus-worker env --json``."""
        found = {}
        for name in ("role", *_NUMBERS):
            value = getattr(self, name)
            found[name] = None if value is None else {"value": value, "source": self.sources[name]}
        return found


def _natural(text: str, source: str) -> int:
    # Slurm writes `2(x4)` for "2 tasks on each of 4 nodes" and `2,1` for uneven nodes.
    head = text.split("(", 1)[0] if source.startswith("SLURM_") else text
    if not head.strip().isdigit():
        msg = f"{source} is {text!r}, not a natural number"
        raise ConfigError(
            msg, facts={"from": f"environment, {source}"}, hint=f"unset {source} or give the flag instead"
        )
    return int(head)


def _from_environment(env: Mapping[str, str], table: Mapping[str, tuple[str, ...]]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, variables in table.items():
        for variable in variables:
            text = env.get(variable, "")
            if not text or "," in text:
                continue
            value = Value(_natural(text, variable), variable)
            other = found.setdefault(name, value)
            if other.value != value.value:
                msg = f"{other.source}={other.value} and {variable}={value.value} contradict each other"
                raise ConfigError(msg, hint=f"unset one of them, or give --{name.replace('_', '-')}")
    return found


def _check_level(level: str, found: Mapping[str, Value]) -> None:
    for index, size in _PAIRS:
        low, high = found.get(index), found.get(size)
        if low is not None and high is not None and int(low.value) >= int(high.value):
            msg = f"{low.source}={low.value} is not below {high.source}={high.value}"
            raise ConfigError(msg, facts={"level": level}, hint=f"ranks count from 0 to {size} - 1")


def _levels(flags: Mapping[str, int | str | None], env: Mapping[str, str]) -> list[tuple[str, dict[str, Value]]]:
    given = {
        name: Value(value, f"flag --{name.replace('_', '-')}") for name, value in flags.items() if value is not None
    }
    own = _from_environment(env, _ZBUS)
    if role := env.get("ZBUS_ROLE"):
        own["role"] = Value(role, "ZBUS_ROLE")
    levels = [("flags", given), ("zbus", own)]
    # RANK alone may stand in anybody's environment; with LOCAL_WORLD_SIZE it is torchrun's.
    if "RANK" in env and "LOCAL_WORLD_SIZE" in env:
        levels.append(("torchrun", _from_environment(env, _TORCHRUN)))
    # An interactive allocation sets SLURM_NTASKS without a task: only SLURM_PROCID says "I am a task".
    if "SLURM_PROCID" in env:
        levels.append(("slurm", _from_environment(env, _SLURM)))
    if "JOB_COMPLETION_INDEX" in env:
        levels.append(("kubernetes", _from_environment(env, _KUBERNETES)))
    return levels


def detect(flags: Mapping[str, int | str | None], env: Mapping[str, str]) -> Identity:
    """Detect role, rank and sizes.

    Args:
        flags: Values given on the command line (``role``, ``rank``, ``world_size``, ``local_rank``,
            ``local_world_size``, ``node_rank``); None where not given.
        env: The environment.

    Raises:
        ConfigError: A value is not a number, values of one level contradict each other; the sources are named.
    """
    chosen: dict[str, Value] = {}
    strength: dict[str, int] = {}
    for order, (level, found) in enumerate(_levels(flags, env)):
        _check_level(level, found)
        for name, value in found.items():
            if chosen.setdefault(name, value) is value:
                strength[name] = order
    for index, size in _PAIRS:
        # Across levels nothing contradicts: the weaker level speaks of another job (a rank given by hand in a shell
        # that some launcher started), so its half of the pair is dropped.
        if index in chosen and size in chosen and int(chosen[index].value) >= int(chosen[size].value):
            del chosen[index if strength[index] > strength[size] else size]
    role = chosen.get("role")
    numbers = {name: int(chosen[name].value) if name in chosen else None for name in _NUMBERS}
    return Identity(
        role=None if role is None else names.check(str(role.value), "role"),
        sources={name: value.source for name, value in chosen.items()},
        **numbers,
    )
