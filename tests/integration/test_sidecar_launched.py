from __future__ import annotations

import json
from pathlib import Path

from launching import launch
from sidecar_kit import TrialFiles
from waiting import scaled, wait_until
from zbus.config import Config, TraceConfig


def test_the_controller_starts_and_ends_the_sidecar_it_was_asked_for(tmp_path: Path):
    """``trace.sidecar: true``: all processes hand over, all is written at the end, and batches show their merge."""
    with launch(tmp_path, config=Config(trace=TraceConfig(sidecar=True))) as bus:
        trial = Path(bus.trial.path)
        main = trial / "traces" / "controller" / "traces_0.jsonl"

        def handed_over() -> bool:
            bus.group("actor").echo(1)
            return b'"zbus_block"' in main.read_bytes()

        wait_until(handed_over, what="blocks of the controller", timeout_s=scaled(30))
        bus.group("actor").echo(1)
    assert json.loads((trial / "traces" / "sidecar.json").read_text())["complete"]
    controller = TrialFiles(trial, "controller")
    batches = {event["args"]["batch"] for event in controller.named("batch echo")}
    assert batches == {event["args"]["batch"] for event in controller.named("merge echo")}
    assert batches == {event["args"]["batch"] for event in controller.named("call echo")}
    assert len(TrialFiles(trial, "actor").named("zbus_end")) == 1
