"""Drivers of the fault tests: what ``zbus-controller run`` runs. ``params`` say what."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def main(run: Any) -> dict[str, Any] | None:
    """Call ``step`` as told, then report."""
    actor = run.bus.group("actor")
    say("ready")
    for _ in range(int(run.config.get("good_steps", 0))):
        actor.step()
    if "how" in run.config:
        actor.step(run.config["how"], peers=run.config.get("peers", ""))
    return {"after": len(actor.me())}


def idle(run: Any) -> dict[str, Any]:
    """Do nothing until a file appears, then call."""
    run.bus.group("actor").count()
    say("ready")
    wait_for(run.config["go"])
    return {"counts": run.bus.group("actor").count()}


def goes_on(run: Any) -> dict[str, Any]:
    """Lose a rank in a call, catch it, and call again: restart policies."""
    from zbus import BatchError

    actor = run.bus.group("actor")
    before = actor.me()
    caught = ""
    try:
        actor.step(run.config["how"], peers=run.config.get("peers", ""))
    except BatchError as error:
        caught = type(error.root).__name__
    actor.count()
    return {"caught": caught, "before": before, "after": actor.me()}


def again_and_again(run: Any) -> None:
    """Lose the same rank in every call until a call says that it does not come back."""
    from zbus import WorkerLost

    while True:
        try:
            run.bus.group("actor")[1].step("exit:9")
        except WorkerLost as lost:
            say(f"lost start {lost.facts['start']}")


def slow_close(run: Any) -> None:
    """End at once; the engines take their time to be torn down."""
    run.bus.group("actor").step("tear:100", peers="tear:100")
    say("closing")


def say(text: str) -> None:
    """Tell the test how far this is."""
    print(f"driver {os.getpid()} {text}", file=sys.stderr, flush=True)


def wait_for(path: str) -> None:
    """Wait for a file."""
    while not Path(path).exists():
        time.sleep(0.005)
