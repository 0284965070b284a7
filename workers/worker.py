"""A rank: takes its place (environment, parent-death signal, paths), then runs the host of its engine.

Started by exec as ``python -m workers.worker`` with a ``RankSpec`` in ``ZBUS_RANK_SPEC``, or called in a process that
a template forked. Stdout and stderr are the log already.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers.spec import SPEC_VARIABLE, RankSpec
from zbus.runtime.processes import die_with_parent, set_name

__all__ = ["main", "rank_environment", "write_exception"]

EXIT_CRASHED = 1
EXIT_AGENT_LOST = 9
EXIT_FENCED = 11
EXIT_TERMINATED = 143


def rank_environment(spec: RankSpec) -> dict[str, str]:
    """Return the variables a rank gets for user code: torchelastic's names, ``ZBUS_*``, the job's and its own.

    The user's values win, except for identity: who a rank is stands in its spec.
    """
    identity = {
        "RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(spec.local_rank),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "GROUP_RANK": str(spec.group_rank),
        "ROLE_RANK": str(spec.rank),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "ZBUS_EXPERIMENT": spec.experiment,
        "ZBUS_TRIAL": spec.trial,
        "ZBUS_ROLE": spec.role,
        "ZBUS_RANK": str(spec.rank),
        "ZBUS_WORLD_SIZE": str(spec.world_size),
        "ZBUS_LOCAL_RANK": str(spec.local_rank),
        "ZBUS_START": str(spec.start),
        "ZBUS_TRIAL_DIR": spec.trial_dir,
    }
    if spec.master_port:
        identity |= {"MASTER_ADDR": spec.master_addr, "MASTER_PORT": str(spec.master_port)}
    return {**spec.env, **spec.job.env, **identity}


def write_exception(spec: RankSpec, error: BaseException) -> None:
    """Leave the exception in the crash file, where the agent completes it. Never raises."""
    try:
        message = str(error)
    except Exception as inner:  # noqa: BLE001  # a user's __str__ may raise anything
        message = f"<no text: {type(inner).__name__} in __str__>"
    report: dict[str, Any] = {
        "exception": {
            "type": type(error).__qualname__,
            "module": type(error).__module__,
            "message": message[:10_000],
            "traceback": "".join(traceback.format_exception(error))[-50_000:],
        },
        "argv": sys.argv,
        "wall_ns": time.time_ns(),
    }
    path = Path(spec.trial_dir) / "crash" / f"{spec.role}.{spec.rank}.{spec.start}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temp.write_text(json.dumps(report), encoding="utf-8")
        temp.replace(path)
    except Exception:  # noqa: BLE001  # the exit status and the log still tell
        traceback.print_exc()


def main(spec: RankSpec, serve: Callable[[RankSpec], int] | None = None) -> int:
    """Run one rank to its end and return the exit code. Called once, on the main thread.

    Args:
        spec: Who to be.
        serve: What to run in place of the engine's host; only tests give it.
    """
    if not die_with_parent(spec.agent_pid):
        print(f"zbus: the agent (pid {spec.agent_pid}) is gone; {spec.role}/{spec.rank} ends", file=sys.stderr)  # noqa: T201  # stderr is the log
        return EXIT_AGENT_LOST
    set_name(f"{spec.role}/{spec.rank}")
    os.environ.update(rank_environment(spec))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a log line is in the file when printed
    if spec.job.cwd is not None:
        os.chdir(spec.job.cwd)
    sys.path[:0] = [entry for entry in spec.job.sys_path if entry not in sys.path]
    try:
        return _fenced((serve or _serve)(spec), spec)
    except Exception as error:  # noqa: BLE001  # whatever it is, the report names it
        write_exception(spec, error)
        traceback.print_exc()
        return EXIT_CRASHED


def _fenced(code: int, spec: RankSpec) -> int:
    """Return the code of a rank that ends with ``code``: 11 if it was told to end because it was replaced."""
    if code != EXIT_TERMINATED:
        return code
    from workers.claims import replaced_by
    from zbus.errors import ZbusError
    from zbus.registry.file import FileRegistry
    from zbus.registry.records import Records

    try:
        records = Records(FileRegistry(Path(spec.trial_dir) / "registry", create=False))
        claim = replaced_by(records, spec.role, {spec.rank: spec.start}, spec.agent_id).get(spec.rank)
    except ZbusError:  # then it is not known why
        return code
    if claim is None:
        return code
    by = f"start {claim.start} by agent {claim.agent} on {claim.host}"
    print(f"zbus: {spec.role}/{spec.rank}, start {spec.start}, was replaced: {by}; it ends", file=sys.stderr)  # noqa: T201  # stderr is the log
    return EXIT_FENCED


def _serve(spec: RankSpec) -> int:
    from zbus.runtime.host import HostConfig, serve

    return serve(HostConfig.from_spec(spec))


def _from_exec() -> int:
    return main(RankSpec.from_json(os.environ.pop(SPEC_VARIABLE)))


if __name__ == "__main__":
    sys.exit(_from_exec())
