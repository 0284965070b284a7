"""What is looked at for many events at once finds all that a look at each would find."""

import pytest

from traceview.batch import FAST_PHASES, Batch
from traceview.event import Event, has_long_number


@pytest.mark.parametrize("digits", [19, 20, 21, 23])
@pytest.mark.parametrize("size", [100, 6000, 6001, 6002, 6003])
def test_a_long_number_is_found_wherever_it_stands(digits, size):
    """Also where it ends with the data; 19 digits are none, nor are longer ones with a point in between."""
    for before in range(9):
        for after in (0, 1, size):
            data = b"x" * (size * 4 // 5) + b" " * before + b"7" * digits + b" " * after
            assert has_long_number(data) == (digits >= 20), (before, after)
    assert not has_long_number(b"x" * size + b"1234567890123456789.123456789 " * 9)


def test_events_are_plain_only_if_each_phase_is_one_known_letter_and_each_has_a_time():
    """Metadata needs no time; lengths that add up to as many letters as events do not deceive."""
    good = [Event("a", phase, ts=1.5) for phase in sorted(FAST_PHASES)] + [Event("name", "M")]
    batch = Batch.of_plain(good)
    assert batch is not None
    assert batch.phases == "".join(event.ph for event in good)
    assert batch.phase.tobytes().decode() == batch.phases
    for bad in (
        [Event("a", "XX", ts=1.0), Event("b", "", ts=1.0)],
        [Event("a", "Q", ts=1.0)],
        [Event("a", "é", ts=1.0)],
        [Event("a", "X", ts=1.0), Event("a", "X")],
    ):
        assert Batch.of_plain(bad) is None


def test_of_a_batch_a_part_keeps_its_columns():
    """Events, letters, numbers and times go together."""
    batch = Batch.of([Event(str(n), "XCi"[n % 3], ts=float(n)) for n in range(9)])
    some = batch.only(batch.ts % 2 == 1)
    assert [event.name for event in some.events] == ["1", "3", "5", "7"]
    assert some.phases == some.phase.tobytes().decode() == "CXiC"
    assert some.ts.tolist() == [1.0, 3.0, 5.0, 7.0]
