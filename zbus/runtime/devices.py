"""Which accelerators this process may use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["find_gpus"]


def find_gpus(env: Mapping[str, str] | None = None, devices: Path = Path("/dev")) -> list[str]:
    """Return the accelerators this process may use: ``CUDA_VISIBLE_DEVICES``, else the device nodes."""
    visible = (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # As CUDA reads it: everything from the first -1 on is hidden.
        found = []
        for name in visible.split(","):
            if name.strip() in ("", "-1"):
                break
            found.append(name.strip())
        return found
    nodes = [node.name.removeprefix("nvidia") for node in devices.glob("nvidia*")]
    return sorted((node for node in nodes if re.fullmatch(r"\d+", node)), key=int)
