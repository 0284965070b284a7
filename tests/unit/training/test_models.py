from __future__ import annotations

import sys

import pytest

from workers.engines.models import build_model, check_model, dtype_of
from zbus.errors import ConfigError, EngineLoadError
from zbus.runtime.loader import load_object

FACTORY = """
from torch import nn

class Small(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(width, width)

def number():
    return 7
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory on the import path with a file of factories."""
    pytest.importorskip("torch", reason="models are torch's: install zbus-runtime[torch]")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "small_factories.py").write_text(FACTORY)
    yield tmp_path
    sys.modules.pop("small_factories", None)


def test_a_factory_is_found_beside_what_is_on_the_import_path(folder):
    """A relative file is looked up in the directories of the import path too, so roles need no absolute paths."""
    model = build_model({"factory": "small_factories.py:Small", "kwargs": {"width": 5}}, dtype="float64")
    assert model.layer.weight.shape == (5, 5)
    assert str(model.layer.weight.dtype) == "torch.float64"
    assert type(model) is type(build_model("small_factories:Small"))


def test_a_factory_that_makes_no_module_is_refused_by_name(folder):
    """The error names the factory and what it made."""
    with pytest.raises(TypeError, match=r"small_factories.py:number.* made a int"):
        build_model("small_factories.py:number")


def test_a_misspelt_name_is_answered_with_the_nearest(folder):
    """What a role names and nobody defines is refused with a near name."""
    with pytest.raises(EngineLoadError, match=r"no name 'Smal' for loss 'x'") as caught:
        load_object("small_factories.py:Smal", "loss 'x'")
    assert "small_factories.py:Small" in caught.value.hint


def test_a_file_that_is_nowhere_is_refused(folder):
    """A file on no path is refused by name."""
    with pytest.raises(EngineLoadError, match=r"model 'absent.py:Model': there is no file"):
        build_model("absent.py:Model")


@pytest.mark.parametrize("spec", [7, "model", {}, {"kwargs": {}}, {"factory": "a:b", "hf": "x"}, {"width": 3}])
def test_what_names_no_model_is_refused_before_anything_is_loaded(spec):
    """A description without one factory is an error with the three ways to write one."""
    with pytest.raises(ConfigError, match="names no factory") as caught:
        check_model(spec)
    assert "hf" in caught.value.hint


def test_a_directory_without_a_model_is_refused_and_nothing_is_downloaded(tmp_path):
    """A Hugging Face name that is no directory here is an error, never a download."""
    pytest.importorskip("torch", reason="models are torch's: install zbus-runtime[torch]")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        build_model({"hf": str(tmp_path / "org/name")})


def test_a_dtype_that_torch_has_not_is_refused():
    """A misspelt dtype is a configuration error."""
    pytest.importorskip("torch", reason="models are torch's: install zbus-runtime[torch]")
    with pytest.raises(ConfigError, match="float33"):
        dtype_of("float33")
