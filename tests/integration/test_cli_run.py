from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from waiting import scaled, wait_until, within

pytestmark = pytest.mark.alone

COMMAND = [sys.executable, "-m", "controller.cli"]

ENGINES = """
import os
import time
import zbus
from zbus import Everywhere, PerRank


class Actor(zbus.Engine):
    def setup(self, ctx):
        self.rank = ctx.rank
        if os.environ.get("SLOW_SETUP"):
            time.sleep(100)

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def add(self, x):
        return x + self.rank

    @zbus.endpoint(Everywhere(), collect=PerRank())
    def end(self, how):
        print("last words", flush=True)
        if self.rank == 1 and how == "kill":
            os.kill(os.getpid(), 9)
        if self.rank == 1 and how == "exit":
            os._exit(7)
        if how == "raise":
            raise ValueError("bad value")
        if how == "hang" or (how == "hang1" and self.rank == 1):
            time.sleep(100)
        return how


class NotAnEngine:
    pass
"""

DRIVER = """
import os
import sys


def main(run):
    print("printed by the driver")
    os.write(1, b"written by the driver\\n")
    actor = run.bus.group("actor")
    with run.progress(2, "steps") as bar:
        for step in range(2):
            bar.update(1, loss=step)
    how = run.config.get("how")
    if how == "user":
        raise RuntimeError("my own mistake")
    if how:
        print("READY", file=sys.stderr, flush=True)
        actor.end(how)
    return {"sums": actor.add(5), "resumed": run.resume, "where": str(run.trial_dir.checkpoints)}


def swallow(run):
    try:
        run.bus.group("actor").end("kill")
    except Exception as error:
        return {"caught": type(error).__name__}
"""

SCRIPT = """
import sys
from controller import Controller, Role

with Controller.launch("scripted", roles={"actor": Role("engines:Actor", replicas=1)}) as bus:
    print(bus.group("actor").add(1), sys.argv[1:])
"""

JOB = {
    "experiment": "demo",
    "target": "drv.py:main",
    "roles": {"actor": {"engine": "engines.py:Actor", "replicas": 2}},
    "trace": {"merge": False},
}


@pytest.fixture
def job(tmp_path, monkeypatch, short_dir):
    """A directory with a small job: config, engines, driver and script."""
    (tmp_path / "engines.py").write_text(ENGINES)
    (tmp_path / "drv.py").write_text(DRIVER)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(short_dir))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield tmp_path
    wait_until(lambda: not processes(tmp_path), 10, "all processes of the trial to be gone")


def processes(directory: Path) -> list[str]:
    """Return command lines, or environments, of live processes that belong to this directory's trials."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{directory}/zbus-runs".encode() in text and state != "Z":
            found.append(f"{entry.name} {text[:120]!r}")
    return found


def run(*arguments, timeout=60.0):
    """Run the command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=scaled(timeout), stdin=subprocess.DEVNULL
    )


@contextmanager
def running(*arguments):
    """Run the command, wait until its ranks are inside the call, and hand out the process."""
    before = set(Path("zbus-runs").glob("*/*"))

    def in_call():
        logs = [log for trial in set(Path("zbus-runs").glob("*/*")) - before for log in trial.glob("logs/actor/*.log")]
        return len(logs) == 2 and all("last words" in log.read_text() for log in logs)

    process = subprocess.Popen(
        [*COMMAND, "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        for line in process.stderr:
            if line == "READY\n":
                break
        wait_until(in_call, 30, "the ranks to be inside the call")
        yield process
    finally:
        process.kill()
        process.communicate()


def only_trial(job: Path) -> Path:
    """Return the one trial directory."""
    (trial,) = (job / "zbus-runs").glob("*/*")
    return trial


def test_a_config_runs_its_driver(job):
    """`run job.yaml` launches the roles, calls main(run), and leaves config, log and summary in a private directory."""
    done = run("run", "job.yaml")
    assert (done.returncode, done.stdout.splitlines()[:2]) == (0, ["printed by the driver", "written by the driver"])
    assert done.stdout.splitlines()[2].startswith("done in ")
    assert "steps  2/2  100%" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("next: ")
    trial = only_trial(job)
    summary = json.loads((trial / "summary.json").read_text())
    assert summary["status"] == "ok"
    assert summary["metrics"]["sums"] == [5, 6]
    assert summary["trial_dir"] == str(trial)
    assert yaml.safe_load((trial / "config.yaml").read_text())["roles"]["actor"]["replicas"] == 2
    assert trial.stat().st_mode & 0o777 == 0o700


def test_json_is_the_only_thing_on_stdout(job):
    """With --json stdout is one object, equal to summary.json, whatever the driver prints."""
    done = run("run", "--json", "job.yaml", "-e", "other", "-t", "t1", "--role", "actor=1")
    data = json.loads(done.stdout)
    assert data == json.loads((job / "zbus-runs" / "other" / "t1" / "summary.json").read_text())
    assert (data["schema"], data["metrics"]["sums"]) == ("zbus.run/1", [5])
    assert "printed by the driver\n" in done.stderr
    assert "written by the driver\n" in done.stderr


def test_a_script_obeys_the_command_line_without_parsing_it(job):
    """Options of the command reach Controller.launch in a script; what follows -- is the script's own."""
    done = run("run", "script.py", "--role", "actor=3", "-t", "s1", "scheduler.startup_timeout=50s", "--", "--mine")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "[1, 2, 3] ['--mine']")
    assert (job / "zbus-runs" / "scripted" / "s1" / "summary.json").exists()


def test_a_script_is_the_same_without_the_command(job):
    """`python script.py` does the same job with its own defaults."""
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=scaled(60))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1] []\n", "")


def test_a_function_runs_with_a_config_beside_it(job):
    """`module:function` takes its roles from -c."""
    done = run("run", "drv:main", "-c", "job.yaml", "roles.actor.replicas=1")
    assert done.returncode == 0, done.stderr


def test_inline_runs_everything_in_this_process(job):
    """scheduler.type=inline does the same job in one process."""
    done = run("run", "job.yaml", "scheduler.type=inline", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["sums"] == [5, 6]


def test_a_finished_trial_is_resumed_or_replaced_only_when_asked(job):
    """A used name is exit 8 and loses nothing; --resume goes on in it; --overwrite starts anew."""
    assert run("run", "job.yaml", "-t", "t1").returncode == 0
    trial = job / "zbus-runs" / "demo" / "t1"
    (trial / "checkpoints" / "step-1").write_text("weights")
    refused = run("run", "job.yaml", "-t", "t1")
    assert refused.returncode == 8
    assert "error[ZB0801]: trial demo/t1 is finished" in refused.stderr
    assert "--resume" in refused.stderr
    resumed = run("run", "job.yaml", "-t", "t1", "--resume", "--json")
    assert json.loads(resumed.stdout)["metrics"]["resumed"] is True
    assert (trial / "checkpoints" / "step-1").read_text() == "weights"
    assert run("run", "job.yaml", "-t", "t1", "--overwrite").returncode == 0
    assert not (trial / "checkpoints" / "step-1").exists()
    assert run("run", "job.yaml", "-t", "t2", "--resume").returncode == 8


@pytest.mark.parametrize(("how", "exit_words"), [("kill", "killed by SIGKILL"), ("exit", "exited with code 7")])
def test_a_dead_rank_ends_the_run_with_its_cause(job, how, exit_words):
    """The block names rank, exit, log and crash file; exit code 4; the summary holds the same; nothing stays alive."""
    done = run("run", "job.yaml", f"params.how={how}")
    assert done.returncode == 4
    assert done.stderr.count("error[ZB0301]") == 1
    block = done.stderr[done.stderr.index("error[ZB0301]") :]
    for words in ("actor", exit_words, "logs/actor/1.0.log", "last words", "crash/actor.1.0.json", "hint: "):
        assert words in block
    error = json.loads((only_trial(job) / "summary.json").read_text())["error"]
    assert (error["code"], error["role"], error["rank"], error["method"]) == ("ZB0301", "actor", 1, "end")


def test_the_cause_of_a_death_is_on_the_screen_within_a_second(job):
    """After kill -9 of a rank inside a call the block appears within 1 s, exit code 4 follows, and all is gone."""
    with running("job.yaml", "params.how=hang1") as process:
        status = json.loads(run("status", "--json").stdout)
        os.kill(status["workers"][1]["pid"], signal.SIGKILL)
        began = time.monotonic()
        for line in process.stderr:
            if line.startswith("error[ZB0301]: "):
                break
        assert time.monotonic() - began < within(1)
        process.communicate(timeout=scaled(20))
    assert process.returncode == 4


def test_an_engines_exception_shows_the_users_frames(job):
    """Exit 1, the remote class and text, the user's line, and no frame of zbus."""
    done = run("run", "job.yaml", "params.how=raise")
    assert done.returncode == 1
    assert "error[ZB0401]: " in done.stderr
    assert "ValueError" in done.stderr
    assert "bad value" in done.stderr
    assert "engines.py" in done.stderr
    assert "executor.py" not in done.stderr


def test_a_failing_driver_exits_1_with_its_own_line(job):
    """The user's own mistake is shown with its place, and workers end all the same."""
    done = run("run", "job.yaml", "params.how=user")
    assert done.returncode == 1
    assert "error: job.yaml raised RuntimeError: my own mistake" in done.stderr
    assert "drv.py:" in done.stderr
    assert json.loads((only_trial(job) / "summary.json").read_text())["status"] == "failed"


def test_a_driver_that_deals_with_a_loss_succeeds(job):
    """A caught failure is the driver's business: exit 0."""
    done = run("run", "drv:swallow", "-c", "job.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["caught"] in ("WorkerLost", "BatchError")


def test_one_interrupt_stops_in_order(job):
    """Ctrl-C cancels the call and stops everything within 5 s: exit 130, a summary, no orphan."""
    with running("job.yaml", "params.how=hang") as process:
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=scaled(20))
        assert time.monotonic() - began < within(6)
    assert process.returncode == 130
    assert "stopping in order" in err
    assert "Traceback" not in err
    assert json.loads((only_trial(job) / "summary.json").read_text())["status"] == "interrupted"


def test_a_second_interrupt_stops_at_once(job):
    """Two Ctrl-C in a row end the command at once: exit 130, and the workers follow."""
    with running("job.yaml", "params.how=hang") as process:
        process.send_signal(signal.SIGINT)
        assert any("once more to stop at once" in line for line in process.stderr)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=scaled(20))
        assert time.monotonic() - began < within(2)
    assert process.returncode == 130
    wait_until(lambda: not processes(job), 3, "the workers to follow their controller")


def test_an_interrupt_during_start_up_leaves_nothing(job):
    """Ctrl-C while engines are set up ends everything in order, with 130."""
    command = [*COMMAND, "run", "job.yaml", "roles.actor.env.SLOW_SETUP=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(list(job.glob("zbus-runs/*/*/logs/actor/*.log"))) == 2, 30, "both ranks to start")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=scaled(20))
    assert process.returncode == 130
    assert "error" not in err


def test_a_script_may_launch_twice(job):
    """Each launch of a script gets a trial of its own."""
    (job / "twice.py").write_text(
        "from controller import Controller, Role\n"
        "for i in range(2):\n"
        "    with Controller.launch('twice', roles={'actor': Role('engines:Actor', replicas=1)}) as bus:\n"
        "        print(bus.group('actor').add(i))\n"
    )
    done = run("run", "twice.py")
    assert (done.returncode, done.stdout.splitlines()[:2]) == (0, ["[0]", "[1]"]), done.stderr
    assert len(list((job / "zbus-runs" / "twice").iterdir())) == 2


def test_sigterm_stops_in_order(job):
    """SIGTERM is an orderly stop: exit 143."""
    with running("job.yaml", "params.how=hang") as process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=scaled(20))
    assert process.returncode == 143
    assert json.loads((only_trial(job) / "summary.json").read_text())["status"] == "terminated"


def test_a_killed_controller_takes_its_workers_along(job):
    """After kill -9 of the command no worker lives longer than 2 s, and the trial shows as lost."""
    with running("job.yaml", "params.how=hang") as process:
        process.kill()
        process.wait()
        wait_until(lambda: not processes(job), 2, "the workers to end")
    assert json.loads(run("status", "--json").stdout)["state"] == "lost"


def test_status_and_stop_of_a_running_trial(job):
    """Status shows who is busy with what; stop ends that trial in order and no other."""
    with (
        running("job.yaml", "-t", "t1", "params.how=hang") as process,
        running("job.yaml", "-t", "t2", "params.how=hang") as other,
    ):

        def busy():
            data = json.loads(run("status", "t1", "--json").stdout)
            return data if [worker["state"] for worker in data["workers"]] == ["busy", "busy"] else None

        data = wait_until(busy, 30, "both ranks to show as busy")
        assert data["state"] == "running"
        assert data["workers"][1]["call"]["method"] == "end"
        assert data["workers"][1]["rss_bytes"] > 1 << 20
        assert all(worker["slow_handlers"] == 0 for worker in data["workers"])
        assert all(isinstance(worker["refused"], dict) for worker in data["workers"])
        text = run("status", "demo/t1").stdout
        assert "demo/t1  running for" in text
        assert "end" in text

        refused = run("run", "job.yaml", "-t", "t1", "--overwrite")
        assert refused.returncode == 8
        assert f"pid {process.pid}" in refused.stderr

        ambiguous = run("stop")
        assert ambiguous.returncode == 8
        assert "2 trials are running" in ambiguous.stderr

        stopped = run("stop", "t1", "--json")
        assert stopped.returncode == 0, stopped.stderr
        assert any("controller" in label for label in json.loads(stopped.stdout)["stopped"])
        process.communicate(timeout=scaled(10))
        assert process.returncode == 143
        assert other.poll() is None
        assert run("stop").returncode == 0
    assert "interrupted" not in run("status", "t1").stdout
    assert json.loads(run("status", "t1", "--json").stdout)["state"] == "terminated"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["roles.actor.engine=nomodule_x:Actor"], 2, ["ZB0202", "nomodule_x"]),
        (["roles.actor.engine=engines:Actr"], 2, ["ZB0202", "Actr", "Actor"]),
        (["roles.actor.engine=engines:NotAnEngine"], 2, ["ZB0202", "NotAnEngine", "zbus.Engine"]),
        (["roles.actor.engine=broken.py:Actor"], 2, ["ZB0202", "broken.py", "division by zero"]),
        (["roles.actor.engine=gone.py:Actor"], 2, ["ZB0101", "gone.py"]),
        (["roles.actor.mesh={dp: 3}"], 2, ["ZB0101", "2 replicas", "dp 3"]),
        (["roles.actr.replicas=2"], 2, ["ZB0101", "roles.actr.engine", "roles.actor"]),
        (["scheduler.startup_timout=5m"], 2, ["ZB0101", "argument 2", "scheduler.startup_timeout"]),
        (["root=/proc/zbus"], 2, ["ZB0101", "/proc/zbus", "--root"]),
        (["target=drv.py:mian"], 2, ["ZB0101", "mian", "main"]),
        (["roles.actor.env.SLOW_SETUP=1", "--startup-timeout", "1.5s"], 3, ["ZB0201", "actor/0", "actor/1"]),
        (["scheduler.type=external", "--startup-timeout", "500ms"], 3, ["ZB0201", "actor/0"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] else None,
)
def test_bad_input_is_named_with_the_right_exit_code(job, arguments, code, words):
    """Each wrong input ends with its exit code and one block that names the culprit."""
    (job / "broken.py").write_text("1 / 0\n")
    done = run("run", "job.yaml", *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error[") == 1
    for word in words:
        assert word in done.stderr


def test_a_runtime_directory_with_too_long_a_path_is_refused(job, monkeypatch):
    """The refusal says the limit and how to go on, before anything is started."""
    deep = job / ("d" * 100)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("ZBUS_RUNTIME_DIR", str(deep))
    done = run("run", "job.yaml")
    assert done.returncode == 2, done.stderr
    assert "ZBUS_RUNTIME_DIR" in done.stderr


def test_ranks_started_by_hand_do_the_same_job(job):
    """With scheduler.type=external the command prints the line to type elsewhere, and that line is all it takes."""
    command = [*COMMAND, "run", "job.yaml", "scheduler.type=external", "-t", "ext"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = next(line for line in process.stderr if "zbus-worker start " in line)
        words = line.split()
        assert words == ["zbus-worker", "start", "--role", "actor", "--nproc", "2", "--trial-dir", str(only_trial(job))]
        by_hand = subprocess.run(
            [sys.executable, "-m", "workers", *words[1:]], capture_output=True, text=True, timeout=scaled(60)
        )
        out, err = process.communicate(timeout=scaled(20))
    assert (process.returncode, by_hand.returncode) == (0, 0), err + by_hand.stderr
    assert "done in " in out


def test_a_dry_run_shows_the_config_and_starts_nothing(job):
    """--dry-run prints the resolved config with origins, valid as a config again, and makes no directory."""
    done = run("run", "--dry-run", "job.yaml", "rpc.timeout=5m")
    assert done.returncode == 0
    assert "timeout: 300.0  # command line, argument 3" in done.stdout
    assert yaml.safe_load(done.stdout)["roles"]["actor"]["engine"] == f"{job}/engines.py:Actor"
    assert not (job / "zbus-runs").exists()
