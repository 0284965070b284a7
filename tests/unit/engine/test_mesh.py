from __future__ import annotations

import pytest

from zbus.engine import Mesh
from zbus.errors import ConfigError


def test_the_last_axis_changes_fastest():
    """Ranks are laid out row-major."""
    mesh = Mesh({"dp": 2, "tp": 3})
    assert [mesh.coords(rank) for rank in range(3)] == [{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 0, "tp": 2}]
    assert mesh.coords(3) == {"dp": 1, "tp": 0}


def test_rank_and_coords_are_inverse():
    """Every rank has one position and every position one rank."""
    mesh = Mesh({"pp": 2, "dp": 3, "tp": 4})
    assert [mesh.rank(mesh.coords(rank)) for rank in range(mesh.size)] == list(range(24))


def test_select_leaves_other_axes_free():
    """Coordinates that are not named may take every value."""
    mesh = Mesh({"dp": 2, "tp": 2})
    assert mesh.select({"dp": 1}) == [2, 3]
    assert mesh.select({"tp": [0]}) == [0, 2]
    assert mesh.select({}) == [0, 1, 2, 3]


def test_a_role_without_axes_has_dp():
    """One axis dp over all ranks is the default."""
    assert Mesh.of(None, 4).axes == {"dp": 4}


@pytest.mark.parametrize("axes", [{}, {"dp": 0}, {"dp": True}, {"": 2}])
def test_a_mesh_without_places_is_refused(axes):
    """An axis has a name and at least one place."""
    with pytest.raises(ConfigError):
        Mesh(axes)


def test_the_mesh_must_cover_the_ranks():
    """Axis sizes multiply to the number of ranks, or both are named in the refusal."""
    with pytest.raises(ConfigError, match="dp=2 x tp=2 has 4 places, the role has 6 ranks"):
        Mesh.of({"dp": 2, "tp": 2}, 6)


def test_unknown_axes_and_positions_are_refused():
    """A wrong axis names the right ones; a wrong position names the range."""
    mesh = Mesh({"dp": 2})
    with pytest.raises(ConfigError, match="no axis 'tp'") as caught:
        mesh.select({"tp": 0})
    assert caught.value.hint == "its axes are dp"
    with pytest.raises(IndexError, match=r"axis dp has positions 0\.\.1, not 2"):
        mesh.select({"dp": 2})
    with pytest.raises(ConfigError, match="do not name the axis 'dp'"):
        mesh.rank({})
    with pytest.raises(IndexError):
        mesh.coords(2)
