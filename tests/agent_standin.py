"""A real agent with ranks that misbehave on demand, and a stand-in controller; run as a program by tests.

``python agent_standin.py agent CONFIG_JSON`` runs an agent whose ranks do what ``ZT_DO`` in the job's environment says
(``;`` separates steps). ``python agent_standin.py rank`` is such a rank, started by exec. ``python agent_standin.py
controller TRIAL RECORDS_JSON`` claims an epoch, publishes a job and sleeps.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from workers import worker
from workers.agent import AgentConfig, run_agent
from workers.spec import SPEC_VARIABLE, RankSpec
from zbus.errors import ZbusError
from zbus.registry.file import FileRegistry
from zbus.registry.identity import pid_space
from zbus.registry.records import EpochRecord, JobRecord, Records
from zbus.runtime.processes import start_time


class UnprintableError(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


def behave(spec: RankSpec) -> int:
    """Do what the job's environment says, rank by rank."""
    for step in os.environ.get(f"ZT_DO_{spec.rank}", os.environ.get("ZT_DO", "sleep")).split(";"):
        if (code := _step(step.strip(), spec)) is not None:
            return code
    return 0


def _step(step: str, spec: RankSpec) -> int | None:  # noqa: C901, PLR0912  # a list of deeds
    word, _, argument = step.partition(":")
    match word:
        case "sleep":
            time.sleep(float(argument or 600))
        case "exit":
            return int(argument)
        case "osexit":
            os._exit(int(argument))
        case "sysexit":
            raise SystemExit(int(argument) if argument.isdigit() else argument)
        case "raise":
            raise ValueError(argument)
        case "unprintable":
            raise UnprintableError
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), int(argument))
        case "print":
            print(argument.format(spec=spec))
        case "env":
            print(f"{argument}={os.environ.get(argument)}")
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "term0":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        case "child":  # a child in our process group that keeps our stdout
            print("child", subprocess.Popen(["sleep", "600"]).pid)
        case "daemon":  # a child that left our session
            print("daemon", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        case "cgroup":
            Path(argument, "cgroup.procs").write_text(str(os.getpid()))
        case "eat":
            time.sleep(1.5)  # the agent looks once a second which cgroup a rank is in
            print(len([bytearray(1 << 20) for _ in range(int(argument))]))
        case "until":  # run through once the file exists
            while not Path(argument).exists():
                time.sleep(0.01)
        case "listening":
            import socket

            for fd, port in zip(spec.listen_fds, spec.ports, strict=True):
                held = socket.socket(fileno=os.dup(fd))
                print("listening", held.getsockname()[1] == port, held.getsockopt(socket.SOL_SOCKET, 30))
        case "store":
            print("store", spec.torch_store_fd is not None, os.environ.get("MASTER_PORT"))
        case "random":
            import random

            import numpy as np

            print(random.random(), np.random.random())  # noqa: NPY002  # the global generator is the point
        case "first":  # only the first start goes on
            return None if spec.start == 0 else _step("sleep", spec)
    return None


def rank_main(spec: RankSpec) -> int:
    """Be a rank: the real prelude, then the planted behaviour."""
    return worker.main(spec, serve=behave)


def _hang_disk(trigger: Path) -> None:
    """Make every registry write of this process hang from the moment the file exists."""
    real = FileRegistry.put

    def put(self: FileRegistry, key: str, value: bytes, *, durable: bool = True) -> None:
        while trigger.exists():
            time.sleep(0.05)
        real(self, key, value, durable=durable)

    FileRegistry.put = put  # type: ignore[method-assign]


def _agent(text: str) -> int:
    options = json.loads(text)
    if (limit := options.pop("nofile", None)) is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if (trigger := os.environ.get("ZT_DISK_HANGS_ONCE")) is not None:
        _hang_disk(Path(trigger))
    if options.get("launcher") is not None:
        options["launcher"] = tuple(options["launcher"])
    options["trial_dir"] = Path(options["trial_dir"])
    if options.get("ranks") is not None:
        options["ranks"] = tuple(options["ranks"])
    config = AgentConfig(
        **options, worker_main=rank_main, worker_command=(sys.executable, "-P", str(Path(__file__).resolve()), "rank")
    )
    try:
        return run_agent(config)
    except ZbusError as error:
        print(f"{error.code}: {error} {error.facts}", file=sys.stderr)
        return error.exit_code


def _controller(trial: str, text: str) -> NoReturn:
    records = Records(FileRegistry(Path(trial) / "registry"))
    pid = os.getpid()
    epoch = records.claim_epoch(
        EpochRecord(session=os.urandom(16).hex(), pid_space=pid_space(), pid=pid, pid_start=start_time(pid) or 0)
    )
    for job in json.loads(text):
        records.publish_job(JobRecord(**job, epoch=epoch.epoch))
    print("ready", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["agent", options]:
            sys.exit(_agent(options))
        case ["cli", *arguments]:  # the real command line, with ranks that misbehave
            import workers.agent

            workers.agent.run_agent = lambda config, _template: run_agent(
                msgspec.structs.replace(config, worker_main=rank_main)
            )
            from workers.cli import main

            main(arguments)
        case ["rank"]:
            sys.exit(rank_main(RankSpec.from_json(os.environ.pop(SPEC_VARIABLE))))
        case ["controller", trial_dir, jobs]:
            _controller(trial_dir, jobs)
