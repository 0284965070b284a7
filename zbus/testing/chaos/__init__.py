"""Chaos soak: a real trial under random faults, and a checker that compares every answer with what really ran.

``python -m zbus.testing.chaos --seconds 60 --seed 1`` launches a trial of local workers that append every start and end
of a method to a ground-truth file, calls them from threads and an event loop through a fault proxy, meanwhile kills,
stops and cuts them, and afterwards checks the history of all calls against the file. Modules: ``subject`` (the engine),
``truth`` (its file), ``history`` (what the callers saw), ``load`` (the callers), ``nemesis`` (the faults), ``checker``,
``traces`` (what the trial's traces must say), ``memory``, ``soak`` (all together).
"""

from __future__ import annotations

from zbus.testing.chaos.soak import Report, run_soak

__all__ = ["Report", "run_soak"]
