from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from collections.abc import AsyncIterator
from typing import assert_type

import zbus
from controller.futures import BatchFuture
from controller.group import Group
from zbus import AnyOne, Concat, PerRank, RankZero, Same, Split


class Actor(zbus.Engine):
    @zbus.endpoint(Split("dp"), collect=PerRank(), effect="once")
    def train(self, batch: list[int], step: int = 0) -> dict[str, float]:
        return {"loss": 0.0}

    @zbus.endpoint(Split("dp"), collect=Concat())
    def logprobs(self, batch: list[int]) -> list[float]:
        return [0.0]

    @zbus.endpoint(collect=Same())
    def version(self) -> int:
        return 1

    @zbus.endpoint
    def bare(self) -> str:
        return ""

    @zbus.endpoint()
    def empty(self) -> str:
        return ""

    @zbus.endpoint(RankZero())
    def save(self, path: str) -> None: ...

    @zbus.endpoint(AnyOne(), lane="gen")
    async def generate(self, prompt: str) -> str:
        return prompt

    @zbus.endpoint(AnyOne(), lane="gen")
    async def tokens(self, prompt: str) -> AsyncIterator[int]:
        yield 1


def use(group: Group, engine: Actor) -> None:
    assert_type(engine.train([1], 2), dict[str, float])
    assert_type(group.method(Actor.train)([1], step=2), list[dict[str, float]])
    assert_type(group.method(Actor.train).submit([1]), BatchFuture[list[dict[str, float]]])
    assert_type(group.method(Actor.logprobs)([1]), list[float])
    assert_type(group.method(Actor.version)(), int)
    assert_type(group.method(Actor.bare)(), list[str])
    assert_type(group.method(Actor.empty)(), list[str])
    assert_type(group.method(Actor.generate)("x"), str)
    assert_type(group.method(Actor.tokens)("x"), list[int])
    group.method(Actor.save)("x")


async def use_async(group: Group) -> None:
    assert_type(await group.method(Actor.generate).aio("x"), str)
    assert_type(await group.method(Actor.train).submit([1]), list[dict[str, float]])
"""

WRONG = """
group.method(Actor.train)("text")
group.method(Actor.train)([1], stp=2)
group.method(Actor.save)()
zbus.endpoint(effect="twice")
zbus.endpoint("dp")
"""


def _mypy(directory: Path, code: str) -> subprocess.CompletedProcess[str]:
    directory.joinpath("user_code.py").write_text(code)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file="]
    command += ["--cache-dir", str(directory / "cache"), str(directory / "user_code.py")]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)


@pytest.mark.timeout(300)
def test_calls_keep_the_engines_signature(tmp_path):
    """A checker knows arguments and answers of every endpoint, merged as declared, and refuses wrong ones."""
    lines = WRONG.strip().splitlines()
    body = "\n".join(f"    {line}" for line in lines)
    shown = _mypy(tmp_path, f"{CODE}\n\ndef wrong(group: Group) -> None:\n{body}\n")
    first = CODE.count("\n") + 4
    errors = {int(line.split(":")[1]) for line in shown.stdout.splitlines() if ": error:" in line}
    assert errors == set(range(first, first + len(lines))), shown.stdout
