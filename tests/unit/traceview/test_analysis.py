from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from traceview.cli import main
from traceview.problems import Problems
from traceview.stragglers import critical_paths, stragglers
from traceview.survey import Survey, survey

STEPS = 20
RANKS = 4


def call(*args) -> tuple[int, str, str]:
    """Run the command: exit code, stdout, stderr."""
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert "Traceback" not in result.stderr
    return result.exit_code, result.stdout, result.stderr


def write(path: Path, records: list[dict]) -> None:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def head(role: str, rank: int, **more) -> dict:
    """Return an opening metadata event."""
    args = {"format": 1, "run": "e/t", "role": role, "rank": rank, "boot_id": "b", "time_ns": 1, "pid": 7}
    args |= {"mono_ns": 1000, "wall_ns": 1_796_000_000_000_000_000, "epoch_mono_ns": 0, **more}
    return {"name": "zbus_meta", "ph": "M", "ts": 0.0, "pid": 7, "args": args}


def span(name: str, ts: float, dur: float, cat: str = "compute", **args) -> dict:
    """Return a span."""
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 7, "tid": 7, "cat": cat, "args": args}


def end() -> dict:
    """Return the event of an orderly end."""
    return {"name": "zbus_end", "ph": "M", "ts": 0.0, "pid": 7, "args": {"lost": {}}}


def run_of(root: Path, shape, **headers) -> Path:
    """Write a controller and four ranks; ``shape(rank, step)`` gives (late µs, forward µs, reward µs)."""
    rng = random.Random(5)
    controller = [head("controller", 0)]
    ranks = {rank: [head("actor", rank, **headers.get(f"r{rank}", {}))] for rank in range(RANKS)}
    at = 1000.0
    for step in range(STEPS):
        done = at
        for rank, records in ranks.items():
            late, forward, reward = shape(rank, step)
            forward *= rng.uniform(0.99, 1.01)
            begin = at + 100 + late
            whole = forward + reward + 20
            ident = f"{step:08x}{rank:08x}"
            bus = {"call": ident, "method": "train", "attempt": 1, "batch": step}
            records += [
                span("queue train", begin - 30, 30, "rpc", kind="queue", worker=f"actor/{rank}", **bus),
                span("forward", begin + 5, forward),
                span("reward", begin + 10 + forward, reward),
                span("run train", begin, whole, "rpc", kind="run", step=step, **bus),
            ]
            sent = span("call train", at, whole + 200 + late, "rpc", kind="client", worker=f"actor/{rank}", **bus)
            controller.append({**sent, "tid": 100 + rank})
            done = max(done, at + whole + 200 + late)
        controller.append({"name": "zbus_step", "ph": "i", "ts": done, "pid": 7, "tid": 7, "args": {"step": step}})
        at = done + 300
    write(root / "traces" / "controller" / "traces_0.jsonl", [*controller, end()])
    for rank, records in ranks.items():
        write(root / "traces" / "actor" / f"traces_{rank}.jsonl", [*records, end()])
    return root


def surveyed(root: Path) -> Survey:
    """Return the survey of a run."""
    return survey([str(root)], Problems())


@pytest.mark.parametrize(
    ("shape", "why", "word"),
    [
        (lambda r, s: (0, 1600 if r == 2 else 1000, 800 if r == 2 else 500), "slow rank", "in all its parts"),
        (lambda r, s: (900 if r == 2 else 0, 1000, 500), "late start", "after its peers"),
        (lambda r, s: (0, 1000, 1500 if r == 2 else 500), "slow phase", "`reward` takes"),
    ],
)
def test_a_planted_straggler_is_first_with_its_reason(tmp_path, shape, why, word):
    """A slow rank, a late starter and a slow phase are each ranked first, with the right reason and the right cost."""
    rows = stragglers(surveyed(run_of(tmp_path, shape)))
    assert (rows[0].rank, rows[0].why) == ("actor/2", why)
    assert word in rows[0].detail
    assert rows[0].units == rows[0].of == STEPS
    assert rows[0].lost_s == pytest.approx(STEPS * 900e-6 if why != "slow phase" else STEPS * 1000e-6, rel=0.05)
    assert all(row.lost_s < rows[0].lost_s / 10 for row in rows[1:])


def test_equal_ranks_are_no_stragglers(tmp_path):
    """Noise of a percent blames nobody."""
    rows = stragglers(surveyed(run_of(tmp_path, lambda r, s: (0, 1000, 500))))
    assert [row for row in rows if row.lost_s > STEPS * 30e-6] == []


def test_a_difference_within_the_clocks_error_is_a_clock_doubt(tmp_path):
    """A rank that only seems late because its clock is not known is not blamed for starting late."""
    other = {"boot_id": "other", "wall_ns": 1_796_000_000_000_900_000}
    root = run_of(tmp_path, lambda r, s: (900 if r == 2 else 0, 1000, 500), r2=other)
    rows = [row for row in stragglers(surveyed(root)) if row.rank == "actor/2"]
    assert all(row.why == "clock doubt" or row.lost_s < STEPS * 50e-6 for row in rows)


def test_the_critical_path_is_the_last_members(tmp_path):
    """Per ordered batch the member that came last decides; its parts add up to the batch."""
    [path] = critical_paths(surveyed(run_of(tmp_path, lambda r, s: (0, 1600 if r == 2 else 1000, 500))))
    assert (path.method, path.batches, path.last, path.last_count) == ("train", STEPS, "actor/2", STEPS)
    assert path.parts_us["run"] == pytest.approx(2120, rel=0.02)
    assert path.parts_us["queue"] == pytest.approx(30, abs=1)
    assert sum(path.parts_us.values()) == pytest.approx(path.mean_us, rel=0.01)


def test_steps_come_from_recorded_markers(tmp_path):
    """A step lasts from the mark before it to its own mark, and --steps keeps only what touches it."""
    root = run_of(tmp_path, lambda r, s: (0, 1000, 500))
    steps = surveyed(root).steps.windows
    assert list(steps) == list(range(STEPS))
    assert all(steps[n][1] == steps[n + 1][0] for n in range(STEPS - 1))
    code, _, _ = call("merge", root, "-o", tmp_path / "o.json", "--steps", "3-4")
    events = json.loads((tmp_path / "o.json").read_text())["traceEvents"]
    kept = {e["args"]["step"] for e in events if e["name"] == "run train"}
    assert code == 0
    assert kept == {3, 4}
    code, _, err = call("merge", root, "-o", tmp_path / "o.json", "--steps", "90-99")
    assert code == 2
    assert "it has steps 0 to 19" in err


def test_stragglers_and_stats_as_table_and_json(tmp_path):
    """Both commands print tables or one JSON object with its schema; --fail-on exits 10."""
    root = run_of(tmp_path, lambda r, s: (0, 1600 if r == 2 else 1000, 500))
    code, out, _ = call("stragglers", root)
    assert code == 0
    assert out.splitlines()[1].startswith("actor/2")
    report = json.loads(call("stragglers", root, "--json")[1])
    assert (report["schema"], report["rows"][0]["rank"]) == ("zbus.traceview.stragglers/1", "actor/2")
    assert call("stragglers", root, "--fail-on", "0.001")[0] == 10
    stats = json.loads(call("stats", root, "--json", "--by", "rank")[1])
    assert stats["schema"] == "zbus.traceview.stats/1"
    assert {row["rank"] for row in stats["rows"]} == {"controller/0", *(f"actor/{n}" for n in range(RANKS))}
    assert stats["critical_path"][0]["method"] == "train"
    assert "critical path" in call("stats", root)[1]


def test_a_merged_trace_tells_the_same(tmp_path):
    """Statistics and stragglers of the merged file, in Chrome form, are those of its inputs."""
    root = run_of(tmp_path, lambda r, s: (0, 1600 if r == 2 else 1000, 500))
    call("merge", root, "-o", tmp_path / "o.json.gz")
    one, two = surveyed(root), surveyed(tmp_path / "o.json.gz")
    first, second = stragglers(one)[0], stragglers(two)[0]
    assert (first.rank, first.why, first.detail) == (second.rank, second.why, second.detail)
    assert first.lost_s == pytest.approx(second.lost_s, abs=1e-6)
    assert [p.to_dict() for p in critical_paths(one)] == [p.to_dict() for p in critical_paths(two)]


def test_diff_names_what_grew_and_fails_over_a_limit(tmp_path):
    """A span that takes longer in B is first; --fail-over exits 10 beyond it, and equal runs pass."""
    a = run_of(tmp_path / "a", lambda r, s: (0, 1000, 500))
    b = run_of(tmp_path / "b", lambda r, s: (0, 1000, 700))
    assert call("diff", a, a, "--fail-over", "1%")[0] == 0
    code, out, err = call("diff", a, b, "--fail-over", "10%")
    assert code == 10
    assert "+39.8%" in next(line for line in out.splitlines() if "reward" in line)
    assert "error[ZT0117]" in err
    report = json.loads(call("diff", a, b, "--json")[1])
    assert report["rows"][0]["name"] == "reward"
    assert report["rows"][0]["significant"]
    assert call("diff", a, b, "--fail-over", "x")[0] == 2


def test_diff_lets_small_growth_pass_on_request(tmp_path):
    """--at-least: what grew by a large part but a short time fails nothing; counts have no time."""
    a = run_of(tmp_path / "a", lambda r, s: (0, 1000, 500))
    b = run_of(tmp_path / "b", lambda r, s: (0, 1000, 700))
    assert call("diff", a, b, "--fail-over", "10%", "--at-least", "100us")[0] == 10
    assert call("diff", a, b, "--fail-over", "10%", "--at-least", "300us")[0] == 0
    code, _, err = call("diff", a, b, "--at-least", "1ms", "--metric", "count")
    assert code == 2
    assert "--metric count" in err
    assert call("diff", a, b, "--at-least", "soon")[0] == 2


# -- sessions ------------------------------------------------------------------------------------------------------


def sessions_of(root: Path) -> Path:
    """Write sessions of two ranks of two roles beside a run."""
    run_of(root, lambda r, s: (0, 1000, 500))
    for role, rank in (("rollout", 0), ("rollout", 1), ("critic", 0)):
        records: list[dict] = [{"zbus_sessions": head(role, rank)["args"]}]
        for n in range(10):
            t = 0.002 * n
            phases = {
                "generate": [{"start_ts": t, "end_ts": t + 0.003}, {"start_ts": t, "end_ts": t + 0.001}],
                "tool call": [{"start_ts": t + 0.0035, "end_ts": None}],
            }
            record = {"task_id": n // 2, "session_id": n, "rank": rank, "role": role, "submit_ts": t, "phases": phases}
            done = {"finalized_ts": t + 0.004, "status": "accepted"} if n != 9 else {"status": "pending"}
            records.append({**record, **done, "counters": {"tokens": 5}})
        path = root / "traces" / role / f"sessions_{rank}.jsonl"
        write(path, records)
        with path.open("a") as file:
            file.write('{"task_id":1,"sess')
    return root


def test_sessions_are_summed_up_by_phase_step_and_rank(tmp_path):
    """Overlapping phases count once, an open phase ends with its session, roles stay apart, steps are recorded ones."""
    code, out, err = call("sessions", sessions_of(tmp_path), "--json")
    found = json.loads(out)
    assert (code, found["schema"], found["sessions"], found["unfinished"]) == (0, "zbus.traceview.sessions/1", 30, 3)
    rows = {row["measure"]: row for row in found["overall"]}
    assert rows["generate"]["p50_s"] == pytest.approx(0.003, abs=1e-6)
    assert rows["tool call"]["p50_s"] == pytest.approx(0.0005, abs=1e-6)
    assert rows["idle"]["p50_s"] == pytest.approx(0.0005, abs=1e-6)
    assert [row["rank"] for row in found["by_rank"]] == ["critic/0", "rollout/0", "rollout/1"]
    assert found["by_step"]
    assert all(row["count"] % 3 == 0 for row in found["by_step"])
    assert found["problems"] == {"bad_line": 3}
    assert "warning[ZT0107]" in err


def test_sessions_as_page_csv_and_table(tmp_path):
    """The page names role and rank at every bar; the CSV has a line per session and no formula; the table p95."""
    root = sessions_of(tmp_path)
    record = {"task_id": "=1+1", "session_id": 1, "rank": 0, "role": "@evil", "status": "x", "submit_ts": 0.0}
    write(root / "traces" / "rollout" / "sessions_7.jsonl", [record])
    assert call("sessions", root, "-o", tmp_path / "s.html")[0] == 0
    page = (tmp_path / "s.html").read_text()
    assert "Life cycle of rollout/1" in page
    assert "rollout/0 · session 3 · task 1 · accepted" in page
    assert "<script" not in page
    assert call("sessions", root, "--csv", tmp_path / "s.csv", "--json")[0] == 0
    lines = (tmp_path / "s.csv").read_text().splitlines()
    assert len(lines) == 32
    assert any(line.startswith("'@evil,0,1,'=1+1,") for line in lines)
    assert "p95" in call("sessions", root)[1]


def test_sessions_where_there_are_none_is_an_error_that_helps(tmp_path):
    """Without session files the command says how they come about."""
    code, _, err = call("sessions", run_of(tmp_path, lambda r, s: (0, 1, 1)))
    assert code == 2
    assert "session_context" in err


def test_the_report_is_one_page_that_fetches_nothing(tmp_path):
    """The report has the stragglers, the steps and the sessions, a strict policy, and no script or address."""
    root = sessions_of(tmp_path)
    code, out, _ = call("report", root)
    page = Path(out.strip()).read_text()
    assert (code, out.strip()) == (0, str(root / "report.html"))
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
    assert all(mark not in page for mark in ("<script", "http://", "https://", "<img", "<link", "url("))
    assert all(word in page for word in ("Stragglers", "Critical path", "Timeline", "Sessions", "actor/3"))
    assert json.loads(call("report", root, "--json")[1])["schema"] == "zbus.traceview.report/1"
