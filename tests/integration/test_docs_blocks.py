"""Every code block of the README and the documentation: Python runs, commands run, YAML loads.

A block that cannot run on a test machine has a line ``<!-- not run: REASON -->`` before it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from waiting import scaled

pytestmark = [pytest.mark.ci, pytest.mark.alone, pytest.mark.timeout(scaled(600))]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
    if "_build" not in page.parts
)
ELSEWHERE = {
    "README.md": "integration/test_readme.py",
    "docs/how-to/test-with-faults.md": "faults/test_network_howto.py",
}
"""Pages whose Python is run by tests of their own."""

TRIAL = "20261130-0912-k3f"
"""The trial of the pages' examples."""

FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+?) -->\n+)?^```(?P<language>[^\s{`]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SHOWN = ("text", "json")
"""Languages of blocks that show output or data."""

SHELL = ("sh", "console")
SERVING = ("traceview view", "traceview collect")
"""Commands that go on until they are told to end."""

LIVE = """
    from controller import Controller, Role
    bus = Controller.launch("live", roles={"actor": Role("engines:Actor", replicas=2)})
    actor, batch, batches, step = bus.group("actor"), [1, 2, 3], [[1, 2, 3]] * 3, 1
"""


def writing(page: str, *names: str) -> str:
    """Return what writes the first Python blocks of a page to files of these names, as its reader would."""
    return f"""
        import re
        from pathlib import Path
        page = Path({str(ROOT / page)!r}).read_text()
        for name, text in zip({names!r}, re.findall("^```python\\n(.*?)^```", page, re.M | re.S)):
            Path(name).write_text(text)
    """


BEFORE = {
    "docs/how-to/find-a-stuck-rank.md": LIVE,
    "docs/how-to/read-an-error.md": LIVE,
    "docs/how-to/read-a-trace.md": """
        import numpy
        n, reward, queue = 3, numpy.ones(3), [1, 2]
    """,
    "docs/how-to/take-over-a-trial.md": """
        import os, subprocess, sys
        code = (
            "import time; from controller import Controller, Role\\n"
            "actor = Role('engines:Actor', replicas=2, orphans='wait')\\n"
            "bus = Controller.launch('demo', {'actor': actor}, trial='20261130-0912-k3f')\\n"
            "print('ready', flush=True); time.sleep(600)"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as first:
            first.stdout.readline()
            first.kill()
    """,
    "docs/how-to/trace-a-run.md": LIVE
    + """
    import asyncio, types
    import zbus
    buffer = []
    async def generate(prompt): return "text"
    def evaluate(): return 1.0
    """,
    "docs/how-to/move-from-areal.md": writing("docs/how-to/move-from-areal.md", "counting.py"),
    "docs/how-to/move-from-verl.md": writing("docs/how-to/move-from-verl.md", "scoring.py"),
    "docs/reference/codec.md": """
        import enum
        class Colour(enum.Enum):
            RED = 1
    """,
    "docs/reference/generation.md": writing("docs/reference/generation.md", "policy.py", "task.py"),
    "docs/reference/registry.md": """
        from zbus.registry import FileRegistry as MyRegistry
    """,
}
"""What the blocks of a page assume: names from the reader's own program."""

BETWEEN = {("docs/reference/api.md", 2): LIVE}
"""As BEFORE, for one block of a page: another program begins there."""

AFTER = {
    "docs/how-to/trace-a-run.md": """
        import zbus.trace
        zbus.trace.configure(zbus.trace.TraceConfig(root="traces", level="full", sessions=True), role="rollout", rank=0)
        asyncio.run(work(types.SimpleNamespace(id=7)))
        zbus.trace.reset()
        from pathlib import Path
        records = Path("traces/rollout/sessions_0.jsonl").read_text().splitlines()
        assert sum('"accepted"' in record and '"reward"' in record for record in records) == 8
        bus.close()
    """,
    "docs/how-to/find-a-stuck-rank.md": "bus.close()",
    "docs/how-to/read-an-error.md": "bus.close()",
    "docs/how-to/read-a-trace.md": "import asyncio\nasyncio.run(rollout(1))",
    "docs/reference/api.md": "bus.close()\nassert texts == ['X', 'Y']",
}
"""What shows that the blocks of a page did their work."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, line and why it is not run."""

    language: str
    text: str
    line: int
    why: str | None


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = FENCE.finditer(text)
    return [Block(m["language"], m["text"], text.count("\n", 0, m.start()) + 1, m["why"]) for m in found]


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block: its lines, or in ``console`` those after the prompt."""
    lines = [line.partition("  #")[0].strip() for line in block.text.splitlines()]
    if block.language == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    """A block names its language, so that none escapes the tests below; one that is not run says why."""
    kinds = {"python", "yaml", *SHELL, *SHOWN}
    wrong = [f"line {block.line}: {block.language!r}" for block in blocks(page) if block.language not in kinds]
    assert wrong == []
    assert (ROOT / page).read_text().count("<!-- not run:") == sum(block.why is not None for block in blocks(page))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Iterator[Path]:
    """Give a directory with the trial of the pages, two more to compare, and traces of another tool."""
    path = tmp_path_factory.mktemp("docs")
    for file in (ROOT / "tests" / "docs_stage").iterdir():
        if file.is_file():
            shutil.copy(file, path)
    for trial in (TRIAL, "before", "after"):
        run(path, f"zbus-controller run train.yaml -t {trial}")
    shutil.copytree(path / "zbus-runs" / "demo" / TRIAL / "traces", path / "perf_tracer")
    (path / "examples").symlink_to(ROOT / "examples")
    yield path
    run(path, "zbus-controller stop --all-mine --force", wanted=None)


def environment(path: Path) -> dict[str, str]:
    """Return the environment of commands in ``path``: its modules can be imported, no browser opens."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": programs, "PYTHONPATH": str(path), "BROWSER": "true", "ZBUS_ROOT": "zbus-runs"}


def run(path: Path, command: str, wanted: int | None = 0, within: Path | None = None) -> str:
    """Run a command in ``path``, or ``within``; its stdout."""
    done = subprocess.run(
        shlex.split(command),
        cwd=within or path,
        env=environment(path),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=scaled(240),
    )
    assert wanted is None or done.returncode == wanted, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def serving(path: Path, command: str) -> Iterator[None]:
    """Start a command that goes on for ever, wait until it says something, and end it later as Ctrl-C does."""
    with subprocess.Popen(
        shlex.split(command),
        cwd=path,
        env=environment(path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        yield
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(scaled(20)) in (0, 130), f"{command}: {process.returncode}\n{said}{rest}"
    assert said, command
    assert "error[" not in said + rest, said + rest


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language == "python" for b in blocks(p))])
def test_python_blocks_run(scratch, page):
    """The Python of a page, put together in its order, runs as it stands."""
    if page in ELSEWHERE:
        assert Path(page).name in (ROOT / "tests" / ELSEWHERE[page]).read_text()
        return
    name = re.sub(r"\W", "_", page.removesuffix(".md"))
    own = scratch / name
    own.mkdir()
    parts = [BEFORE.get(page, "")]
    for number, block in enumerate(b for b in blocks(page) if b.language == "python" and b.why is None):
        parts += [BETWEEN.get((page, number), ""), block.text]
    parts.append(AFTER.get(page, ""))
    if page == "docs/reference/api.md":  # workers import the engine from its module
        (scratch / f"{name}_engine.py").write_text(parts[2])
        parts[2] = f"from {name}_engine import *\n"
    text = "\n".join(map(textwrap.dedent, parts))
    if re.search(r"^def test_", text, re.MULTILINE):
        (own / "test_page.py").write_text(text)
        run(scratch, f"{sys.executable} -m pytest -q -p no:cacheprovider test_page.py", within=own)
    else:
        (own / "page.py").write_text(text)
        run(scratch, f"{sys.executable} page.py", within=own)


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language in SHELL for b in blocks(p))])
def test_commands_run(scratch, page):
    """Each command of a page ends well in a directory that has what the page speaks of."""
    shell = [block for block in blocks(page) if block.language in SHELL and block.why is None]
    with ExitStack() as stack:
        for command in (command for block in shell for command in commands(block)):
            if command.startswith(SERVING):
                stack.enter_context(serving(scratch, command))
            else:
                run(scratch, command)


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language == "yaml" for b in blocks(p))])
def test_yaml_blocks_load(page):
    """Each YAML block is YAML."""
    for block in blocks(page):
        if block.language == "yaml":
            assert yaml.safe_load(block.text) is not None
