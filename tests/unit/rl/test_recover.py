from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from controller.recover import Recover, RecoverState
from waiting import scaled
from zbus.config import TrialDir
from zbus.errors import RecoverError
from zbus.testing import FakeClock


class Counter:
    """A training role whose whole state is one number; also a part of the driver."""

    def __init__(self, value=0):
        self.value = value

    def save(self, path):
        Path(path).mkdir()
        for rank in range(2):
            (Path(path) / f"rank{rank}.bin").write_bytes(str(self.value).encode() * 500)
        (Path(path) / "value").write_text(str(self.value))

    def load(self, path):
        self.value = int((Path(path) / "value").read_text())

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.fixture
def trial(tmp_path):
    """Make an empty trial and hold it."""
    trial = TrialDir.create(tmp_path, "demo", "t1")
    yield trial
    trial.unlock()


def _dumped(trial, steps=3, **named):
    """Take steps, each dumped; the engine's value is 10 times the step."""
    engine = Counter()
    recover = Recover(trial, engines={"actor": engine}, every_steps=1, **named)
    recover.start(False)
    for step in range(1, steps + 1):
        engine.value = 10 * step
        recover.step(RecoverState(step=step))
    return recover


def _tree(trial):
    return {
        str(path.relative_to(trial.path)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in trial.path.rglob("*")
    }


def _names(trial):
    return sorted(entry.name for entry in (trial.checkpoints / "recover").iterdir())


def test_everything_comes_back_as_it_was(trial):
    """Engines, parts of the driver, random generators and the loop's own state, of any kind that the bus carries."""
    engine, loader, order = Counter(7), Counter(1), np.random.default_rng(5)
    recover = Recover(trial, engines={"actor": engine}, parts={"data": loader}, generators={"order": order})
    recover.start(False)
    random.seed(3)
    order.random(3)
    engine.value, loader.value = 8, 2
    state = RecoverState(
        step=12, epoch=1, position={"row": 640}, version=3, staleness={"accepted": 96}, metrics_step=11,
        pending=[("prompt", np.arange(3), b"\x00", 2**80)], extras={"best": float("inf"), 3: None},
    )  # fmt: skip
    assert recover.step(state, now=True)
    expected = (random.random(), order.random())

    engine, loader, order = Counter(), Counter(), np.random.default_rng(99)
    random.seed(0)
    again = Recover(trial, engines={"actor": engine}, parts={"data": loader}, generators={"order": order})
    found = again.start(True)

    assert (engine.value, loader.value) == (8, 2)
    assert (random.random(), order.random()) == expected
    ((text, array, octets, large),) = found.pending
    assert (text, array.tolist(), octets, large) == ("prompt", [0, 1, 2], b"\x00", 2**80)
    assert isinstance(found.pending, list)
    for name in ("step", "epoch", "position", "version", "staleness", "metrics_step", "extras"):
        assert getattr(found, name) == getattr(state, name)


def test_a_run_begins_with_a_dump_of_its_first_state(trial):
    """So a run that is killed before its first periodic dump is gone on with, not begun anew."""
    recover = Recover(trial, engines={"actor": Counter(1)})
    assert recover.start(False).step == 0
    engine = Counter()
    assert Recover(trial, engines={"actor": engine}).start(True).step == 0
    assert engine.value == 1


def test_a_run_killed_before_its_first_dump_begins_anew_and_says_so(trial, caplog):
    """No step was taken then, so none is lost; the log tells it."""
    with caplog.at_level(logging.WARNING, "zbus"):
        assert Recover(trial, engines={"actor": Counter(1)}).start(True).step == 0
    assert "ended before its first dump" in caplog.text
    assert _names(trial) == ["00000000"]


def test_dumps_come_by_steps_and_by_time(trial):
    """What comes first; a step that is dumped is not dumped again, asked for or not."""
    clock = FakeClock()
    recover = Recover(trial, every_steps=4, every_s=60, clock=clock)
    recover.start(False)
    dumped = []
    for step in range(1, 12):
        clock.advance(61 if step == 6 else 1)
        if recover.step(RecoverState(step=step)):
            dumped.append(step)
    assert dumped == [4, 6, 10]
    assert recover.step(RecoverState(step=11), now=True)
    assert not recover.step(RecoverState(step=11), now=True)


def test_the_newest_dumps_stay(trial):
    """Keep counts whole dumps, the newest among them, and nothing else is left."""
    _dumped(trial, 5, keep=2)
    assert _names(trial) == ["00000004", "00000005"]
    assert Recover(trial).latest().state.step == 5


def test_looking_changes_nothing(trial):
    """B84: to look for a dump makes no directory, sweeps nothing and touches no file, whole or broken."""
    before = _tree(trial)
    assert Recover(trial).latest() is None
    assert _tree(trial) == before

    _dumped(trial)
    (trial.checkpoints / "recover" / ".new-x").mkdir()
    before = _tree(trial)
    assert Recover(trial).latest().state.step == 3
    (trial.checkpoints / "recover" / "00000003" / "state.json").unlink()
    del before["checkpoints/recover/00000003/state.json"]
    before.pop("checkpoints/recover/00000003")
    with pytest.raises(RecoverError):
        Recover(trial).latest()
    after = _tree(trial)
    after.pop("checkpoints/recover/00000003")
    assert after == before


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path):
    os.truncate(path, path.stat().st_size - 2)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda d: _flip(d / "engines/actor/rank1.bin"), "the contents of engines/actor/rank1.bin are not those"),
        (lambda d: _cut(d / "engines/actor/rank0.bin"), "rank0.bin has 998 bytes, 1,000 were written"),
        (lambda d: (d / "engines/actor/value").unlink(), "engines/actor/value is missing"),
        (lambda d: _flip(d / "values.bin"), "the contents of values.bin are not those"),
        (lambda d: (d / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda d: _cut(d / "manifest.json"), "manifest.json is damaged"),
        (lambda d: _flip(d / "manifest.json"), "manifest.json is damaged"),
        (lambda d: (d / "manifest.json").write_text("[]"), "manifest.json is damaged"),
        (lambda d: (shutil.rmtree(d), shutil.copytree(d.parent / "00000002", d)), "it is a copy of dump 00000002"),
        (shutil.rmtree, "it is missing"),
    ],
    ids=[
        "flipped",
        "cut",
        "no part",
        "values",
        "no manifest",
        "cut manifest",
        "flipped manifest",
        "other manifest",
        "copy",
        "gone",
    ],
)
def test_a_broken_dump_is_refused_with_the_reason(trial, damage, complaint):
    """B84: never another state in silence: what is wrong, and which older dump is whole; fallback takes that one."""
    _dumped(trial, keep=2)
    damage(trial.checkpoints / "recover" / "00000003")

    engine = Counter(-1)
    recover = Recover(trial, engines={"actor": engine})
    with pytest.raises(RecoverError, match="the newest dump, of step 3, cannot be used") as caught:
        recover.start(True)
    assert complaint in str(caught.value)
    assert complaint in caught.value.facts["wrong"]
    assert caught.value.facts["whole"].endswith("00000002, 1 steps before")
    assert "recover.fallback=true" in caught.value.hint
    assert engine.value == -1


def test_fallback_goes_on_from_the_newest_whole_dump_and_keeps_the_broken_one(trial, caplog):
    """Asked for by an option; the broken dump stays for who wants to look, and is never the newest again."""
    _dumped(trial, keep=3)
    _cut(trial.checkpoints / "recover" / "00000003" / "values.bin")

    engine = Counter()
    recover = Recover(trial, engines={"actor": engine}, fallback=True)
    with caplog.at_level(logging.WARNING, "zbus"):
        assert recover.start(True).step == 2
    assert engine.value == 20
    assert "recover.fallback is set, so the run goes on from step 2" in caplog.text
    assert Recover(trial).latest().state.step == 2
    assert [name.rpartition("-")[0] for name in _names(trial) if name.startswith("b")] == ["broken-00000003"]
    recover.step(RecoverState(step=3), now=True)
    assert Recover(trial).latest().state.step == 3


def test_with_no_whole_dump_even_fallback_is_refused(trial):
    """It never becomes a start from step 0."""
    _dumped(trial, keep=1)
    shutil.rmtree(trial.checkpoints / "recover")

    with pytest.raises(RecoverError, match="step 3, cannot be used: it is missing") as caught:
        Recover(trial, engines={"actor": Counter()}, fallback=True).start(True)
    assert "no older dump is whole" in caught.value.hint
    assert "--overwrite" in caught.value.hint


def test_a_step_that_is_taken_again_gets_a_dump_of_its_own(trial):
    """A resumed run never writes over the dump that it might need."""
    _dumped(trial, 3, keep=2)
    recover = Recover(trial, engines={"actor": Counter(99)}, keep=2)
    dump = recover.latest()
    recover.restore(dump)
    recover.dump(RecoverState(step=3, version=8))

    assert _names(trial) == ["00000003", "00000003.1"]
    assert Recover(trial).latest().state.version == 8


def test_a_trial_with_dumps_is_not_begun_anew_by_mistake(trial):
    """Only --resume or --overwrite may follow."""
    _dumped(trial)
    with pytest.raises(RecoverError, match="has dumps already"):
        Recover(trial).start(False)


@pytest.mark.parametrize("what", ["roles", "parts", "random generators"])
def test_a_dump_of_another_run_is_refused_before_anything_is_loaded(trial, what):
    """Roles, parts and generators must be those that were dumped."""
    _dumped(trial)
    engine = Counter(-1)
    other = {
        "roles": {"engines": {"actor": engine, "critic": engine}},
        "parts": {"engines": {"actor": engine}, "parts": {"data": engine}},
        "random generators": {"engines": {"actor": engine}, "generators": {"order": np.random.default_rng(0)}},
    }[what]
    with pytest.raises(RecoverError, match=f"of a run with other {what}"):
        Recover(trial, **other).start(True)
    assert engine.value == -1


class Failing(Counter):
    def save(self, path):
        super().save(path)
        raise ConnectionError("rank 1 died")


def test_a_dump_that_fails_leaves_the_one_before_and_nothing_else(trial):
    """What the engine raises is raised; no half of a dump is ever listed."""
    _dumped(trial, 2)
    recover = Recover(trial, engines={"actor": Failing()})
    with pytest.raises(ConnectionError):
        recover.dump(RecoverState(step=3))
    assert _names(trial) == ["00000001", "00000002"]
    assert recover.latest().state.step == 2


def test_a_step_before_the_start_is_refused(trial):
    """Without the first dump, a killed run would have to begin anew."""
    with pytest.raises(RecoverError, match=r"Recover\.start was not called"):
        Recover(trial).step(RecoverState(step=1))


@pytest.mark.parametrize("position", [(1, 2), {1: 2}, float("nan"), object()])
def test_a_state_that_would_not_come_back_is_refused(trial, position):
    """What JSON would change or refuse is named, with the place where it may stand."""
    with pytest.raises(RecoverError, match=r"position=.* is not plain data") as caught:
        Recover(trial).start(False, RecoverState(position=position))
    assert "extras" in caught.value.hint
    assert _names(trial) == []


def test_a_link_in_a_dump_is_refused(trial):
    """What it points to may change or go."""

    class Links(Counter):
        def save(self, path):
            Path(path).symlink_to("/etc/hostname")

    with pytest.raises(RecoverError, match="engines/actor is neither"):
        Recover(trial, engines={"actor": Links()}).start(False)


def test_a_state_of_another_format_is_refused(trial):
    """A later zbus may keep more; what this one does not know it does not guess."""
    _dumped(trial, 1)
    dump = trial.checkpoints / "recover" / "00000001"
    state = json.loads((dump / "state.json").read_text()) | {"schema": "zbus.recover/9"}
    (dump / "state.json").write_text(json.dumps(state))
    from controller.dumps import Name, _seal

    (dump / "manifest.json").unlink()
    _seal(dump, Name(1))
    with pytest.raises(RecoverError, match=r"written as zbus\.recover/9, this version reads zbus\.recover/1"):
        Recover(trial).latest()


SWEEP = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_recover import Counter, Recover, RecoverState, _names
from zbus.config import TrialDir

base = Path(sys.argv[2])
outcomes = []

def dump(root, at):
    passed = 0
    def hook(event, args):
        nonlocal passed
        if event.split(".")[0] in ("open", "os", "shutil") and str(root) in str(args):
            passed += 1
            if passed == at:
                os.kill(os.getpid(), signal.SIGKILL)
    trial = TrialDir.open(root / "demo" / "t1")
    recover = Recover(trial, engines={"actor": Counter(20)}, keep=1)
    sys.addaudithook(hook)
    recover.dump(RecoverState(step=2))

TrialDir.create(base / "first", "demo", "t1")
Recover(TrialDir.open(base / "first/demo/t1"), engines={"actor": Counter(10)}).start(False, RecoverState(step=1))
at = 0
while True:
    at += 1
    root = base / "run"
    shutil.copytree(base / "first", root)
    child = os.fork()
    if not child:
        dump(root, at)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -9), (at, code)
    trial = TrialDir.open(root / "demo" / "t1")
    engine = Counter()
    recover = Recover(trial, engines={"actor": engine}, keep=1)
    state = recover.start(True)
    assert (state.step, engine.value) in ((1, 10), (2, 20)), (at, state)
    outcomes.append(state.step)
    recover.dump(RecoverState(step=3))
    assert _names(trial) == ["00000003"], (at, _names(trial))
    assert recover.latest().state.step == 3
    shutil.rmtree(root)
    if code == 0:
        break
print(len(outcomes), outcomes.count(1), outcomes.count(2), outcomes == sorted(outcomes))
"""


def test_a_kill_at_any_point_of_a_dump_leaves_the_old_or_the_new_one(tmp_path):
    """SIGKILL before each file operation of a dump in turn: the old or the new one is whole, and the run goes on."""
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, str(Path(__file__).parent), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert done.returncode == 0, done.stderr
    points, old, new, once = done.stdout.split()
    assert int(points) > 30
    assert int(old) > 10
    assert int(new) > 5
    assert once == "True"
