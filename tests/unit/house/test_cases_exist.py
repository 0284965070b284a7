from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
WANTED = "1-8 10-12 14 15 18-24 27-33 36-39 46 57 59 60"


def test_every_test_that_the_list_of_founding_cases_names_exists() -> None:
    """``tests/CASES.md`` points at tests that are there."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "CASES.md").read_text())
    assert named
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (TESTS / file).is_file() or not re.search(rf"def {test}\(", (TESTS / file).read_text())
    ]
    assert not missing


def test_every_founding_case_has_a_test() -> None:
    """No case is left out, and each is told in words beside its number."""
    rows = re.findall(
        r"^\| founding case B(\d+): .{10,}?\| .+\| .+\| `", (TESTS / "CASES.md").read_text(), re.MULTILINE
    )
    wanted = []
    for part in WANTED.split():
        first, _, last = part.partition("-")
        wanted += range(int(first), int(last or first) + 1)
    assert [int(row) for row in rows] == wanted
