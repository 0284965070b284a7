"""Compiles the modules of a call's path to C where ``ZBUS_COMPILE=1`` asks for it; nothing else is stated here.

The package is pure Python otherwise. Both builds have the same modules, from the same files: mypyc makes an extension
module of each that is named below, and leaves its source beside it. See ``docs/how-to/install-the-compiled-build.md``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

from setuptools import setup

# What a call, a batch or an answer passes on both sides, as profiles show it. Left out, though on that path:
# the futures and the collecting of batches (they keep attributes in __dict__), the decoder and the spans (interpreted
# classes derive from theirs), the tracer (is referred to weakly), the client (takes stand-ins of peers), whole messages
# (Python would look for signals between a receive's return and the storing of what it returned).
COMPILED = (
    *("controller/calls.py", "controller/late.py", "controller/line.py", "controller/placement.py"),
    *("controller/placer.py", "controller/quick.py"),
    *("zbus/codec/encoder.py", "zbus/data/porter.py"),
    *("zbus/protocol/batch.py", "zbus/protocol/callee.py", "zbus/protocol/callee_answers.py"),
    *("zbus/protocol/callee_sessions.py", "zbus/protocol/callee_state.py", "zbus/protocol/caller.py"),
    *("zbus/protocol/caller_answers.py", "zbus/protocol/caller_sending.py", "zbus/protocol/caller_state.py"),
    *("zbus/protocol/frames.py", "zbus/protocol/messages.py", "zbus/protocol/stock.py"),
    *("zbus/runtime/answering.py", "zbus/runtime/batches.py", "zbus/runtime/executor.py", "zbus/runtime/intake.py"),
    *("zbus/runtime/journal.py", "zbus/runtime/marks.py", "zbus/runtime/served.py", "zbus/runtime/steps.py"),
    *("zbus/transport/arrivals.py", "zbus/transport/carrier.py", "zbus/transport/channel.py"),
    "zbus/transport/interrupts.py",
    *("zbus/transport/peer.py", "zbus/transport/reactor.py", "zbus/transport/server.py"),
    "zbus/transport/waiters.py",
)
SWITCH = "ZBUS_COMPILE"
PURE = f"or leave {SWITCH} unset for the pure Python build, which does the same more slowly"


def wanted() -> bool:
    """Tell whether the compiled build is asked for; exit where the answer is no answer."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        sys.exit(f"{SWITCH}={value!r} is neither 0 (pure Python) nor 1 (compiled)")
    return value == "1"


def requirements() -> list[str]:
    """Return what the compiler needs: itself, as pinned for linting, and the packages whose types it reads."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    lint = project["optional-dependencies"]["lint"]
    return [*(line for line in lint if line.startswith(("mypy", "types-"))), *project["dependencies"]]


def extensions() -> list[Any]:
    """Return the extension modules; exit with what is missing where they cannot be made."""
    if "editable_wheel" in sys.argv:
        sys.exit(f"{SWITCH}=1: an editable install stays interpreted, or it would run old code; install without -e")
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        sys.exit(f"{SWITCH}=1 needs a C compiler, and there is no {compiler!r}: install one (Debian: gcc), {PURE}")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        sys.exit(f"{SWITCH}=1 needs Python.h in {headers}: install the headers (Debian: python3-dev), {PURE}")
    try:
        from mypyc.build import mypycify
    except ImportError:
        sys.exit(f"{SWITCH}=1 needs mypy in the environment that builds: pip install {requirements()[0]}, {PURE}")
    # A module and a function of zbus.trace are both called `span`: where a module is named by its file, mypy reads the
    # two in an order in which it takes one for a redefinition of the other.
    options = ["--config-file=pyproject.toml", "--disable-error-code=no-redef", *COMPILED]
    return list(mypycify(options, opt_level="2", debug_level="0", multi_file=True, group_name="zbus"))


compiles = wanted()
describes = {"egg_info", "dist_info", "sdist"} & set(sys.argv)  # the steps in which nothing is built
setup(
    setup_requires=requirements() if compiles else [],
    ext_modules=extensions() if compiles and not describes else [],
)
