from __future__ import annotations

from zbus.protocol.redial import Redial


def test_who_is_silent_is_dialled_less_and_less_often():
    """2 s, 4 s, … 30 s while nothing comes, from the start again once something came."""
    redial = Redial()
    dialled = [second for second in range(130) if redial.silent(second * 1_000_000_000)]
    assert dialled == [2, 6, 14, 30, 60, 90, 120]
    redial.heard()
    assert not redial.silent(200_000_000_000)
    assert redial.silent(202_000_000_000)
    assert redial.count == 8
