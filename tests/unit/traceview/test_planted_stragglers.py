from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from planted_run import Clock, Plan, Way, plant, planted_clocks
from traceview.cli import main
from traceview.problems import Problems
from traceview.stragglers import Straggler, critical_paths, stragglers
from traceview.survey import Survey, survey

STEPS = 60
KINDS = {
    "slow rank": {"slow": 1.6},
    "late start": {"late_us": 900.0},
    "slow phase": {"reward": 2.8},
}

CALLS_OF_OTHERS = [("slow rank", False), ("slow phase", False)]  # they record no queue: taken up late is a long call


def surveyed(root: Path, problems: Problems | None = None) -> Survey:
    """Return the survey of a run."""
    return survey([str(root)], problems or Problems())


def found_in(root: Path, plan: Plan) -> list[Straggler]:
    """Plant a run and return its stragglers."""
    return stragglers(surveyed(plant(root, plan)))


@pytest.mark.parametrize("clocks", ["one clock", "5 s and 50 ppm apart"])
@pytest.mark.parametrize(("kind", "headers"), [*((kind, True) for kind in KINDS), *CALLS_OF_OTHERS])
@pytest.mark.parametrize("seed", range(2))
def test_a_planted_straggler_is_first_with_the_right_reason(tmp_path, seed, kind, headers, clocks):
    """Whoever is planted is ranked first, for the planted reason and the planted cost, also with clocks 5 s apart."""
    who = random.Random(seed).randrange(4)
    ((what, value),) = KINDS[kind].items()
    skew = planted_clocks(seed) if clocks != "one clock" else {}
    rows = found_in(tmp_path, Plan(steps=STEPS, seed=seed, clocks=skew, headers=headers, **{what: {who: value}}))
    assert (rows[0].rank, rows[0].why) == (f"actor/{who}", kind)
    assert rows[0].units == STEPS
    planted = {"slow rank": 0.6 * 1505, "late start": 900.0, "slow phase": 1.8 * 500}[kind] * STEPS / 1e6
    assert rows[0].lost_s == pytest.approx(planted, rel=0.1)
    assert all(row.lost_s < rows[0].lost_s / 5 for row in rows[1:])


def test_all_three_at_once_are_each_told_apart(tmp_path):
    """A late starter, a slow rank and a slow phase in one run, on four hosts: the worst first, each with its reason."""
    plan = Plan(
        ranks=6, steps=STEPS, clocks=planted_clocks(1, 6), late_us={1: 6000.0}, slow={2: 2.5}, reward={4: 4.0}, seed=1
    )
    rows = {row.rank: row for row in found_in(tmp_path, plan)}
    assert rows["actor/1"].why == "late start"
    first = max(rows.values(), key=lambda row: row.lost_s)
    assert first.rank == "actor/1"
    # who is never the last costs nobody anything
    assert "actor/4" not in rows or rows["actor/4"].lost_s < first.lost_s / 100


def test_a_delay_within_the_error_of_clocks_blames_nobody(tmp_path):
    """Behind a slow way the clock is known to 3 ms only: seeming to begin 2 ms later is a doubt, not a late start."""
    plan = Plan(steps=STEPS, clocks=planted_clocks(2), ways={1: Way(there_us=40, back_us=6000)}, seed=2)
    rows = found_in(tmp_path, plan)
    assert (rows[0].rank, rows[0].why) == ("actor/1", "clock doubt")
    assert rows[0].lost_s == pytest.approx(STEPS * 3e-3, rel=0.1)
    assert "late start" not in {row.why for row in rows if row.lost_s > 1e-3}


def test_a_doubtful_rank_does_not_hide_who_is_slow(tmp_path):
    """One rank seems to begin 2 ms late, by a clock known to 2 ms; the slow one, 1 ms behind, is still found, first."""
    ways = {3: Way(there_us=40, back_us=4000)}
    plan = Plan(steps=STEPS, clocks=planted_clocks(5), ways=ways, reward={1: 3.0}, seed=5)
    rows = found_in(tmp_path, plan)
    assert (rows[0].rank, rows[0].why, rows[0].units) == ("actor/1", "slow phase", STEPS)
    assert rows[0].lost_s == pytest.approx(STEPS * 1e-3, rel=0.1)
    assert [(row.rank, row.why) for row in rows[1:] if row.lost_s > 1e-3] == [("actor/3", "clock doubt")]


def test_how_long_work_takes_needs_no_exact_clock(tmp_path):
    """A slow rank behind the same way is blamed for what it is: its durations are its own clock's."""
    ways = {1: Way(there_us=40, back_us=6000)}
    plan = Plan(steps=STEPS, clocks=planted_clocks(2), ways=ways, slow={1: 6.0}, seed=2)
    rows = found_in(tmp_path, plan)
    assert (rows[0].rank, rows[0].why) == ("actor/1", "slow rank")


def test_without_any_match_of_clocks_slow_work_is_still_found(tmp_path):
    """Ranks matched by wall clocks a second apart: who takes longer is told, who began when is not guessed."""
    root = plant(tmp_path, Plan(steps=60, clocks=planted_clocks(3), slow={2: 1.6}, late_us={3: 900.0}))
    for path in (root / "traces").rglob("*.jsonl"):
        kept = (x for x in path.read_text().splitlines(keepends=True) if '"kind"' not in x or '"run train"' in x)
        path.write_text("".join(kept))
    problems = Problems()
    rows = stragglers(surveyed(root, problems))
    assert problems.counts["ZT0112", "clock_by_wall"] == 4
    assert (rows[0].rank, rows[0].why) == ("actor/2", "slow rank")
    assert "late start" not in {row.why for row in rows}


def test_reports_say_how_each_clock_was_matched_and_how_exactly(tmp_path):
    """The page has a table of clocks with their errors where there is more than one, and --json has all of them."""
    root = plant(tmp_path, Plan(ranks=3, steps=60, clocks=planted_clocks(1, 2), slow={1: 2.0}))
    answer = CliRunner().invoke(main, ["stragglers", str(root), "--json"])
    rows = {row["rank"]: row for row in json.loads(answer.stdout)["clocks"]}
    assert {name: row["clock"] for name, row in rows.items()} == {
        "controller/0": "reference", "actor/0": "rpc", "actor/1": "rpc", "actor/2": "shared",
    }  # fmt: skip
    assert 40 < rows["actor/0"]["clock_bound_us"] < 150
    assert CliRunner().invoke(main, ["report", str(root)]).exit_code == 0
    page = (root / "report.html").read_text()
    assert "Clocks" in page
    assert "requests and replies" in page
    same = plant(tmp_path / "same", Plan(ranks=2, steps=5))
    assert CliRunner().invoke(main, ["report", str(same)]).exit_code == 0
    assert "Clocks" not in (same / "report.html").read_text()


def line(name: str, ts: float, dur: float, rank: int, **args) -> str:
    """Return a line of a rank, on the controller's clock."""
    event = {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 7, "tid": 7, "args": args}
    return json.dumps({**event, "args": {"worker": f"actor/{rank}", "attempt": 1, **args}}) + "\n"


def write_calls(root: Path, calls: list[tuple[int, int, str, float, float]]) -> Path:
    """Write calls (rank, batch, method, start, duration in µs) from both sides, all on one clock."""
    files: dict[str, list[str]] = {}
    for number, (rank, batch, method, start, dur) in enumerate(calls):
        ids = {"call": f"{number:016x}", "method": method}
        run = line(f"run {method}", start, dur, rank, kind="run", **ids)
        files.setdefault(f"actor/traces_{rank}", []).append(run)
        client = line(f"call {method}", start - 50, dur + 100, rank, kind="client", outcome="OK", batch=batch, **ids)
        files.setdefault("controller/traces_0", []).append(client)
    for name, lines in files.items():
        role, _, rank = name.partition("/traces_")
        args = {"format": 1, "run": "e/t", "role": role, "rank": int(rank), "boot_id": "b", "time_ns": 1, "pid": 7}
        args |= {"mono_ns": 0, "wall_ns": 10**18, "epoch_mono_ns": 0}
        head = json.dumps({"name": "zbus_meta", "ph": "M", "ts": 0.0, "pid": 7, "args": args}) + "\n"
        path = root / "traces" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + "".join(lines))
    return root


def test_time_lost_once_is_counted_once(tmp_path):
    """A rank slow in `load` begins `train` later too, right behind it: 30 ms lost per step, not 60."""
    calls = []
    for step in range(20):
        at = 1000.0 + step * 100_000
        for rank in range(4):
            load = 40_000.0 if rank == 1 else 10_000.0
            calls += [(rank, 2 * step, "load", at, load), (rank, 2 * step + 1, "train", at + load + 10, 20_000.0)]
    rows = stragglers(surveyed(write_calls(tmp_path, calls)))
    assert [row.rank for row in rows] == ["actor/1"]
    assert rows[0].lost_s == pytest.approx(20 * 0.030, rel=0.01)
    assert (rows[0].where, rows[0].why) == ("run load", "slow rank")


def test_calls_are_compared_within_their_batch_also_where_a_rank_missed_some(tmp_path):
    """A rank that was not there for five steps is compared with its peers of the same steps, not with the k-th."""
    calls = [
        (rank, step, "train", 1000.0 + step * 50_000, 10_000.0 + step * 1000)
        for step in range(20)
        for rank in range(4)
        if rank != 1 or step >= 5
    ]
    assert stragglers(surveyed(write_calls(tmp_path, calls))) == []


def test_calls_that_go_to_one_rank_each_make_nobody_wait(tmp_path):
    """Rollouts dealt out to whoever is free have no peers: different numbers and lengths are no straggler."""
    rng = random.Random(1)
    calls = [
        (n % 3, n, "generate", 1000.0 + n * 1000, rng.uniform(1000, 50_000) * (3 if n % 3 == 1 else 1))
        for n in range(90)
    ]
    assert stragglers(surveyed(write_calls(tmp_path, calls))) == []


def test_single_calls_made_in_rounds_are_compared(tmp_path):
    """One call per rank and step, each submitted by itself and all awaited: the late one is found as in a batch."""
    calls = [
        (rank, step * 4 + rank, "train", 1000.0 + step * 50_000 + (9000.0 if rank == 3 else 0.0), 10_000.0)
        for step in range(20)
        for rank in range(4)
    ]
    [row] = stragglers(surveyed(write_calls(tmp_path, calls)))
    assert (row.rank, row.why, row.units, row.of) == ("actor/3", "late start", 20, 20)
    assert row.lost_s == pytest.approx(20 * 9e-3, rel=0.01)


def test_calls_of_the_bus_itself_are_no_work(tmp_path):
    """Making engines and saving traces takes one rank longer: nobody is called a straggler for that."""
    calls = [(rank, 1, "zbus.create_engine", 1000.0, 1e6 if rank == 1 else 1e3) for rank in range(4)]
    calls += [(rank, 2 + n, "train", 2e6 + n * 50_000, 10_000.0) for n in range(10) for rank in range(4)]
    assert stragglers(surveyed(write_calls(tmp_path, calls))) == []


def test_the_critical_path_of_a_batch_holds_over_hosts(tmp_path):
    """With clocks 5 s apart the last member's parts add up to the batch, and wire and queue are the planted ones."""
    plan = Plan(steps=STEPS, clocks=planted_clocks(4), slow={2: 2.0}, ways={2: Way(300.0, 300.0, 5.0)}, seed=4)
    [path] = critical_paths(surveyed(plant(tmp_path, plan)))
    assert (path.method, path.batches, path.last, path.last_count) == ("train", STEPS, "actor/2", STEPS)
    assert sum(path.parts_us.values()) == pytest.approx(path.mean_us, rel=0.01)
    assert path.parts_us["run"] == pytest.approx(2 * 1500 + 15, rel=0.02)
    assert path.parts_us["wire out"] == pytest.approx(305, abs=30)
    assert path.parts_us["wire back"] == pytest.approx(325, abs=30)
    assert path.parts_us["queue"] == pytest.approx(15, abs=1)


def test_steps_are_those_marked_whatever_the_clocks(tmp_path):
    """Steps come from the controller's marks; a rank 5 s off is seen in the steps it worked in."""
    found = surveyed(plant(tmp_path, Plan(steps=30, clocks=planted_clocks(5))))
    assert list(found.steps.windows) == list(range(30))
    for rank in found.roles()["actor"]:
        starts = rank.spans["run train"].starts
        assert [found.steps.at(start) for start in starts] == list(range(30))


def test_a_run_without_marks_has_no_guessed_steps(tmp_path):
    """Without marks and without spans that name a step there are no steps."""
    root = plant(tmp_path, Plan(steps=10, clocks={0: Clock(boot_id="x")}))
    for path in (root / "traces").rglob("*.jsonl"):
        text = path.read_text().replace('"step":', '"n":')
        path.write_text(text)
    assert surveyed(root).steps.windows == {}
