"""Kill -9 and worse, at random: every record of every source is accounted for, and the merge never fails."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest

from trace_rounds import Account, process_round, trial_round

pytestmark = pytest.mark.alone


def rounds(number: int, first_seed: int) -> Account:
    """Play rounds, two of three with single processes and a small disk, the third with a whole trial."""
    account = Account()
    for seed in range(first_seed, first_seed + number):
        with tempfile.TemporaryDirectory(prefix="zt", dir="/tmp") as path:
            one = trial_round if seed % 3 == 0 else process_round
            print(f"seed {seed}: {one.__name__}", flush=True)
            one(Path(path), random.Random(seed), account)
    print(account)
    return account


def test_killed_at_random_everything_is_accounted_for():
    """Two rounds of kill -9 and stops of ranks, sidecar and controller: recorded = written + lost for each source."""
    assert rounds(2, 2).merged == 2


@pytest.mark.ci
@pytest.mark.timeout(3600)
def test_many_rounds_of_kills_stops_and_full_disks():
    """Twenty rounds (ZBUS_TEST_TRACE_ROUNDS for more); what was missing of killed ranks is a flush period at most."""
    number = int(os.environ.get("ZBUS_TEST_TRACE_ROUNDS", "20"))
    account = rounds(number, int(os.environ.get("ZBUS_TEST_TRACE_SEED", "1000")))
    assert account.rounds == account.merged == number
    assert account.recorded == account.read + account.counted + account.missing
