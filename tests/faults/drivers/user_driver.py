"""A trial of whoever runs this: ``python user_driver.py ROOT``. Says ``ready``, waits for a line, calls, and ends."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from controller import Controller, Role
from zbus.errors import ZbusError

TESTS = Path(__file__).parents[2]


def main(root: str) -> int:
    """Run it; return the exit code."""
    role = Role("engines_under_test:Probe", replicas=2, sys_path=[str(TESTS)])
    try:
        with Controller.launch("shared", {"actor": role}, trial="run", root=root, startup_timeout=60) as bus:
            print("ready", flush=True)
            sys.stdin.readline()
            answers = bus.group("actor").whoami()
            owners = sorted({Path(f"/proc/{one['pid']}").stat().st_uid for one in answers})
            print(json.dumps({"uid": os.getuid(), "owners": owners, "ranks": [one["rank"] for one in answers]}))
    except ZbusError as error:
        print(f"{error.code}: {error} {dict(error.facts)} {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
