"""Real interrupts against real messages. Run as a script, this file is the process that gets interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from waiting import scaled

FRAMES = 8
SIZES = (20, 0, 3, 40, 10_000, 1, 300, 64)


def make(number: int) -> list[bytes]:
    """Return message ``number``: its number, six frames of changing content, and a checksum over all."""
    frames = [number.to_bytes(8, "big")]
    frames += [bytes([(number + place) % 251]) * size for place, size in enumerate(SIZES[1:-1], 1)]
    return [*frames, zlib.crc32(b"|".join(frames)).to_bytes(4, "big")]


def number_of(frames: list) -> int | None:
    """Return the number of a whole message, or None for a glued or torn one."""
    parts = [bytes(frame) for frame in frames]
    if len(parts) != FRAMES or zlib.crc32(b"|".join(parts[:-1])).to_bytes(4, "big") != parts[-1]:
        return None
    return int.from_bytes(parts[0], "big")


# -- the interrupted process: one side of a link -----------------------------------------------------------------------


class Storm:
    """Raises KeyboardInterrupt in the main thread, from a timer's SIGALRM and from SIGINT, at no fixed distance.

    Each raise disarms it, so that the code that takes an interrupt is not struck by the next.
    """

    def __init__(self) -> None:
        self.armed = False
        self.struck = 0
        self.inside = 0
        self._stop = threading.Event()
        signal.signal(signal.SIGALRM, self._raise)
        signal.signal(signal.SIGINT, self._raise)
        signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
        self._thread = threading.Thread(target=self._press, daemon=True)
        self._thread.start()

    def _raise(self, number, frame) -> None:
        if self.armed:
            self.armed = False
            self.struck += 1
            self.inside += sys._getframe(1).f_code.co_name == "_run_pending"
            raise KeyboardInterrupt

    def _press(self) -> None:
        while not self._stop.wait(0.0011):
            os.kill(os.getpid(), signal.SIGINT)

    def end(self) -> None:
        """No more interrupts."""
        self.armed = False
        self._stop.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._thread.join()


def sending(socket, storm: Storm, wanted: int) -> dict:
    """Send numbered messages until enough interrupts have struck inside a section; the books are kept inside too."""
    from zbus.transport.interrupts import gate
    from zbus.transport.multipart import send

    sent = 0
    while storm.inside < wanted:
        try:
            storm.armed = True
            frames = make(sent)
            with gate:
                if send(socket, frames):
                    sent += 1
            if sent % 50 == 49:
                time.sleep(0.0002)
            storm.armed = False
        except KeyboardInterrupt:
            pass
    storm.end()
    while not send(socket, [b"end"]):
        time.sleep(0.001)
    assert socket.poll(30_000), "the other side did not take the end mark"
    socket.close()
    return {"sent": sent}


def receiving(socket, storm: Storm, wanted: int) -> dict:
    """Receive without any section of its own; a message handed over is held until it was entered."""
    from zbus.transport.multipart import Receiver, send

    receiver = Receiver(socket)
    held, expected, bad, lost, stormy = None, 0, 0, 0, True
    while held != [b"end"]:
        if stormy and storm.inside >= wanted:
            storm.end()
            stormy = False
            assert send(socket, [b"enough"])
        try:
            storm.armed = stormy
            if held is None:
                held = receiver.recv()
            if held is None:
                socket.poll(50)
            elif held != [b"end"]:
                number = number_of(held)
                entered = (number if number is not None else expected) + 1
                wrong, gap = number is None, number is not None and number != expected
                # No call, no jump: nothing can interrupt between these.
                expected, bad, lost, held = entered, bad + wrong, lost + gap, None
            storm.armed = False
        except KeyboardInterrupt:
            pass
    socket.close()
    return {"received": expected, "bad": bad, "lost": lost, "dropped": receiver.dropped}


def main() -> None:
    """Play one side: ``send|receive endpoint interrupts``."""
    from zbus.transport.interrupts import gate
    from zbus.transport.sockets import SocketFactory

    side, endpoint, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
    factory = SocketFactory(max_sockets=16)
    socket = factory.dealer("main")
    factory.connect(socket, endpoint)
    while not socket.poll(100, 2):  # POLLOUT: connected
        pass
    with gate:
        pass
    storm = Storm()
    facts = (sending if side == "send" else receiving)(socket, storm, wanted)
    factory.close()
    print(json.dumps({**facts, "struck": storm.struck, "inside": storm.inside}))


# -- the calm process --------------------------------------------------------------------------------------------------


def storm_on(side: str, interrupts: int, short_dir: Path, limit_s: float) -> dict:
    """Interrupt one side of a link; return its facts and what the calm side saw."""
    from zbus.transport.multipart import Receiver
    from zbus.transport.sockets import SocketFactory

    factory = SocketFactory(max_sockets=16)
    socket = factory.dealer("main")
    endpoint = factory.bind(socket, f"ipc://{short_dir}/s")
    child = subprocess.Popen(
        [sys.executable, __file__, side, endpoint, str(interrupts)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    deadline = time.monotonic() + scaled(limit_s)
    going = lambda: time.monotonic() < deadline and child.poll() is None  # noqa: E731  # read at each turn
    try:
        facts = (hear if side == "send" else feed)(socket, Receiver(socket), going)
        out, _ = child.communicate(timeout=max(1.0, deadline - time.monotonic()))
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()
        socket.close()
        factory.close()
    return {**json.loads(out), **facts}


def hear(socket, receiver, going) -> dict:
    """Receive until the end mark."""
    from zbus.transport.multipart import send

    seen, bad, lost = 0, 0, 0
    while going():
        frames = receiver.recv()
        if frames is None:
            socket.poll(100)
        elif frames == [b"end"]:
            send(socket, [b"thanks"])
            break
        else:
            number = number_of(frames)
            bad += number is None
            lost += number is not None and number != seen
            seen = (seen if number is None else number) + 1
    return {"calm_saw": seen, "calm_bad": bad, "calm_lost": lost}


def feed(socket, receiver, going) -> dict:
    """Send numbered messages until the other side has had enough, then the end mark."""
    from zbus.transport.multipart import send

    sent = 0
    while going() and receiver.recv() is None:
        if send(socket, make(sent)):
            sent += 1
        else:
            socket.poll(20, 2)
        if sent % 50 == 49:
            time.sleep(0.001)
    while going() and not send(socket, [b"end"]):
        socket.poll(20, 2)
    return {"calm_saw": sent}


def check(facts: dict, side: str, interrupts: int) -> None:
    """No message glued, torn or lost, and the storm was one."""
    assert facts["inside"] >= interrupts, facts
    if side == "send":
        assert (facts["calm_bad"], facts["calm_lost"]) == (0, 0), facts
        assert facts["calm_saw"] == facts["sent"], facts
    else:
        assert (facts["bad"], facts["lost"], facts["dropped"]) == (0, 0, 0), facts
        assert facts["received"] == facts["calm_saw"], facts


@pytest.mark.parametrize("side", ["send", "receive"])
def test_interrupts_during_io_neither_glue_nor_tear_nor_lose_a_message(side, short_dir):
    """250 interrupts inside a section on each side leave every message whole, once and in order."""
    facts = storm_on(side, 250, short_dir, 60)
    check(facts, side, 250)


@pytest.mark.ci
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("side", ["send", "receive"])
def test_ten_thousand_interrupts_leave_every_message_whole(side, short_dir):
    """The same with 5,000 on each side."""
    facts = storm_on(side, 5_000, short_dir, 280)
    print(facts)
    check(facts, side, 5_000)


if __name__ == "__main__":
    main()
