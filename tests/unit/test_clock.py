from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from zbus.clock import SYSTEM_CLOCK, ClockId, boot_id, clock_id, time_namespace

ROOT = Path(__file__).parents[2]


def test_two_processes_of_one_machine_name_the_same_clock():
    """Boot id and time namespace are equal in a child, and its clock goes on where ours stands."""
    code = "from zbus.clock import *; print(*clock_id(), SYSTEM_CLOCK.monotonic_ns())"
    before = SYSTEM_CLOCK.monotonic_ns()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert ClockId(out[0], int(out[1])) == clock_id() == (boot_id(), time_namespace())
    assert len(boot_id()) == 36
    assert before < int(out[2]) < SYSTEM_CLOCK.monotonic_ns()


def test_the_boot_id_is_read_in_one_place():
    """Whoever compares machines asks zbus.clock, so all agree on what to say where the kernel does not tell."""
    readers = [
        path.relative_to(ROOT).as_posix()
        for package in ("zbus", "workers", "controller", "traceview")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "random/boot_id" in path.read_text()
    ]
    assert readers == ["zbus/clock.py"]
