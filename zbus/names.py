"""Where every record of a trial lives: key builders over validated components, so that no name escapes the root.

Keys are relative to the registry root of one trial (``<trial>/registry``) and use ``/``. Components match
``[A-Za-z0-9._-]{1,64}`` and are never only dots (promise R9).
"""

from __future__ import annotations

import re
from typing import Final

from zbus.errors import ConfigError

__all__ = [
    "agent",
    "agents",
    "check",
    "epoch",
    "epochs",
    "exit_record",
    "exits",
    "job",
    "jobs",
    "lease",
    "leases",
    "rank_claim",
    "rank_claims",
    "trial",
    "worker",
    "worker_discovery",
    "workers",
]

_COMPONENT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check(component: str, what: str = "name") -> str:
    """Return ``component`` if it is a valid name component.

    Args:
        component: The user's text.
        what: What it names (``role``, ``experiment``, …), for the message.

    Raises:
        ConfigError: Empty, longer than 64, only dots, or with a character outside ``[A-Za-z0-9._-]``.
    """
    if not _COMPONENT.fullmatch(component) or not component.strip("."):
        msg = f"{what} {component!r} is not a valid name"
        raise ConfigError(msg, hint=f"use 1 to 64 of A-Z a-z 0-9 . _ - for the {what}, not only dots")
    return component


def _rank(rank: int) -> str:
    if rank < 0:
        msg = f"rank {rank} is negative"
        raise ConfigError(msg)
    return str(rank)


def trial(experiment: str, trial_name: str) -> str:
    """Return ``experiment/trial``, the directory of a trial under the root."""
    return f"{check(experiment, 'experiment')}/{check(trial_name, 'trial')}"


def worker_discovery(experiment: str, trial_name: str, role: str, rank: int) -> str:
    """Return the full discovery name of a worker: ``experiment/trial/workers/role/rank``."""
    return f"{trial(experiment, trial_name)}/workers/{check(role, 'role')}/{_rank(rank)}"


def epochs() -> str:
    """Return the prefix of epoch claims."""
    return "epochs"


def epoch(number: int) -> str:
    """Return the key of one epoch's claim: ``epochs/epoch.N``."""
    return f"epochs/epoch.{number}"


def jobs() -> str:
    """Return the prefix of job records."""
    return "jobs"


def job(role: str) -> str:
    """Return the key of a role's job record (what to run, how many ranks)."""
    return f"jobs/{check(role, 'role')}"


def agents() -> str:
    """Return the prefix of agent records."""
    return "agents"


def agent(agent_id: str) -> str:
    """Return the key of an agent's record."""
    return f"agents/{check(agent_id, 'agent')}"


def leases() -> str:
    """Return the prefix of leases."""
    return "leases"


def lease(holder: str) -> str:
    """Return the key of a lease; ``holder`` is an agent id or ``controller.N``."""
    return f"leases/{check(holder, 'lease holder')}"


def rank_claims() -> str:
    """Return the prefix of rank claims."""
    return "ranks"


def rank_claim(role: str, rank: int, start: int) -> str:
    """Return the key an agent claims before it starts ``role/rank`` for the ``start``-th time."""
    return f"ranks/{check(role, 'role')}.{_rank(rank)}.{start}"


def workers() -> str:
    """Return the prefix of worker records."""
    return "workers"


def worker(role: str, rank: int, incarnation: int) -> str:
    """Return the key of one incarnation's record, created once."""
    return f"workers/{check(role, 'role')}.{_rank(rank)}.{incarnation}"


def exits() -> str:
    """Return the prefix of exit records."""
    return "exits"


def exit_record(role: str, rank: int, incarnation: int) -> str:
    """Return the key of one incarnation's exit record, written once by its agent."""
    return f"exits/{check(role, 'role')}.{_rank(rank)}.{incarnation}"
