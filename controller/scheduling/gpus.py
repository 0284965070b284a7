"""Accelerators of one host: counted, reserved and given back; never handed out twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from controller.scheduling.api import Job
from zbus.errors import ConfigError
from zbus.runtime.devices import find_gpus

__all__ = ["GpuPool", "find_gpus"]


class GpuPool:
    """The accelerators of a host. Thread-safe.

    Args:
        devices: Their names, as ``CUDA_VISIBLE_DEVICES`` takes them.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = list(devices)
        self._held: dict[str, list[str]] = {}
        self._sets: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def reserve(self, job: Job) -> list[str]:
        """Reserve what a job needs; return the device list of each rank (empty texts where it needs none).

        Raises:
            ConfigError: Not enough are free (who holds the others is said), or the target of a colocated role is not
                there or has another number of ranks.
        """
        with self._lock:
            if job.strategy.type == "colocation":
                sets = self._shared_with(job)
                self._held[job.role], self._sets[job.role] = [], sets
                return sets
            sets, used = self._deal(job)
            self._held[job.role], self._sets[job.role] = used, sets
            return sets

    def release(self, role: str) -> None:
        """Give back what a role holds. May be repeated."""
        with self._lock:
            self._held.pop(role, None)
            self._sets.pop(role, None)

    def free(self) -> list[str]:
        """Return the accelerators nobody holds."""
        with self._lock:
            return self._free()

    def _free(self) -> list[str]:
        taken = {device for held in self._held.values() for device in held}
        return [device for device in self._devices if device not in taken]

    def _shared_with(self, job: Job) -> list[str]:
        target = job.strategy.target or ""
        sets = self._sets.get(target)
        if sets is None:
            msg = f"role {job.role} shall share with role {target}, which has not been started"
            raise ConfigError(msg, hint=f"start {target} first, or correct the target")
        if len(sets) != job.replicas:
            msg = f"role {job.role} has {job.replicas} ranks, but {target}, whose place it shares, has {len(sets)}"
            raise ConfigError(msg, hint="give both roles the same number of replicas")
        return list(sets)

    def _deal(self, job: Job) -> tuple[list[str], list[str]]:
        free = self._free()
        used: list[str] = []
        sets: list[str] = []
        room = 0.0  # what is left of the accelerator shared last
        for rank in range(job.replicas):
            need = job.task(rank).gpu
            if 0 < need < 1:
                if room + 1e-9 < need:
                    used += self._take(job, free, 1, used)
                    room = 1.0
                room -= need
                sets.append(used[-1])
                continue
            room = 0.0
            mine = self._take(job, free, int(need), used)
            used += mine
            sets.append(",".join(mine))
        return sets, used

    def _take(self, job: Job, free: list[str], count: int, used: Sequence[str]) -> list[str]:
        if count > len(free):
            wanted, have = len(used) + count, len(self._free())
            msg = f"role {job.role} needs at least {wanted} accelerators and {have} of {len(self._devices)} are free"
            holders = {f"held by {role}": ",".join(held) for role, held in self._held.items() if held}
            facts = {"on this host": ",".join(self._devices) or "none", **holders}
            raise ConfigError(msg, facts=facts, hint="lower gpus or replicas, or colocate roles")
        taken = free[:count]
        del free[:count]
        return taken
