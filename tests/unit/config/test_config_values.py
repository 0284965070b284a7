from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbus.config import format_duration, format_size, parse_duration, parse_size
from zbus.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (30, 30.0),
        (0, 0.0),
        (0.25, 0.25),
        ("45", 45.0),
        ("30s", 30.0),
        ("250ms", 0.25),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        (" 1.5 h ", 5400.0),
        ("2d", 172800.0),
    ],
)
def test_durations_are_read_as_people_write_them(text, seconds):
    """A duration is a number of seconds, or numbers with units."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "bad", ["", "soon", "5 minutes", "-3s", "3x", "1h-30m", -2, math.inf, math.nan, True, None, []]
)
def test_what_is_no_duration_is_refused_by_name(bad):
    """A refusal names the value, what it was for, and how to write it."""
    with pytest.raises(ConfigError, match=r"grace .* is not a duration") as caught:
        parse_duration(bad, "grace")
    assert "30s" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "size"),
    [(0, 0), (4096, 4096), ("5000", 5000), ("64MiB", 64 << 20), ("1.5GB", 1_500_000_000), ("2 kib", 2048), ("7B", 7)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    """A size is a number of bytes, or a number with a decimal or binary unit."""
    assert parse_size(text) == size


@pytest.mark.parametrize("bad", ["", "big", "64 Mb/s", "-1", -2, 1.5, True, None])
def test_what_is_no_size_is_refused_by_name(bad):
    """A refusal names the value and what it was for."""
    with pytest.raises(ConfigError, match=r"mem .* is not a size"):
        parse_size(bad, "mem")


@given(st.integers(0, 10**18))
def test_whole_sizes_are_exact(size):
    """A whole number of bytes survives as text."""
    assert parse_size(str(size)) == size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "400 us"),
        (0.0026, "2.6 ms"),
        (0.94, "0.9 s"),
        (7.24, "7.2 s"),
        (41, "41 s"),
        (251, "4m11s"),
        (7500, "2h05m"),
    ],
)
def test_durations_are_shown_short(seconds, text):
    """A duration is shown with the precision a person reads."""
    assert format_duration(seconds) == text


def test_sizes_are_shown_in_powers_of_1024():
    """A size is shown in the unit of its magnitude."""
    assert [format_size(n) for n in (0, 512, 2048, 64 << 20, int(1.9 * (1 << 30)))] == [
        "0 B", "512 B", "2.0 KiB", "64 MiB", "1.9 GiB"
    ]  # fmt: skip
