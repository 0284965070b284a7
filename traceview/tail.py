"""``traceview tail TRIAL``: what the trial's sidecar sees now, one line per finished step, slow ranks by name."""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from zbus.trace.wire import SidecarRecord
    from zbus.transport.multipart import Socket

__all__ = ["Feed", "render", "tail"]

_POLL_S = 0.5
_ANSWER_S = 5.0


@click.command()
@click.argument("trial", type=click.Path(exists=True, file_okay=False))
@click.option("--slow", metavar="FACTOR", default="2x", show_default=True, help="Name ranks that take so much longer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option("--once", is_flag=True, help="Print what is known and end, instead of following.")
@click.option("-q", "--quiet", is_flag=True, help="Only lines with slow ranks.")
def tail(*, trial: str, slow: str, as_json: bool, once: bool, quiet: bool) -> None:
    """Follow a running trial: one line per finished step (or call), with the ranks that were slow in it.

    TRIAL is the trial directory; it needs a sidecar (traceview collect TRIAL).
    """
    from zbus.errors import ZbusError

    factor = _factor(slow)
    try:
        feed = Feed(Path(trial))
        try:
            for line in feed.lines(follow=not once):
                text = json.dumps({"schema": "zbus.traceview.tail/1", **line}) if as_json else render(line, factor)
                if not quiet or any(row["ratio"] >= factor for row in line["slowest"]):
                    click.echo(text)
        finally:
            feed.close()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except ZbusError as error:
        click.echo(f"error[{error.code}]: {error.message}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)


def render(line: dict[str, Any], factor: float) -> str:
    """Return one line for people: the step or call, its time, its slowest rank, and an alarm where one is slow."""
    what = f"step {line['step']}" if "step" in line else f"{line['method']} #{line['call']}"
    parts = [f"{_clock(line['at_s'])}  {_safe(what):<24}"]
    parts.append("      -" if line["wall_s"] is None else f"{line['wall_s']:7.3f} s")
    slowest = line["slowest"]
    if slowest:
        first = slowest[0]
        parts.append(f"slowest {_safe(first['who'])} {first['busy_s']:.3f} s ({first['ratio']:.2f}x peers)")
    late = [f"{_safe(row['who'])} {row['ratio']:.1f}x" for row in slowest if row["ratio"] >= factor]
    if late:
        parts.append(f"SLOW: {', '.join(late)}")
    return "  ".join(parts)


class Feed:
    """The lines of one sidecar, as they come. One thread.

    Args:
        trial: Trial directory.
        sleep: Waits between questions, in seconds.

    Raises:
        TrialError: The trial has no sidecar.
    """

    def __init__(self, trial: Path, *, sleep: Callable[[float], None] = time.sleep) -> None:
        from zbus.transport.sockets import SocketFactory

        self._trial = trial
        self._sleep = sleep
        self._record: SidecarRecord | None = None
        self._socket: Socket | None = None
        self._factory = SocketFactory(max_sockets=8)
        if not self._connect():
            self._factory.close()
            raise _no_sidecar(trial)

    def _connect(self, *, anew: bool = False) -> bool:
        """Connect to the sidecar that the registry names; False if there is none, or (but for ``anew``) none new."""
        from zbus.trace.export import sidecar_record
        from zbus.transport.multipart import Receiver

        record = sidecar_record(self._trial / "registry")
        if record is None or (record == self._record and not anew):
            return False
        if self._socket is not None:
            self._socket.close(0)
        self._record = record
        self._socket = self._factory.dealer("ctl")
        self._factory.connect(self._socket, record.endpoints[0])
        self._receiver = Receiver(self._socket)
        return True

    def lines(self, *, follow: bool) -> Iterator[dict[str, Any]]:
        """Yield lines, oldest first; with ``follow`` until the sidecar ends. One that was restarted is followed on.

        Raises:
            TrialError: The sidecar does not answer.
        """
        since = 0
        answered = dialled = False
        while True:
            state = self._ask(since)
            if state is None:
                if self._connect():
                    since = 0  # it counts its lines anew
                    continue
                if answered and self._gone():
                    return
                if not dialled and self._connect(anew=True):  # libzmq may have given the connection up
                    dialled = True
                    continue
                raise _no_sidecar(self._trial)
            answered, dialled = True, False
            for line in state["lines"]:
                since = max(since, int(line["n"]))
                yield line
            if not follow:
                return
            self._sleep(_POLL_S)

    def _ask(self, since: int) -> dict[str, Any] | None:
        from zbus.trace import wire
        from zbus.transport.multipart import send

        assert self._socket is not None  # noqa: S101  # connected since the begin
        poll = select.poll()
        poll.register(int(self._socket.fileno()), select.POLLIN)
        deadline = time.monotonic() + _ANSWER_S
        asked = False
        while time.monotonic() < deadline:
            asked = asked or send(self._socket, [wire.encode(wire.Query(since))])
            frames = self._receiver.recv()
            if frames is not None and len(frames) == 2:
                state: dict[str, Any] = json.loads(bytes(frames[1]))
                return state
            if self._moved():
                return None
            poll.poll(20)
        return None

    def _moved(self) -> bool:
        """Return whether the sidecar is gone, or another one has taken its place."""
        from zbus.trace.export import sidecar_record

        return sidecar_record(self._trial / "registry") != self._record

    def _gone(self) -> bool:
        from zbus.trace.export import sidecar_record

        return sidecar_record(self._trial / "registry") is None

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close(0)
        self._factory.close()


def _no_sidecar(trial: Path) -> Exception:
    from zbus.errors import TrialError

    msg = f"no sidecar of {trial} answers"
    return TrialError(msg, hint=f"start one: traceview collect {trial}")


def _factor(text: str) -> float:
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        value = 0.0
    if not 1.0 < value < 1e6:
        msg = f"{text!r} is not a factor such as 2x or 1.5"
        raise click.BadParameter(msg, param_hint="--slow")
    return value


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600:d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _safe(text: str) -> str:
    """Return foreign text safe for a terminal."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return safe if len(safe) <= 60 else safe[:59] + "…"


if __name__ == "__main__":
    tail()
