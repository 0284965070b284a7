"""Make an environment in which the compiled build of this tree is installed: ``python tools/compiled.py PLACE``.

It is made once for each state of the sources, in about a minute and a half. Everything else in it is what the
environment has whose Python runs this. The build works on a copy, because a build inside the tree would leave extension
modules that the development install then imports.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("zbus", "workers", "controller", "traceview")
BESIDE = ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "examples/g2p/LICENSE-cmudict")


def sources() -> list[Path]:
    """Return the files that a wheel is made of."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".json")]
    return [*sorted(found), *(path for package in PACKAGES for path in (ROOT / package).glob("py.typed"))]


def facts() -> str:
    """Return what tells whether an environment is still good."""
    digest = hashlib.sha256(f"{sys.version} {sys.prefix}".encode())
    for path in [*sources(), *(ROOT / name for name in BESIDE), Path(__file__)]:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def wheel(into: Path) -> Path:
    """Build the compiled wheel, and return it; what the build says is shown where it fails."""
    with tempfile.TemporaryDirectory(prefix="zb-compiled-") as directory:
        copy = Path(directory)
        for path in [*sources(), *(ROOT / name for name in BESIDE)]:
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-build-isolation", "-w", os.fspath(into), os.fspath(copy)]
        done = subprocess.run(command, env={**os.environ, "ZBUS_COMPILE": "1"}, check=False)
        if done.returncode:
            sys.exit("compiled: the build failed, for the reason above")
    (made,) = into.glob("zbus_runtime-*.whl")
    return made


def environment(place: Path) -> Path:
    """Make the environment unless it is there and good; return its Python."""
    python, stamp = place / "bin" / "python", place / "zb-facts"
    wanted = facts()
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return python
        print("compiled: building, which takes a minute or two", file=sys.stderr)
        venv.create(place, clear=True, symlinks=True)
        with tempfile.TemporaryDirectory(prefix="zb-wheel-") as directory:
            made = wheel(Path(directory))
            install = [sys.executable, "-m", "pip", "--python", os.fspath(python), "install", "-q"]
            subprocess.run([*install, "--disable-pip-version-check", "--no-deps", os.fspath(made)], check=True)
        # A .pth file's line is searched behind the environment's own packages, and .pth files there (the development
        # install's is one) are not read.
        site = sysconfig.get_path("purelib", vars={"base": os.fspath(place)})
        (Path(site) / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    print(environment(Path(sys.argv[1]).absolute()))
