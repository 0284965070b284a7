import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from zbus.errors import ConfigError
from zbus.transport.endpoints import MAX_IPC_PATH, RuntimeDir, bind_endpoints, check, check_length, is_loopback
from zbus.transport.sockets import SocketFactory


def test_a_runtime_directory_is_private_and_found_again(short_dir):
    """Mode 0700 whatever the umask; the same trial gets the same directory."""
    old = os.umask(0)
    try:
        made = RuntimeDir.create(Path("/runs/e/t"), base=short_dir)
    finally:
        os.umask(old)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert RuntimeDir.create(Path("/runs/e/t"), base=short_dir).path == made.path
    assert RuntimeDir.create(Path("/runs/e/u"), base=short_dir).path != made.path
    assert RuntimeDir.open(made.path).path == made.path


def test_the_users_runtime_directory_is_preferred(short_dir):
    """XDG_RUNTIME_DIR, if it is private and short enough."""
    assert RuntimeDir.create(Path("/r"), environ={"XDG_RUNTIME_DIR": str(short_dir)}).path.parent == short_dir


def test_an_asked_for_directory_wins(short_dir):
    """ZBUS_RUNTIME_DIR comes before XDG_RUNTIME_DIR."""
    asked = short_dir / "asked"
    asked.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(short_dir), "ZBUS_RUNTIME_DIR": str(asked)}
    assert RuntimeDir.create(Path("/r"), environ=environ).path.parent == asked


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_a_temporary_directory_with_a_long_path_is_passed_over(tmp_path, variable):
    """A 200-character TMPDIR and trial name still give a socket path that binds."""
    long = tmp_path / ("x" * 100) / ("y" * 100)
    long.mkdir(parents=True, mode=0o700)
    made = RuntimeDir.create(Path("/runs") / ("e" * 64) / ("t" * 64), environ={variable: str(long)})
    factory = SocketFactory(max_sockets=8)
    router = factory.router("main")
    try:
        endpoint = factory.bind(router, made.endpoint("a-label-of-24-characters"))
        assert len(endpoint.removeprefix("ipc://")) <= MAX_IPC_PATH
    finally:
        router.close()
        factory.close()
        made.remove()


def test_an_asked_for_directory_that_is_too_long_is_refused_with_numbers_and_fix(tmp_path):
    """The user's choice is never silently replaced; exit code 2."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(ConfigError, match="107") as caught:
        RuntimeDir.create(Path("/r"), environ={"ZBUS_RUNTIME_DIR": str(long)})
    assert "ZBUS_RUNTIME_DIR" in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_planted_link_is_not_followed(short_dir):
    """Something else at the path is refused if asked for, passed over otherwise."""
    target = short_dir / "target"
    target.mkdir(mode=0o700)
    name = RuntimeDir.create(Path("/r"), base=short_dir).path
    name.rmdir()
    name.symlink_to(target)
    with pytest.raises(ConfigError, match="link"):
        RuntimeDir.create(Path("/r"), base=short_dir)
    made = RuntimeDir.create(Path("/r"), environ={"XDG_RUNTIME_DIR": str(short_dir)})
    assert made.path != name
    assert not made.path.is_symlink()
    assert list(target.iterdir()) == []


def test_a_directory_open_to_others_is_refused_with_the_command_to_type(short_dir):
    """Wrong mode is named."""
    path = RuntimeDir.create(Path("/r"), base=short_dir).path
    path.chmod(0o750)
    with pytest.raises(ConfigError, match="0750") as caught:
        RuntimeDir.open(path)
    assert "chmod 700" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(short_dir):
    """Wrong owner is named."""
    path = RuntimeDir.create(Path("/r"), base=short_dir).path
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="user 12345"):
        RuntimeDir.open(path)


def test_a_missing_directory_or_base_is_named(short_dir):
    """The path stands in the message."""
    with pytest.raises(ConfigError, match="nowhere"):
        RuntimeDir.open(short_dir / "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        RuntimeDir.create(Path("/r"), base=short_dir / "nowhere")


def bound(path: Path) -> socket.socket:
    """Listen on a unix socket."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen()
    return listener


def dead_pid() -> int:
    """Return the number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_sockets_of_dead_processes_are_swept_and_live_ones_kept(short_dir):
    """A file goes only if its process is gone and nobody listens; foreign files stay."""
    made = RuntimeDir.create(Path("/r"), base=short_dir)
    gone = dead_pid()
    stale = made.path / f"main.{gone}.aaaaaa"
    bound(stale).close()
    alive = made.path / f"main.{os.getpid()}.bbbbbb"
    bound(alive).close()
    elsewhere = made.path / f"main.{gone}.cccccc"
    listener = bound(elsewhere)
    (made.path / "notes.txt").write_text("mine")
    assert made.sweep() == 1
    assert sorted(path.name for path in made.path.iterdir()) == sorted([alive.name, elsewhere.name, "notes.txt"])
    listener.close()


def test_a_killed_runs_directory_is_swept_by_the_next_run(short_dir):
    """Leftovers of another trial go too, directory and all."""
    dead = RuntimeDir.create(Path("/old"), base=short_dir)
    bound(dead.path / f"main.{dead_pid()}.aaaaaa").close()
    new = RuntimeDir.create(Path("/new"), base=short_dir)
    assert not dead.path.exists()
    assert new.path.exists()


def test_remove_leaves_a_directory_that_is_in_use(short_dir):
    """It goes only when empty; removing twice is harmless."""
    made = RuntimeDir.create(Path("/r"), base=short_dir)
    alive = made.path / f"main.{os.getpid()}.bbbbbb"
    bound(alive).close()
    assert not made.remove()
    alive.unlink()
    assert made.remove()
    assert made.remove()


@pytest.mark.parametrize("label", ["", "Main", "a/b", "x" * 25, "a.b"])
def test_a_label_that_is_not_one_is_refused(short_dir, label):
    """Labels are chosen by code, so this is a mistake in code."""
    with pytest.raises(ValueError, match="label"):
        RuntimeDir(short_dir).endpoint(label)


def test_an_ipc_path_of_107_bytes_binds_and_one_of_108_is_refused(short_dir):
    """The limit is the kernel's, to the byte, counted in bytes and not in characters."""
    room = MAX_IPC_PATH - len(os.fsencode(short_dir)) - 1
    factory = SocketFactory(max_sockets=8)
    router = factory.router("main")
    factory.bind(router, f"ipc://{short_dir}/{'x' * room}")
    router.close()
    assert factory.close()
    with pytest.raises(ConfigError, match="108 bytes"):
        check_length(f"ipc://{short_dir}/{'x' * (room + 1)}")
    with pytest.raises(ConfigError):
        check_length(f"ipc://{short_dir}/{'é' * (room - 1)}")


@pytest.mark.parametrize(
    ("endpoint", "loopback"),
    [
        ("tcp://127.0.0.1:0", True),
        ("tcp://127.8.9.1:5", True),
        ("tcp://[::1]:0", True),
        ("tcp://[::ffff:127.0.0.1]:0", True),
        ("tcp://localhost:0", True),
        ("tcp://lo:0", True),
        ("tcp://*:0", False),
        ("tcp://0.0.0.0:0", False),
        ("tcp://[::]:0", False),
        ("tcp://10.0.0.1:0", False),
        ("tcp://[fe80::1%eth0]:0", False),
    ],
)
def test_only_loopback_is_bound_without_keys(endpoint, loopback):
    """Everything others could reach is refused while there are no keys, and allowed with them."""
    assert is_loopback(endpoint) is loopback
    check(endpoint, has_keys=True)
    if loopback:
        check(endpoint, has_keys=False)
    else:
        with pytest.raises(ConfigError, match="no keys") as caught:
            check(endpoint, has_keys=False)
        assert "127.0.0.1" in caught.value.hint


def test_the_factory_refuses_before_it_binds():
    """The check is not left to callers."""
    factory = SocketFactory(max_sockets=8)
    router = factory.router("main")
    with pytest.raises(ConfigError, match="no keys"):
        factory.bind(router, "tcp://0.0.0.0:0")
    router.close()
    assert factory.close()


def test_a_server_binds_ipc_first_and_tcp_with_port_zero(short_dir):
    """A record lists every endpoint, best first."""
    runtime = RuntimeDir(short_dir)
    both = bind_endpoints("both", "main", runtime_dir=runtime)
    assert both[0].startswith(f"ipc://{short_dir}/main.{os.getpid()}.")
    assert both[1] == "tcp://127.0.0.1:0"
    assert bind_endpoints("tcp", "ctl", host="::1") == ["tcp://[::1]:0"]
    assert len(bind_endpoints("ipc", "ctl", runtime_dir=runtime)) == 1
    with pytest.raises(ConfigError, match="runtime directory"):
        bind_endpoints("ipc", "ctl")


@pytest.mark.parametrize("host", ["no.such.host.invalid", "127.0.0.1.example.org", "nowhere", "eth99", ""])
def test_a_name_that_is_no_address_here_is_refused_without_a_look_up(host):
    """Row 38: libzmq binds addresses and interfaces only; the error says so, with or without keys."""
    for keys in (False, True):
        with pytest.raises(ConfigError, match="neither an address nor an interface") as caught:
            check(f"tcp://{host}:0", has_keys=keys)
        assert "IP address" in caught.value.hint


def test_an_interface_of_this_host_can_be_named():
    """Whoever names it means its address, which others can reach unless it is the loopback."""
    for _, name in socket.if_nameindex():
        check(f"tcp://{name}:0", has_keys=True)
