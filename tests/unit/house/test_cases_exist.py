from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
WANTED = "1-8 10-12 14-24 27-33 36-39 43 46-58 59 60 61-86"
FAULT_ROWS = "1-76"
REPORTS = "1-35"


def numbers(text: str) -> list[int]:
    """Return the numbers that a list of numbers and ranges names."""
    found: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@pytest.mark.parametrize("page", ["CASES.md", "FAULTS.md"])
def test_every_test_that_a_list_names_exists(page: str) -> None:
    """``tests/CASES.md`` and ``tests/FAULTS.md`` point at tests that are there."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / page).read_text())
    assert named
    texts = {file: (TESTS / file).read_text() for file, _ in named if (TESTS / file).is_file()}
    missing = [
        f"{file}::{test}" for file, test in named if not re.search(rf"^def {test}\(", texts.get(file, ""), re.MULTILINE)
    ]
    assert not missing


def test_every_founding_case_has_a_test() -> None:
    """No case is left out, and each is told in words beside its number."""
    rows = re.findall(
        r"^\| founding case B(\d+): .{10,}?\| .+\| .+\| `", (TESTS / "CASES.md").read_text(), re.MULTILINE
    )
    assert [int(row) for row in rows] == numbers(WANTED)


def test_every_fault_has_a_test() -> None:
    """No row and no public report is left out, and each says in words what fails and what is right then."""
    text = (TESTS / "FAULTS.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .{10,}?\| .{10,}?\| `", text, re.MULTILINE)
    reports = re.findall(r"^\| report (\d+): .+?\| .{10,}?\| .{10,}?\| `", text, re.MULTILINE)
    assert [int(row) for row in rows] == numbers(FAULT_ROWS)
    assert [int(row) for row in reports] == numbers(REPORTS)


def test_every_odd_input_of_traces_has_a_test() -> None:
    """Each of the forty odd inputs that a merge survives is named by a test, in its docstring, as ``(row N)``."""
    text = "".join(path.read_text() for path in sorted((TESTS / "unit" / "traceview").glob("test_*.py")))
    rows = {int(n) for found in re.findall(r"\(rows? ([^)]*)\)", text) for n in re.findall(r"\b(\d+)\b", found)}
    assert set(range(1, 41)) <= rows, sorted(set(range(1, 41)) - rows)
