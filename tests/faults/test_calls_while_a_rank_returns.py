from __future__ import annotations

import os
import signal
from pathlib import Path

from launching import launch, probes
from waiting import wait_until
from zbus.errors import CallError
from zbus.registry.file import FileRegistry
from zbus.registry.records import Records


def test_a_call_to_a_rank_that_is_on_its_way_back_has_an_outcome(tmp_path: Path):
    """From the death of a rank until it is ready again, whatever it is at, each call ends in an outcome."""
    with launch(tmp_path, {"actor": probes(1, restart="one")}) as bus:
        registry = FileRegistry(bus.trial.registry, create=False)
        [record] = Records(registry).workers("actor")
        registry.close()
        actor = bus.group("actor")
        assert actor.echo(1) == 1
        os.kill(record.pid, signal.SIGKILL)
        told: list[str] = []
        short = actor.echo.options(deadline=0.02)

        def back() -> bool:
            try:
                return short.submit(2).result(5.0) == 2
            except CallError as error:
                told.append(str(error))
                return False

        wait_until(back, what="the rank", timeout_s=20)
    assert told, "no call fell into the time of the rank's return"
    assert all("actor/0" in text or "deadline" in text for text in told), told
