"""Generation on torch: roles name ``workers.engines.generate:TorchRolloutEngine``. Torch comes with ``setup``."""

from __future__ import annotations

from workers.engines.generate.engine import TorchRolloutEngine

__all__ = ["TorchRolloutEngine"]
