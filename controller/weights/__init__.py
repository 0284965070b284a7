"""New weights for the ranks that generate: published once, taken over while generation stands still, checked by digest.

::

    sync = WeightSync(train, rollout, path="memory", dtype="bfloat16")
    report = sync.update()           # pause, transfer, name the version, go on
    sync.refresh()                   # ranks that missed it, or were started anew, later

``docs/explanation/weights.md`` says why it is done in this order.
"""

from __future__ import annotations

from controller.weights.options import Limits, UpdateReport
from controller.weights.sync import WeightSync, Window

__all__ = ["Limits", "UpdateReport", "WeightSync", "Window"]
