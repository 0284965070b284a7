from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from zbus.config import Config, RoleConfig, load_config
from zbus.config.load import all_keys
from zbus.config.reference import page
from zbus.errors import ConfigError

YAML = """\
experiment: demo
roles:
  actor:
    replicas: 4
    engine: engines:Actor
    mesh: {dp: 4}
    mem: 64MiB
    env: {OMP_NUM_THREADS: 01, NCCL_IB_HCA: "mlx5_0,mlx5_1", FLAG: on}
scheduler:
  startup_timeout: 5m
trace: {level: off}
params: {lr: 3e-4, on: yes, when: 1:30, nested: {deep: [1, two]}}
"""


def load(files=(), overrides=(), *, env=None, **kwargs):
    """Load with nothing of this machine's own."""
    return load_config(files, overrides, env=env or {}, **kwargs)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Return a config with every kind of value."""
    file = tmp_path / "job.yaml"
    file.write_text(YAML)
    return file


def test_a_file_is_read_into_typed_values(config_file):
    """Durations become seconds, sizes bytes, and the user's section stays as it is."""
    config = load([config_file]).config
    assert config.scheduler.startup_timeout == 300.0
    actor = config.roles["actor"]
    assert (actor.replicas, actor.mesh, actor.mem, actor.engine) == (4, {"dp": 4}, 64 << 20, "engines:Actor")
    assert config.params == {"lr": 3e-4, "on": "yes", "when": "1:30", "nested": {"deep": [1, "two"]}}


def test_words_that_old_yaml_turns_into_booleans_stay_words(config_file):
    """`level: off` is the word off; `3e-4` is a number."""
    assert load([config_file]).config.trace.level == "off"


def test_environment_values_stay_as_written(config_file):
    """B33: commas, leading zeros and words in env values arrive as they were written."""
    env = load([config_file]).config.roles["actor"].env
    assert env == {"OMP_NUM_THREADS": "01", "NCCL_IB_HCA": "mlx5_0,mlx5_1", "FLAG": "on"}


def test_toml_says_the_same(tmp_path):
    """A TOML file and a YAML file with the same content give the same config."""
    file = tmp_path / "job.toml"
    file.write_text(
        'experiment = "demo"\n[roles.actor]\nengine = "engines:Actor"\nreplicas = 2\nmem = "64MiB"\n\n'
        '[scheduler]\nstartup_timeout = "5m"\n'
    )
    found = load([file])
    assert found.config.roles["actor"].mem == 64 << 20
    assert found.config.scheduler.startup_timeout == 300.0
    assert found.origin("scheduler.startup_timeout") == f"{file}:8"


def test_later_sources_win_and_every_origin_is_kept(config_file, tmp_path):
    """Overrides beat the environment, which beats files, later files beat earlier, all beat the user's defaults."""
    home = tmp_path / "xdg"
    (home / "zbus").mkdir(parents=True)
    (home / "zbus" / "config.toml").write_text('root = "/from-user"\n[rpc]\ntimeout = 1\nlease = 9\n')
    second = tmp_path / "second.yaml"
    second.write_text("rpc: {timeout: 3, create_timeout: 2s}\nroot: /from-second\n")
    found = load(
        [config_file, second],
        ["rpc.timeout=5", ("trial=t1", "command line, --trial")],
        env={
            "XDG_CONFIG_HOME": str(home),
            "ZBUS_RPC__TIMEOUT": "4",
            "ZBUS_RPC__CREATE_TIMEOUT": "4s",
            "ZBUS_TRIAL": "t0",
        },
    )
    config = found.config
    assert (config.rpc.timeout, config.rpc.create_timeout, config.rpc.lease) == (5.0, 4.0, 9.0)
    assert (config.root, config.trial) == ("/from-second", "t1")
    assert found.origin("rpc.timeout") == "override 1"
    assert found.origin("rpc.create_timeout") == "environment variable ZBUS_RPC__CREATE_TIMEOUT"
    assert found.origin("root") == f"{second}:2"
    assert found.origin("rpc.lease") == f"{home / 'zbus' / 'config.toml'}:4"
    assert found.origin("trial") == "command line, --trial"
    assert found.origin("scheduler.bind") == "default"


def test_files_named_in_the_environment_are_read_first(config_file, tmp_path):
    """ZBUS_CONFIG names files that those of the command line override."""
    base = tmp_path / "base.yaml"
    base.write_text("experiment: base\nrpc: {lease: 4}\n")
    config = load([config_file], env={"ZBUS_CONFIG": f"{base}:"}).config
    assert (config.experiment, config.rpc.lease) == ("demo", 4.0)


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("ZBUS_ROOT", "/r", "root"),
        ("ZBUS_EXPERIMENT", "e", "experiment"),
        ("ZBUS_TRACE", "full", "trace.level"),
        ("ZBUS_BIND", "10.0.0.1", "scheduler.bind"),
        ("ZBUS_LOG_LEVEL", "debug", "log.level"),
        ("ZBUS_SCHEDULER__TYPE", "inline", "scheduler.type"),
    ],
)
def test_environment_variables_set_their_keys(variable, value, key):
    """The short variables and ZBUS_<SECTION>__<KEY> are config keys."""
    found = load(env={variable: value})
    node = found.config
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value
    assert found.origin(key) == f"environment variable {variable}"


def test_environment_reaches_roles_and_their_env(config_file):
    """Below `env` the spelling of a variable is kept."""
    env = {"ZBUS_ROLES__ACTOR__ENV__CUDA_VISIBLE_DEVICES": "0,1", "ZBUS_ROLES__ACTOR__RESTART": "one"}
    actor = load([config_file], env=env).config.roles["actor"]
    assert actor.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert actor.restart == "one"


@pytest.mark.parametrize(
    ("override", "sentence", "hint"),
    [
        ("scheduler.startup_timout=5m", "unknown config key `scheduler.startup_timout`", "`scheduler.startup_timeout`"),
        ("startup_timeout=3", "unknown config key `startup_timeout`", "`scheduler.startup_timeout`"),
        ("roles.actor.replica=3", "unknown config key `roles.actor.replica`", "`roles.actor.replicas`"),
        ("schedular.type=inline", "unknown config key `schedular`", "`scheduler`"),
        ("roles.actr.replicas=3", "config key `roles.actr.engine` is missing", "`roles.actor`"),
        ("scheduler.type=slurmy", "expected `inline`, `local` or `external`", ""),
        ("roles.actor.replicas=four", "bad value for config key `roles.actor.replicas`", ""),
        ("roles.actor.replicas=0", "bad value for config key `roles.actor.replicas`", ""),
        ("rpc.timeout=soon", "value of `rpc.timeout` 'soon' is not a duration", "30s"),
        ("roles.actor.mem=much", "value of `roles.actor.mem` 'much' is not a size", "64MiB"),
        ("rpc=5", "config key `rpc` holds a section", ""),
        ("roles.actor.engine=engines.Actor", "not of the form module:Class", ""),
        ("roles.actor.engine=gone.py:Actor", "does not exist", ""),
        ("roles.actor.mesh={dp: 3}", "has 4 replicas, but its mesh (dp 3) needs 3", "roles.actor.mesh.dp=4"),
        ("roles.actor.mesh.tp=3", "has 4 replicas, but its mesh (dp 4 x tp 3) needs 12", "roles.actor.replicas=12"),
        ("experiment=../up", "experiment '../up' is not a valid name", ""),
        ("roles.a/b.engine=m:C", "role 'a/b' is not a valid name", ""),
        ("+rpc.timeout=5", "starts with `+`", "rpc.timeout=5"),
        ("rpc.timeout", "is not an override", "key=value"),
        ("rpc..timeout=3", "is not an override", "key=value"),
        ("params.x={a: 1", "value of `params.x` cannot be read", "quotes"),
    ],
)
def test_a_bad_override_is_refused_with_its_place_and_a_way_out(config_file, override, sentence, hint):
    """Each refusal names the key, says where the value stands, and offers the nearest right thing."""
    with pytest.raises(ConfigError) as caught:
        load([config_file], [(override, "command line, argument 2")])
    assert sentence in str(caught.value)
    assert caught.value.facts["from"] == "command line, argument 2"
    assert hint in (caught.value.hint or "")
    assert (caught.value.code, caught.value.exit_code) == ("ZB0101", 2)


@pytest.mark.parametrize(
    ("text", "sentence", "line"),
    [
        ("scheduler:\n  typ: local\n", "unknown config key `scheduler.typ`", 2),
        ("rpc:\n  timeout: 1\n  timeout: 2\n", "config key `rpc.timeout` stands twice", 3),
        ("- a\n- b\n", "does not hold a mapping", 1),
        ("rpc: {timeout: [1\n", "not valid YAML", 2),
        ("roles:\n  actor:\n    engine: m:C\n    env: {A: {b: c}}\n", "roles.actor.env.A", 4),
        ("params: &p\n  again: *p\n", "refers to itself", 1),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, text, sentence, line):
    """A refusal of a file names the file and the line."""
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load([file])
    assert sentence in str(caught.value)
    assert caught.value.facts["from"] == f"{file}:{line}"


def test_bad_toml_is_refused_with_its_line(tmp_path):
    """A TOML file that cannot be parsed, or says an unknown key, names its line."""
    file = tmp_path / "bad.toml"
    for text, line in (("a = \n", 1), ("[rpc]\nlease = 3\ntimout = 3\n", 3)):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load([file])
        assert caught.value.facts["from"] == f"{file}:{line}"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """A missing file, another suffix, and bytes that are no text are each named."""
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe")
    for file, sentence in (
        (tmp_path / "none.yaml", "cannot be read: No such file"),
        (tmp_path / "job.json", "neither YAML nor TOML"),
        (binary, "not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load([file])


def test_yaml_never_builds_objects(tmp_path):
    """A tag that asks for a Python object is refused, not obeyed."""
    file = tmp_path / "evil.yaml"
    file.write_text("params: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load([file])


def test_anchors_and_merges_work(tmp_path):
    """YAML anchors and merge keys are part of what people write."""
    file = tmp_path / "job.yaml"
    file.write_text("roles:\n  a: &a {engine: m:C, replicas: 2}\n  b: {<<: *a, replicas: 3}\n")
    roles = load([file]).config.roles
    assert (roles["a"].replicas, roles["b"].replicas, roles["b"].engine) == (2, 3, "m:C")


def test_python_objects_are_accepted():
    """A dict, a dataclass, a Config and an object with model_dump() say the same."""

    @dataclasses.dataclass
    class Mine:
        experiment: str = "demo"
        rpc: dict = dataclasses.field(default_factory=lambda: {"timeout": "5m"})

    class Model:
        def model_dump(self):
            return {"experiment": "demo", "rpc": {"timeout": 300}}

    first = load(data={"experiment": "demo", "rpc": {"timeout": 300.0}}).config
    assert load(data=Mine()).config == first
    assert load(data=Model()).config == first
    assert load(data=first).config == first
    with pytest.raises(ConfigError, match="must be a mapping"):
        load(data=5)
    with pytest.raises(ConfigError) as caught:
        load(data={"rpc": {"timout": 3}})
    assert caught.value.facts["from"] == "config given in Python"


def test_the_resolved_config_reads_back_equal(config_file, tmp_path):
    """config.yaml is YAML that gives the same config again, and shows each origin."""
    found = load([config_file], ["rpc.timeout=7"])
    text = found.to_yaml()
    assert "timeout: 7.0  # override 1" in text
    again = tmp_path / "config.yaml"
    again.write_text(text)
    assert load([again]).config.to_dict() == {
        **found.config.to_dict(),
        "roles": load([again]).config.to_dict()["roles"],
    }
    assert yaml.safe_load(text)["roles"]["actor"]["mem"] == 64 << 20


def test_replicas_follow_the_mesh():
    """A role without replicas has as many ranks as its mesh; without both, one."""
    config = load(data={"roles": {"a": {"engine": "m:C", "mesh": {"dp": 2, "tp": 3}}, "b": {"engine": "m:C"}}}).config
    assert (config.roles["a"].replicas, config.roles["b"].replicas) == (6, 1)
    assert RoleConfig(engine="m:C", mesh={"dp": 2}).world_size == 2


def test_a_count_given_for_this_run_stretches_a_mesh_of_one_axis(config_file):
    """`--role actor=2` on a file with mesh {dp: 4} means dp 2; with two axes the user must say which."""
    role = load([config_file], ["roles.actor.replicas=2"]).config.roles["actor"]
    assert (role.replicas, role.mesh) == (2, {"dp": 2})


def test_an_engine_may_be_a_file_beside_the_config(tmp_path):
    """`file.py:Class` is found from the config's directory, which workers can import from."""
    (tmp_path / "engines.py").write_text("")
    file = tmp_path / "job.yaml"
    file.write_text("roles: {a: {engine: 'engines.py:Actor'}, b: {engine: 'pkg.mod:C', sys_path: [lib]}}\n")
    roles = load([file]).config.roles
    assert (roles["a"].engine, roles["a"].sys_path) == (f"{tmp_path}/engines.py:Actor", [str(tmp_path)])
    assert roles["b"].sys_path == [str(tmp_path / "lib"), str(tmp_path)]


def test_a_section_can_be_replaced_by_an_override():
    """An override of a mapping with a scalar or a mapping leaves nothing behind of keys it hides."""
    found = load(data={"params": {"a": {"b": 1}}}, overrides=["params.a=2", "params.c={d: 3}"])
    assert found.config.params == {"a": 2, "c": {"d": 3}}
    assert "params.a.b" not in found.origins


def test_every_key_is_listed():
    """The list of keys holds sections, leaves and the keys of each role."""
    keys = all_keys(["actor"])
    assert {"experiment", "scheduler.type", "roles.actor.replicas", "rpc.timeout", "params"} <= set(keys)


def test_the_page_of_config_keys_is_current():
    """docs/reference/config.md is what zbus.config.reference makes, and it names every key."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    assert text == page()
    sections = ("roles", "scheduler", "rpc", "trace", "log", "roles.ROLE")
    assert [key for key in all_keys(["ROLE"]) if f"`{key}`" not in text and key not in sections] == []


def test_defaults_make_a_config():
    """No source at all is a valid config."""
    assert load().config == Config()


def test_the_light_half_needs_no_schema():
    """Importing zbus.config loads neither msgspec nor yaml."""
    code = "import sys, zbus.config; print([m for m in ('msgspec', 'yaml', 'numpy', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
