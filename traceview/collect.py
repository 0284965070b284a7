"""``traceview collect TRIAL``: the trial's sidecar, until it is told to stop or its controller is gone."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from zbus.trace.wire import SidecarRecord

__all__ = ["collect", "finish_spool", "run_sidecar"]


@click.command()
@click.argument("trial", type=click.Path(exists=True, file_okay=False))
@click.option("--bind", "host", metavar="HOST", help="Also listen on tcp at this address (processes of other hosts).")
@click.option("--parent", type=int, metavar="PID", help="End when this process has ended.")
@click.option("--finish", is_flag=True, help="Only write what a killed sidecar left, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the ledger as one JSON object at the end.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
def collect(*, trial: str, host: str | None, parent: int | None, finish: bool, as_json: bool, quiet: bool) -> None:
    """Collect the traces of a running trial, so that processes need not write files themselves.

    TRIAL is the trial directory. Processes find the sidecar by the registry and hand their records over; they go on
    by themselves when it stops. End it with Ctrl-C or SIGTERM: everything taken is written first. With --finish it
    takes nothing: after a trial whose sidecar was killed it writes what is left in the spool.
    """
    from zbus.errors import ZbusError

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    def ready(endpoints: list[str]) -> None:
        if not quiet:
            click.echo(f"collecting into {Path(trial) / 'traces'} on {', '.join(endpoints)}", err=True)

    try:
        if finish:
            ledger = finish_spool(Path(trial))
        else:
            ledger = run_sidecar(Path(trial), stop, host=host, parent=parent, on_ready=ready)
    except ZbusError as error:
        click.echo(f"error[{error.code}]: {error.message}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(5)
    if as_json:
        click.echo(json.dumps({"schema": "zbus.traceview.collect/1", **ledger}))
    elif not quiet:
        rows = ledger["sources"]
        click.echo(f"{len(rows)} processes, {sum(row['records'] for row in rows)} records", err=True)
    sys.exit(0 if ledger["complete"] else 5)


def run_sidecar(
    trial: Path,
    stop: threading.Event,
    *,
    host: str | None = None,
    parent: int | None = None,
    on_ready: Any = lambda _: None,
) -> dict[str, Any]:
    """Run the sidecar of a trial on the calling thread until ``stop``; return its ledger.

    Args:
        trial: Trial directory.
        stop: Set to end it.
        host: Also listen on tcp there.
        parent: Process whose end ends it too.
        on_ready: Told the endpoints once processes can find it.

    Raises:
        ZbusError: There is a sidecar already, or it cannot listen or be found.
        OSError: The trace root cannot be written.
    """
    from zbus.registry.file import FileRegistry
    from zbus.runtime.processes import is_alive, start_time
    from zbus.trace.collector import Collector
    from zbus.trace.export import SIDECAR_KEY
    from zbus.transport.endpoints import RuntimeDir
    from zbus.transport.sockets import SocketFactory

    born = None if parent is None else start_time(parent)

    def parent_gone() -> bool:
        return parent is not None and (born is None or not is_alive(parent, born))

    factory = SocketFactory(max_sockets=64)
    collector = Collector(trial / "traces", factory)
    try:
        runtime = RuntimeDir.create(trial)
        wanted = [runtime.endpoint("trace")]
        if host is not None:
            wanted.append(f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")
        endpoints = collector.bind(wanted)
        registry = FileRegistry(trial / "registry")
        value = _record_bytes(endpoints)
        registry.put(SIDECAR_KEY, value)
        try:
            on_ready(endpoints)
            collector.serve(lambda: stop.is_set() or parent_gone())
        finally:
            registry.delete(SIDECAR_KEY, value)
            registry.close()
    finally:
        done = collector.close()
        factory.close()
    runtime.remove()
    return {"sources": collector.ledger(), "refused": collector.refused, "complete": done}


def finish_spool(trial: Path) -> dict[str, Any]:
    """Write what a killed sidecar left in the spool of a trial; return the ledger.

    Raises:
        ZbusError: There is a sidecar.
        OSError: The trace root cannot be written.
    """
    from zbus.trace.collector import Collector
    from zbus.transport.sockets import SocketFactory

    factory = SocketFactory(max_sockets=8)
    try:
        collector = Collector(trial / "traces", factory)
        done = collector.close(timeout_s=math.inf)
    finally:
        factory.close()
    return {"sources": collector.ledger(), "refused": collector.refused, "complete": done}


def _record_bytes(endpoints: list[str]) -> bytes:
    import msgspec

    return msgspec.json.encode(_record(endpoints))


def _record(endpoints: list[str]) -> SidecarRecord:
    import socket

    from zbus.clock import boot_id, time_namespace
    from zbus.trace.wire import SidecarRecord

    host, pid = socket.gethostname(), os.getpid()
    return SidecarRecord(endpoints=endpoints, host=host, pid=pid, boot_id=boot_id(), time_ns=time_namespace())


if __name__ == "__main__":
    collect()
