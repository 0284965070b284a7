"""Deterministic simulation: controllers, workers and a registry on a fake clock and a hostile network, from one seed.

The machines are the real ones of ``zbus.protocol``; only the shells around them are replaced. ::

    python -m zbus.testing.simulation --seconds 10          # seeds 0, 1, 2, … for ten seconds
    python -m zbus.testing.simulation --replay 4711         # one seed with its story

See ``docs/explanation/simulation.md``.
"""

from __future__ import annotations

from zbus.testing.simulation.knobs import Knobs
from zbus.testing.simulation.ledger import Violation
from zbus.testing.simulation.runner import Failure, Report, replay, run_for, run_seed, run_seeds
from zbus.testing.simulation.world import World

__all__ = ["Failure", "Knobs", "Report", "Violation", "World", "replay", "run_for", "run_seed", "run_seeds"]
