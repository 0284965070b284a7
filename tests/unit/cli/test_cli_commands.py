from __future__ import annotations

import json
import subprocess
import sys

import pytest

from controller.cli import main
from controller.explain import TEXTS, page
from zbus import errors

HEAVY = ("torch", "numpy", "rich", "msgspec", "yaml", "zmq", "asyncio", "controller.run", "controller.controller")


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run the command in an empty directory and return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def test_every_command_has_help(command):
    """-h and --help work on the group and on each command, exit 0, and go to stdout."""
    for arguments in ([], ["run"], ["status"], ["stop"], ["explain"]):
        for flag in ("-h", "--help"):
            code, out, err = command(*arguments, flag)
            assert (code, err) == (0, "")
            assert out.startswith("Usage: zbus-controller")


def test_the_version_is_told_as_text_and_as_data(command):
    """--version prints the version; with --json, in either order, one object with the protocol version."""
    assert command("--version")[1] == f"zbus-controller {sys.modules['zbus'].__version__}\n"
    for order in (["--version", "--json"], ["--json", "--version"]):
        data = json.loads(command(*order)[1])
        assert data["schema"] == "zbus.version/1"
        assert data["protocol"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (["runn"], "no such command 'runn'", "Did you mean 'run'"),
        (["run"], "missing argument 'TARGET'", "zbus-controller run --help"),
        (["run", "x.py", "--rolle", "a=1"], "no such option '--rolle'", "--role"),
        (["run", "x.py", "--progress", "fast"], "invalid value for '--progress'", "--help"),
        (["run", "gone.py"], "target gone.py does not exist", ""),
        (["run", "what"], "target 'what' is neither a config, a script, nor module:function", "module:function"),
        (["run", "nomodule_x:main"], "module nomodule_x does not exist", ""),
        (["run", "json:lod"], "json has no function `lod`", "did you mean `load"),
        (["run", "json:loads", "--resume", "--overwrite"], "exclude each other", ""),
        (["run", "json:loads", "--role", "actor"], "--role 'actor' is not of the form NAME=N", "actor=4"),
        (["run", "json:loads", "scheduler.startup_timout=5m"], "scheduler.startup_timout", "startup_timeout`"),
        (["run", "json:loads", "--scheduler", "slurmy"], "expected `inline`, `local` or `external`", ""),
        (["run", "json:loads"], "no roles are configured for json:loads", "roles.actor.engine"),
        (["explain", "ZB0399"], "there is no error code 'ZB0399'", "ZB03"),
        (["stop", "--grace", "soon"], "--grace 'soon' is not a duration", "30s"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_a_wrong_command_line_exits_2_with_a_way_out(command, arguments, sentence, hint):
    """Usage and config errors exit 2, say what is wrong in one sentence, and leave stdout empty."""
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error[ZB0101]: ")
    assert sentence in err
    assert hint in err


def test_an_argument_is_named_by_its_place(command):
    """The place of a bad override is counted as the user typed it."""
    assert "from: command line, argument 3\n" in command("run", "-q", "json:loads", "rpc.timout=1")[2]
    assert "from: command line, --startup-timeout" in command("run", "json:loads", "--startup-timeout", "x")[2]


def test_with_json_an_error_is_one_object_on_stdout(command):
    """The object carries code, sentence and hint; the block still goes to stderr."""
    for arguments in (["run", "--json", "json:loads", "rpc.timout=1"], ["run", "--json"], ["--json", "status"]):
        code, out, err = command(*arguments)
        data = json.loads(out)
        assert data["schema"] == "zbus.error/1"
        assert data["error"]["exit_code"] == code
        assert err.startswith("error[")


def test_a_trial_that_is_not_there_exits_8(command, tmp_path):
    """Both status and stop say where they looked."""
    for arguments in (["status"], ["stop"], ["status", "nosuch"], ["stop", "demo/nosuch"]):
        code, out, err = command(*arguments, "--root", str(tmp_path / "runs"))
        assert (code, out) == (8, "")
        assert str(tmp_path / "runs") in err


def test_a_code_is_explained_offline(command):
    """The command explain prints meaning, causes and remedies; without a code it lists all."""
    code, out, _ = command("explain", "zb0301")
    assert code == 0
    assert out.startswith("ZB0301: ")
    assert "What to do:" in out
    assert json.loads(command("explain", "ZB0301", "--json")[1])["code"] == "ZB0301"
    assert all(name in command("explain")[1] for name in TEXTS)


def test_every_error_class_is_explained_with_its_exit_code():
    """Each code that can be raised has an explanation, and the exit codes agree."""
    classes = [errors.ZbusError]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub.__module__ == "zbus.errors"]
    assert {cls.code: cls.exit_code for cls in classes} == {code: entry.exit_code for code, entry in TEXTS.items()}


def test_the_page_of_error_codes_is_current():
    """docs/reference/errors.md is what controller.explain makes."""
    from pathlib import Path

    file = Path(__file__).resolve().parents[3] / "docs" / "reference" / "errors.md"
    assert file.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["explain", "ZB0301"]], ids=str)
def test_light_commands_import_nothing_heavy(arguments):
    """Help, version and explain load neither torch, numpy, rich, msgspec, YAML nor zmq."""
    code = (
        "import sys\nfrom controller.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_a_closed_pipe_is_no_traceback():
    """`zbus-controller explain | head -1` ends without noise."""
    line = f"{sys.executable} -m controller.cli explain | head -c 1"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_the_page_of_commands_is_current():
    """docs/reference/cli.md is what controller.reference makes from the command itself."""
    from pathlib import Path

    from controller.reference import page as commands_page

    file = Path(__file__).resolve().parents[3] / "docs" / "reference" / "cli.md"
    assert file.read_text(encoding="utf-8") == commands_page()


def test_every_command_that_texts_recommend_can_be_typed():
    """Each `zbus-controller …` in explanations and hints of this package parses: command and options exist."""
    import re
    from pathlib import Path

    import click

    from controller.cli import cli

    folder = Path(__file__).resolve().parents[3] / "controller"
    sources = "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py")))
    # Only what stands on one line as a whole command; words in braces are filled in when shown.
    found = set(re.findall(r"zbus-controller ((?:run|status|stop|explain)\b[^\"`\n;()]*)", sources))
    assert len(found) > 5
    for text in sorted(found):
        name, *words = re.sub(r"\{[^}]*\}?", "x", text).split()
        command = cli.commands[name]
        context = click.Context(command, info_name=name)
        options = {form for parameter in command.params for form in parameter.opts}
        used = [word for word in words if word.startswith("-")]
        assert set(used) <= options | {"-h", "--help"}, text
        assert context.info_name == name
