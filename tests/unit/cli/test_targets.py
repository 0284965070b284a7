from __future__ import annotations

import sys

import pytest

from controller.targets import call_driver, find_driver, parse_target, run_script, takes_run
from zbus.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch, tmp_path):
    """Keep sys.path, sys.argv and sys.modules as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_three_forms_are_told_apart(tmp_path):
    """A config by its suffix, a script by .py, a function by its colon."""
    for name in ("job.yaml", "job.toml", "train.py"):
        (tmp_path / name).write_text("")
    assert parse_target("job.yaml").config == tmp_path / "job.yaml"
    assert parse_target("job.toml").config == tmp_path / "job.toml"
    assert parse_target("train.py").script == tmp_path / "train.py"
    found = parse_target("train.py:main")
    assert (found.driver, found.function) == (str(tmp_path / "train.py"), "main")
    assert (parse_target("a.b:main").driver, parse_target("a.b:main").function) == ("a.b", "main")


@pytest.mark.parametrize(
    ("target", "name"),
    [("job.yaml", "job"), ("train.py", "train"), ("my train.py:main", "my-train"), ("pkg.drivers:main", "drivers")],
)
def test_an_experiment_without_a_name_takes_the_targets(tmp_path, target, name):
    """The default name is the file's or the module's, made valid."""
    for file in ("job.yaml", "train.py", "my train.py"):
        (tmp_path / file).write_text("")
    assert parse_target(target).experiment == name


def test_a_missing_file_offers_the_nearest(tmp_path):
    """A misspelt file name is met with the one that exists."""
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError, match="does not exist") as caught:
        parse_target("trian.py")
    assert caught.value.hint == "did you mean `train.py`?"


def test_a_driver_imports_what_lies_beside_it(tmp_path):
    """A driver file imports its neighbours, as a script does, wherever the command is started."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "neighbour_of_driver.py").write_text("VALUE = 5\n")
    (tmp_path / "job" / "drv.py").write_text(
        "import neighbour_of_driver\ndef main(run): return neighbour_of_driver.VALUE\n"
    )
    driver = find_driver(parse_target("drv.py:main", tmp_path / "job"))
    assert call_driver(driver, None) == 5


def test_a_driver_named_like_a_loaded_module_does_not_replace_it(tmp_path):
    """A file json.py stays apart from the module json."""
    import json

    (tmp_path / "json.py").write_text("def main(): return 'mine'\n")
    assert call_driver(find_driver(parse_target("json.py:main"))) == "mine"
    assert sys.modules["json"] is json


def test_what_the_driver_itself_raises_passes_through(tmp_path):
    """A missing import inside the user's module is the user's failure, not a wrong target."""
    (tmp_path / "broken_driver.py").write_text("import no_such_module_here\n")
    for target in ("broken_driver.py:main", "broken_driver:main"):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
            find_driver(parse_target(target))


def test_a_driver_may_be_a_coroutine_function(tmp_path):
    """A driver `async def main(run)` is run to its end."""
    (tmp_path / "adrv.py").write_text("async def main(run): return run\nasync def bare(): return 1\n")
    driver = find_driver(parse_target("adrv.py:main"))
    assert takes_run(driver)
    assert call_driver(driver, 7) == 7
    bare = find_driver(parse_target("adrv.py:bare"))
    assert not takes_run(bare)
    assert call_driver(bare) == 1


def test_a_script_runs_as_main_with_its_arguments(tmp_path, capsys):
    """The script sees __main__, its own argv, and its neighbours."""
    (tmp_path / "neighbour_of_script.py").write_text("NAME = 'n'\n")
    script = tmp_path / "s.py"
    script.write_text("import sys, neighbour_of_script as n\nprint(__name__, sys.argv, n.NAME)\n")
    run_script(script, ["--flag"])
    assert capsys.readouterr().out == f"__main__ ['{script}', '--flag'] n\n"
