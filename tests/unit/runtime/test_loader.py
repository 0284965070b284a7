"""Engines and drivers from files: each file is its own module, whatever it is called."""

import json
import sys

import pytest

from zbus.runtime.loader import digest_of, import_file, load_engine

ENGINE = """
import zbus

class Echo(zbus.Engine):
    @zbus.endpoint(effect="pure")
    def say(self) -> str:
        return {word!r}
"""


@pytest.fixture(autouse=True)
def _same_modules(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        if sys.modules[name].__name__.endswith(("loader_twin", "json")):
            del sys.modules[name]
    assert sys.modules["json"] is json


def write(folder, name, word):
    """Write a file with an engine that says ``word``."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(ENGINE.format(word=word))
    return file


def test_files_of_one_name_are_modules_of_their_own(tmp_path):
    """Three roles may keep their engines in files of one name in three directories."""
    words = ["a", "b", "c"]
    for word in words:
        write(tmp_path / word, "loader_twin.py", word)
    classes = [load_engine("loader_twin.py:Echo", base=tmp_path / word) for word in words]
    assert [cls().say() for cls in classes] == words
    assert load_engine("loader_twin.py:Echo", base=tmp_path / "b") is classes[1], "a file is imported once"


def test_a_file_named_as_a_loaded_module_leaves_that_one_alone(tmp_path):
    """An engine in ``json.py`` takes nobody's ``json`` away."""
    module = import_file(write(tmp_path, "json.py", "mine"))
    assert module.Echo().say() == "mine"


def test_both_sides_agree_on_a_digest_whatever_the_module_is_called(tmp_path):
    """The name under which a side had to import the file is no part of the digest."""
    first = load_engine("loader_twin.py:Echo", base=write(tmp_path / "a", "loader_twin.py", "same").parent)
    second = load_engine("loader_twin.py:Echo", base=write(tmp_path / "b", "loader_twin.py", "same").parent)
    other = load_engine("loader_twin.py:Echo", base=write(tmp_path / "c", "loader_twin.py", "other").parent)
    assert first.__module__ != second.__module__
    assert digest_of(first) == digest_of(second) != digest_of(other)
