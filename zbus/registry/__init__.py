"""The registry of a trial: small whole records that every process reads and writes, and who won which claim."""

from __future__ import annotations

from zbus.registry.base import JunkRecord, Listing, Registry
from zbus.registry.file import FileRegistry
from zbus.registry.lease import LeaseObserver, LeaseRenewer, LeaseState
from zbus.registry.memory import MemoryRegistry
from zbus.registry.records import (
    AgentRecord,
    EpochRecord,
    ExitRecord,
    JobRecord,
    Lease,
    RankClaim,
    Records,
    WorkerRecord,
)

__all__ = [
    "AgentRecord",
    "EpochRecord",
    "ExitRecord",
    "FileRegistry",
    "JobRecord",
    "JunkRecord",
    "Lease",
    "LeaseObserver",
    "LeaseRenewer",
    "LeaseState",
    "Listing",
    "MemoryRegistry",
    "RankClaim",
    "Records",
    "Registry",
    "WorkerRecord",
]
