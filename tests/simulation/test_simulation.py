from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from coverage_kit import must_have_happened
from zbus.testing.simulation import replay, run_seed, run_seeds
from zbus.testing.simulation.exhaustive import explore
from zbus.testing.simulation.lending import lending
from zbus.testing.simulation.mutants import applied
from zbus.testing.simulation.shrink import shrink

CORPUS = [
    (line.split()[0], int(line.split()[1]))
    for line in (Path(__file__).parent / "corpus.txt").read_text().splitlines()
    if line and not line.startswith("#")
]

MUST_HAPPEN = """
fault: break · fault: a break noticed by the next connection · fault: controller replaced, the old one dies
fault: controller replaced, the old one goes on · fault: controller replaced, the old one says BYE · fault: crash
fault: crash between effects · fault: drain · fault: duplicate · fault: from a dead connection · fault: lease
fault: controller dies between two messages
fault: loss · fault: lost in a break · fault: partition both ways · fault: partition to callers
fault: partition to the worker · fault: pause of a controller · fault: pause of a worker
meets: CANCEL done · meets: CANCEL held · meets: CANCEL new · meets: CANCEL queued · meets: CANCEL running
meets: PROBE done · meets: PROBE held · meets: PROBE new · meets: PROBE queued · meets: PROBE running
meets: REQ done · meets: REQ held · meets: REQ new · meets: REQ queued · meets: REQ running
meets: SKIP done · meets: SKIP held · meets: SKIP new · meets: ACK running
message: ACK · message: BYE · message: CHUNK · message: END OK · message: END APP_ERROR
message: FAILURE APP_ERROR · message: FAILURE CANCELLED · message: FAILURE EXPIRED · message: FAILURE PREDECESSOR
message: FAILURE SHUTDOWN · message: FAILURE UNKNOWN_LANE · message: NACK FENCED_EPOCH
message: NACK FENCED_INCARNATION · message: NACK GAP · message: NACK WINDOW · message: PROGRESS QUEUED
message: PROGRESS RUNNING · message: RESULT OK · message: SKIP
outcome: APP_ERROR · outcome: CANCELLED cancelled · outcome: NOT_EXECUTED deadline · outcome: NOT_EXECUTED fenced
outcome: NOT_EXECUTED lease · outcome: NOT_EXECUTED predecessor · outcome: NOT_EXECUTED protocol
outcome: NOT_EXECUTED shutdown · outcome: NOT_EXECUTED worker_exit · outcome: OK · outcome: UNKNOWN deadline
outcome: UNKNOWN fenced · outcome: UNKNOWN lease · outcome: UNKNOWN shutdown · outcome: UNKNOWN worker_exit
peer: connecting handshaking · peer: handshaking ready · peer: ready suspect · peer: suspect ready · peer: ready dead
gang: released · gang: ran · gang: did not run · meets: GO poised · meets: GO running · meets: CANCEL poised
meets: PROBE poised · message: GO · message: PROGRESS POISED · outcome: NOT_EXECUTED gang
redial · lost · fault: hold off · PONG · fault: lease, not replaced · fault: a handshake that is none
fault: a loss after which the transport gives up
fault: queue full · fault: parked · fault: slow peer · fault: a clock at another rate
fault: clock of a controller jumps
fault: clock of a worker jumps · fault: restart on another host · fault: lie · bad welcome
fault: crash before the mark of a start · fault: crash behind the mark of a start
fault: crash before the mark of an end · fault: crash behind it · outcome: UNKNOWN evicted · message: FAILURE NOT_KEPT
message: FAILURE NOT_STARTED · outcome: NOT_EXECUTED refused
orphan · refused: FENCED_EPOCH dead · refused: FENCED_EPOCH ready · refused: FENCED_INCARNATION suspect
"""


@pytest.mark.parametrize(("size", "seed"), CORPUS)
def test_a_seed_that_once_broke_a_rule_holds(size, seed):
    """What was repaired stays repaired."""
    failure = run_seed(seed, size)
    assert failure is None, failure


def test_schedules_hold():
    """No promise breaks in 10,000 small schedules and 600 deep ones, in which each fault, state and outcome occurs."""
    small = run_seeds(range(10_000))
    assert not small.failures, small.failures[0]
    large = run_seeds(range(600), "large")
    assert not large.failures, large.failures[0]
    must_have_happened(MUST_HAPPEN, 3, small, large)


@pytest.mark.ci
def test_many_schedules_hold():
    """No promise breaks in 200,000 small and 10,000 large schedules beyond those of every run."""
    small = run_seeds(range(1_000_000, 1_200_000))
    assert not small.failures, small.failures[0]
    large = run_seeds(range(1_000_000, 1_010_000), "large")
    assert not large.failures, large.failures[0]
    must_have_happened(MUST_HAPPEN, 50, small, large)


def test_a_seed_is_one_run():
    """The same seed gives the same events in the same order, whatever ran before."""
    stories = []
    for _ in range(2):
        run_seeds(range(5))
        stories.append([replay(seed, "large", lines=100_000).story for seed in (3, 4, 5)])
    assert stories[0] == stories[1]
    assert all(len(story) > 20 for story in stories[0])


def test_a_broken_rule_is_told_with_its_seed_story_and_command(monkeypatch):
    """A failure names the rule, the last events, and the command that plays it again."""
    from zbus.protocol.callee import Callee

    monkeypatch.setattr(Callee, "_report", lambda *arguments: None)
    report = run_seeds(range(1000))
    text = str(report.failures[0])
    assert f"--replay {report.failures[0].seed} " in text
    assert "broke I" in text
    assert " ms  " in text


def test_the_command_prints_one_json_object():
    """``python -m zbus.testing.simulation --json`` prints runs, events, violations, coverage and rate, and exits 0."""
    done = subprocess.run(
        [sys.executable, "-m", "zbus.testing.simulation", "--seconds", "0.2", "--seed", "7", "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["runs"] > 0
    assert told["events"] > told["runs"]
    assert told["violations"] == []
    assert told["runs_per_s"] > 0
    assert told["coverage"]["outcome: OK"] > 0


def test_claims_hold_on_a_lagging_file_server():
    """I8: with lost replies, stale handles, late names, full disks and clients that die, each claim has one winner.

    I13: and no lease is called expired whose renewals could be seen, whatever the clocks and pauses.
    """
    report = run_seeds(range(150), "registry")
    assert not report.failures, report.failures[0]
    quirks = ("names that lag", "lost replies", "stale handles", "full disks", "a client dies")
    assert min(report.covered["registry", what] for what in quirks) > 20
    ways = ("clocks at other rates", "renewals seen late", "renewals that fail", "processes stopped", "expired")
    assert min(report.covered["lease", what] for what in ways) > 20


def test_shared_memory_shows_what_was_sent_and_comes_back():
    """I14: whoever dies and whatever comes late or twice, a view never changes, and in the end every slot is free."""
    covered: dict[object, int] = defaultdict(int)
    for seed in range(300):
        lending(seed, covered)
    ways = ("opened", "late messages refused", "no room", "readers that died", "dead readers forgotten")
    more = ("owners that died", "slots given back", "files that are gone", "steps between two accesses")
    assert min(covered["lending", what] for what in (*ways, *more)) > 20


def test_small_scopes_hold_with_any_single_fault():
    """Two requests and each fault at each message, HELLO included, in every scope: complete."""
    report = explore(faults=1)
    assert not report.failures, report.failures[0]
    assert report.runs > 500


@pytest.mark.ci
def test_small_scopes_hold_with_any_two_faults():
    """As above with every pair of faults: some 24,000 runs, complete."""
    report = explore()
    assert not report.failures, report.failures[0]
    assert report.runs > 20_000


def test_a_failing_seed_is_made_small():
    """The shrunk run breaks the same rule with fewer faults and a short story; a seed that holds has none."""
    assert shrink(1) is None
    with applied("no_dedup"):
        failure = run_seeds(range(1000)).failures[0]
        shrunk = shrink(failure.seed)
    assert shrunk.failure.rule == failure.rule
    assert shrunk.knobs.requests == 1
    assert len(shrunk.failure.story) < 20
    assert f"--shrink {failure.seed} --size small" in str(shrunk)
