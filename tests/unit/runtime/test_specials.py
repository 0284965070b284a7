"""Calls with options: taken apart where they are well-formed, refused where they are not."""

from __future__ import annotations

import pytest

from zbus.runtime.specials import Special, with_specials


def test_options_stand_fourth():
    """A call is what it would be without them; the number of the claim stands apart."""
    made = with_specials([["f", [1], {}], ["g", [], {"x": 2}, {"keep": 7}], ["h", [], {}, {}]], fills=True)
    assert list(made) == [["f", [1], {}], ["g", [], {"x": 2}], ["h", [], {}]]
    assert made.specials == {0: Special(True, None), 1: Special(True, 7), 2: Special(True, None)}


@pytest.mark.parametrize(
    "call",
    [
        ["f", []],
        ["f", [], {}, {}, {}],
        ["f", [], {}, []],
        ["f", [], {}, {"keep": -1}],
        ["f", [], {}, {"keep": True}],
        ["f", [], {}, {"keep": "1"}],
        ["f", [], {}, {"other": 1}],
    ],
    ids=str,
)
def test_what_are_no_options_is_refused(call):
    """The caller is told; nothing of the request runs."""
    with pytest.raises(ValueError, match="request came"):
        with_specials([["f", [], {}], call], fills=False)
