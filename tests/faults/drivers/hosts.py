"""Several hosts on one machine: namespaces with names, boot ids, processes and addresses of their own, on one bridge.

The process that makes them is the first host; it must run as root in network and mount namespaces of its own. Addresses
are of 127/8, which the kernel is told to send over the wire here, so that sockets need no keys.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

__all__ = ["Host", "Hosts", "command"]

SCALE = float(os.environ.get("ZBUS_TEST_TIME_SCALE", "1"))

HOLD = """
import pathlib, subprocess, sys, time
name, boot, private = sys.argv[1:]
subprocess.run(["hostname", name], check=True)
subprocess.run(["mount", "--bind", boot, "/proc/sys/kernel/random/boot_id"], check=True)
for place in (private, "/dev/shm"):
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
print("ready", flush=True)
time.sleep(100_000)
"""


def command(*words: str) -> str:
    """Run a command as it would be typed and return what it prints."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        msg = f"{' '.join(words)}: {done.stderr}"
        raise RuntimeError(msg)
    return done.stdout


def loopback() -> None:
    """Have this namespace keep 127.0.0.1 to itself and send the rest of 127/8 where routes lead."""
    Path("/proc/sys/net/ipv4/conf/all/route_localnet").write_text("1")
    command("ip", "link", "set", "lo", "up")
    command("ip", "addr", "flush", "dev", "lo")
    command("ip", "addr", "add", "127.0.0.1/32", "dev", "lo")


class Host:
    """One other host: ``popen`` starts a process on it, ``cut`` and ``heal`` its cable."""

    def __init__(self, hosts: Hosts, number: int, directory: Path) -> None:
        self.name = f"host{number}"
        self.address = f"127.231.0.{number}"
        self._hosts = hosts
        self.link = f"v{number}"
        boot = directory / f"{self.name}.boot"
        boot.write_text(f"{uuid.uuid4()}\n")
        self._holder = subprocess.Popen(
            [
                "unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
                sys.executable, "-c", HOLD, self.name, str(boot), os.environ["ZBUS_RUNTIME_DIR"],
            ],
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.pid = children.split()[0]
        command("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.pid)
        command("ip", "link", "set", self.link, "master", "br0", "up")
        self.run(
            "sh", "-c",
            "echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet && ip link set lo up && ip addr flush dev lo"
            f" && ip addr add 127.0.0.1/32 dev lo && ip addr add {self.address}/24 dev eth0 && ip link set eth0 up",
        )  # fmt: skip

    def _enter(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", self.pid, "--net", "--mount", "--uts", "--pid", "--", *words]

    def run(self, *words: str) -> str:
        """Run a command on the host."""
        return command(*self._enter(words))

    def popen(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on the host."""
        return subprocess.Popen(self._enter(words), text=True, **options)

    def worker(self, trial: Path, role: str, rank: int, log: Path, *more: str) -> subprocess.Popen[str]:
        """Start the agent of one rank, reached at the host's address."""
        with log.open("a") as err:
            return self.popen(
                sys.executable, "-m", "workers", "start", "--trial-dir", str(trial), "--role", role, "--rank",
                str(rank), "--transport", "tcp", "--bind", self.address, "--grace", "2s", *more,
                stdin=subprocess.DEVNULL, stdout=err, stderr=err,
            )  # fmt: skip

    def share(self, directory: Path) -> None:
        """Give the host a mount of its own of a shared directory."""
        self.run("mount", "--bind", str(directory), str(directory))

    def cut(self, *read_only: Path) -> None:
        """Drop every packet to and from the host; what it shares of ``read_only`` it cannot write any more."""
        for side in ("INPUT", "OUTPUT"):
            self.run("iptables", "-A", side, "!", "-i" if side == "INPUT" else "-o", "lo", "-j", "DROP")
        for directory in read_only:
            self._retry("mount", "-o", "remount,ro,bind", str(directory))

    def heal(self, *read_only: Path) -> None:
        """Undo ``cut``."""
        for directory in read_only:
            self.run("mount", "-o", "remount,rw,bind", str(directory))
        for side in ("INPUT", "OUTPUT"):
            self.run("iptables", "-D", side, "!", "-i" if side == "INPUT" else "-o", "lo", "-j", "DROP")

    def _retry(self, *words: str) -> None:
        """Run a command until it works: a file that is being written keeps a disk from turning read-only."""
        until = time.monotonic() + 5 * SCALE
        while True:
            try:
                self.run(*words)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
            else:
                return

    def close(self) -> None:
        """End the host with all that runs on it."""
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()


class Hosts:
    """This process's host, ``address``, and others; a context manager that ends them.

    Args:
        count: How many others.
        directory: For files of the hosts.
    """

    def __init__(self, count: int, directory: Path) -> None:
        self.address = "127.231.0.1"
        self._stack = ExitStack()
        loopback()
        command("ip", "link", "add", "br0", "type", "bridge")
        command("ip", "addr", "add", f"{self.address}/24", "dev", "br0")
        command("ip", "link", "set", "br0", "up")
        self.others: list[Host] = []
        with self._stack:
            for number in range(2, 2 + count):
                host = Host(self, number, directory)
                self._stack.callback(host.close)
                self.others.append(host)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def wait_for(done: Any, what: str, seconds: float = 20.0) -> Any:
    """Wait for something true and return it."""
    until = time.monotonic() + seconds * SCALE
    while True:
        value = done()
        if value:
            return value
        if time.monotonic() > until:
            msg = f"{what} did not come true; last {value!r}"
            raise AssertionError(msg)
        time.sleep(0.02)
