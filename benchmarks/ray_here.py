"""Ray on this host alone, as the benchmarks that drive it start it: no dashboard, no statistics sent home."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["imported", "start"]


def imported() -> Any:
    """Return the module of Ray."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


def start(ray: Any, directory: str, store_bytes: int) -> None:
    """Start it below ``directory``, with an object store of ``store_bytes``; its workers import from here."""
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        _temp_dir=f"{directory}/ray",
        object_store_memory=store_bytes,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parent)}},
    )
