"""Ranks that end inside a call, seen through ``zbus-controller run``: the block, the exit code, and nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from run_kit import RunKit, normal, run_kit
from waiting import scaled, wait_until, within

pytestmark = pytest.mark.alone
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "deaths"


@pytest.fixture
def kit(tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunKit]:
    """Give a job of two ranks, and check at the end that no process is left."""
    yield from run_kit(tmp_path, short_dir, monkeypatch)


def check_golden(name: str, text: str) -> None:
    """Compare with the golden file; with ZBUS_TEST_GOLDEN=write make it.

    The block ends with its ``more:`` line; what is logged after it, as of ranks too slow to stop, is not part of it.
    """
    text = re.sub(r"(?ms)^(more: [^\n]*).*", r"\1", text)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("ZBUS_TEST_GOLDEN") == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == file.read_text(encoding="utf-8")


def settled_call(how: str, peers: str = "") -> list[str]:
    """Return overrides: one good step, so that the worker is warm, then ``how``."""
    return ["params.good_steps=1", f"params.how={how}", f"params.peers={peers}"]


def test_kill_9_in_a_step_shows_its_cause_within_a_second(kit: RunKit) -> None:
    """SIGKILL of a rank whose peer hangs: the whole block within 1 s, exit 4, nothing running afterwards."""
    running = kit.start("params.how=sleep", "params.peers=sleep")
    kit.wait_log("step: sleep", 1)
    kit.wait_log("step: ", 0)
    time.sleep(0.5)  # the worker confirms a call after some 2 ms; nothing shows that from outside
    began = time.monotonic()
    os.kill(kit.pid(1), signal.SIGKILL)
    running.wait_err("more: zbus-controller explain ZB0301")
    took = time.monotonic() - began
    done = running.end()
    assert took < within(1.0), f"{took:.2f} s"
    assert done.code == 4
    check_golden("kill_9_in_a_step", normal(done.block))
    assert not kit.processes()
    error = kit.summary()["error"]
    assert (error["rank"], error["worker_signal"], error["outcome"]) == (1, 9, "UNKNOWN")


@pytest.mark.parametrize("how", ["exit:7", "kill:9", pytest.param("kill:6", marks=pytest.mark.ci)])
def test_the_block_names_exactly_how_a_rank_ended(kit: RunKit, how: str) -> None:
    """Exit code or signal by name, the peers that finished, log tail, crash file, hint; exit code 4."""
    done = kit.run(*settled_call(how))
    assert done.code == 4
    assert done.err.count("error[") == 1
    check_golden(how.replace(":", "_"), normal(done.block))
    report = json.loads((kit.trial.path / "crash" / "actor.1.0.json").read_text())
    verb, _, number = how.partition(":")
    assert report["exit"]["exit_code" if verb == "exit" else "signal"] == int(number)


def test_a_rank_that_somebody_terminates_ends_its_call_first(kit: RunKit) -> None:
    """SIGTERM from outside: the running call is answered, then the rank leaves; the next call says who left and how."""
    done = kit.run(*settled_call("kill:15"))
    assert done.code == 4, done.err
    assert "actor/1" in done.block
    assert "`me`" in done.block
    assert "exited with code 143" in done.block or "is leaving" in done.block, "whichever was seen first"


def test_a_segfault_shows_the_interpreters_own_report(kit: RunKit) -> None:
    """SIGSEGV is named, and the log tail is the Python stack that the fault handler wrote."""
    done = kit.run(*settled_call("segfault"))
    assert done.code == 4
    block = done.block
    assert block.startswith("error[ZB0301]: actor/1 died during `step`")
    assert "exit     killed by SIGSEGV" in block
    assert "Fatal Python error: Segmentation fault" in block
    assert "do_segfault" in block
    assert kit.exits()[1].signal == signal.SIGSEGV


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise:loss is NaN", ["ValueError: loss is NaN", "in do_raise"]),
        ("sysexit:3", ["SystemExit: 3", "in do_sysexit"]),
        ("unprintable", ["Unprintable", "in do_unprintable"]),
    ],
)
def test_what_an_engine_raises_is_an_error_of_the_call_and_no_death(kit: RunKit, how: str, words: list[str]) -> None:
    """Exceptions, SystemExit, and one whose repr raises: type, text, frame; exit 1; ranks end in order."""
    done = kit.run(*settled_call(how))
    assert done.code == 1, done.err
    for word in ("error[ZB0401]", "actor/1", "fault_engines.py", *words):
        assert word in done.block
    assert "executor.py" not in done.block
    assert "actor/0 finished this call; nothing was re-run" in done.block
    assert [(ended.exit_code, ended.signal) for ended in kit.exits()] == [(0, None), (0, None)]


def test_a_rank_that_dies_while_others_hang_is_root_and_they_are_collateral(kit: RunKit) -> None:
    """The hanging peer is named with how far it is; the one that raised is the cause, at once."""
    kit.write(replicas=3)
    running = kit.start(*settled_call("raise:root of it all", "sleep"))
    began = None
    running.wait_err("driver")
    kit.wait_log("step: raise", 1)
    began = time.monotonic()
    running.wait_err("more: ")
    assert time.monotonic() - began < within(1.5)
    done = running.end()
    assert done.code == 1
    assert "ValueError: root of it all" in done.block
    assert "peers    actor/0, 2 still running it; nothing was re-run" in done.block


def test_a_child_that_holds_stdout_hides_nothing(kit: RunKit) -> None:
    """A rank dies and leaves a child with its log open: the death is told all the same, and the child ends too."""
    done = kit.run(*settled_call("child:kill:9"))
    assert done.code == 4
    assert "killed by SIGKILL" in done.block
    (child,) = [line.split()[1] for line in kit.log(1).splitlines() if line.startswith("child")]
    wait_until(lambda: not _alive(int(child)), what="the child to end")


def _alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_a_death_outside_any_call_is_told_by_the_next_one(kit: RunKit) -> None:
    """A rank dies while the driver does something else: a warning at once; the next call says who and how."""
    go = kit.directory / "go"
    running = kit.start(f"target={kit_driver('idle')}", f"params.go={go}")
    running.wait_err("ready")
    os.kill(kit.pid(1), signal.SIGKILL)
    running.wait_err("actor/1 died outside any call: killed by SIGKILL")
    go.touch()
    done = running.end()
    assert done.code == 4
    check_golden("outside_any_call", normal(done.block))


def test_the_call_right_after_a_death_names_it_too(kit: RunKit) -> None:
    """No race: a call that comes before the exit is known waits for the verdict and then tells it."""
    go = kit.directory / "go"
    running = kit.start(f"target={kit_driver('idle')}", f"params.go={go}")
    running.wait_err("ready")
    victim = kit.pid(1)
    os.kill(victim, signal.SIGKILL)
    go.touch()
    done = running.end()
    assert done.code == 4
    assert "actor/1 died" in done.block
    assert "killed by SIGKILL" in done.block


def kit_driver(function: str) -> str:
    """Name another function of the driver."""
    from run_kit import DRIVERS

    return f"{DRIVERS}/fault_driver.py:{function}"


def test_a_stopped_worker_is_no_dead_worker(kit: RunKit) -> None:
    """SIGSTOP for 3 s in a call: nothing is declared, nothing runs twice, the call ends well."""
    running = kit.start("params.good_steps=1", "params.how=sleep:0.2", "params.peers=sleep:0.2")
    kit.wait_log("step: sleep", 1)
    pid = kit.pid(1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3.0)  # the rule is that nothing happens meanwhile
    os.kill(pid, signal.SIGCONT)
    done = running.end()
    assert done.code == 0, done.err
    assert kit.log(1).count("step: sleep") == 1
    assert "died" not in done.err


@pytest.mark.ci
@pytest.mark.parametrize(("how", "root"), [("kill:9", "WorkerLost"), ("raise:my rank only", "RemoteValueError")])
def test_the_cause_comes_before_the_collectives_timeout(tmp_path: Path, how: str, root: str) -> None:
    """One rank dies or raises while the others sit in a gloo collective: its own error is root in under 2 s.

    A death restarts the group by policy; after an exception, which ends no process, the driver restarts it.
    """
    pytest.importorskip("torch")
    from controller import Role
    from launching import launch
    from run_kit import DRIVERS
    from zbus import BatchError

    role = Role(f"{DRIVERS}/fault_engines.py:Collective", replicas=3, preload=["torch"], restart="all")
    with launch(tmp_path, {"actor": role}, startup_timeout=120) as bus:
        actor = bus.group("actor")
        assert actor.reduce("") == [3.0, 3.0, 3.0]
        began = time.monotonic()
        with pytest.raises(BatchError) as caught:
            actor.reduce(how)
        assert time.monotonic() - began < within(2.0)
        assert type(caught.value.root).__name__ == root
        assert caught.value.root.rank == 1
        assert "fault_engines.py" in (caught.value.root.remote_traceback or "fault_engines.py")
        took = time.monotonic() - began
        others = {error.rank for error in caught.value.collateral} | set(caught.value.late)
        assert others == {0, 2}
        if root == "RemoteValueError":  # nobody has died: the others sit there until somebody ends them
            assert set(caught.value.late) == {0, 2}
            assert all("in reduce" in words and "all_reduce" in words for words in caught.value.late.values())
            bus.restart("actor", timeout=scaled(60))
        assert actor.reduce.options(retries=0, deadline=scaled(60))("") == [3.0, 3.0, 3.0]
        back = time.monotonic() - began
        assert back < within(40), "not after the collective's timeout of two minutes"
        assert {one["start"] for one in actor.me()} == {1}
        print(f"root cause after {took:.2f} s, the group anew after {back:.1f} s")


_MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.mark.ci
def test_an_out_of_memory_kill_is_called_that(kit: RunKit) -> None:
    """A rank over its cgroup's limit: the block has the kernel's counters and a hint about memory."""
    group = _MEMORY / f"zbus-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(96 << 20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no writable v1 memory cgroup: {error}")
    try:
        done = kit.run(*settled_call(f"cgroup:{group}@400"))
        assert done.code == 4
        check_golden("out_of_memory", normal(done.block).replace(str(group), "GROUP"))
    finally:
        wait_until(lambda: (group / "cgroup.procs").read_text() == "", what="the cgroup empty")
        group.rmdir()
