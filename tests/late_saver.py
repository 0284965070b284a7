"""A training engine without a model, of which one rank saves late: what a save that fails leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zbus
from waiting import wait_until
from zbus.rl import TrainEngine


class LateSaver(TrainEngine):
    """Rank 0 fails; rank 1 writes when a file ``go`` is there, as one does that was stuck meanwhile."""

    def setup(self, ctx: zbus.Context) -> None:
        self.rank = ctx.rank

    def do_save(self, path: str, kind: str) -> dict[str, Any]:
        if self.rank == 0:
            msg = "no room here"
            raise OSError(msg)
        go = Path(path).parents[1] / "go"
        wait_until(go.exists, 60, f"{go} to be there")
        Path(path).mkdir(parents=True)
        (Path(path) / kind).write_text("part")
        return {}
