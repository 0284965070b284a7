"""A controller with little memory and eight ranks that send more than fits.

``python memory_driver.py ROOT GROUP LIMIT``: GROUP is a memory cgroup made for this process; it joins once its ranks
run, so that the limit is its own. Prints JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

from controller import Controller, Role

TESTS = Path(__file__).parents[2]
RANKS, ITEMS, MIB = 8, 10, 1 << 20
WINDOW = 64 // 32
"""Items that a stream may be ahead of its reader."""


def main(root: str, group: str, limit: str) -> None:
    """Read eight streams at once, item by item in turn."""
    role = Role("backpressure_engine:Source", replicas=RANKS, sys_path=[str(TESTS)])
    with Controller.launch("memory", {"source": role}, root=root, startup_timeout=240) as bus:
        source = bus.group("source")
        (Path(group) / "memory.limit_in_bytes").write_text(limit)
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
        streams = [source[rank].blobs.stream(ITEMS, 32 * MIB) for rank in range(RANKS)]
        sources = [source[rank] for rank in range(RANKS)]
        first = [next(stream) for stream in streams]
        while min(ahead := [one.made() for one in sources]) < WINDOW:
            time.sleep(0.05)  # nobody reads: each makes as much as it may
        time.sleep(1.0)  # and no more
        ahead = [one.made() for one in sources]
        got = sum(map(len, first))
        del first
        for item in itertools.chain.from_iterable(zip(*streams, strict=True)):
            assert len(item) == 32 * MIB
            got += len(item)
        answers = [one.echo(rank) for rank, one in enumerate(sources)]
    peak = int((Path(group) / "memory.max_usage_in_bytes").read_text())
    print(json.dumps({"got_mib": got // MIB, "peak_mib": peak // MIB, "answers": answers, "ahead": ahead}))


if __name__ == "__main__":
    main(*sys.argv[1:])
