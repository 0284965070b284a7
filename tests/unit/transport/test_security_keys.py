import stat

import pytest

from zbus.errors import ConfigError
from zbus.transport.security import CurveKeys, ProcessKeys, read_secret, write_secret


def test_every_process_gets_a_key_pair_of_its_own():
    """Two pairs differ; the public half is printable text for records, the secret stays out of repr."""
    one, two = ProcessKeys.create(), ProcessKeys.create()
    assert one.public != two.public
    assert len(one.public_text) == 40
    assert one.secret.decode() not in repr(one)


def test_a_key_file_is_private_and_reads_back(tmp_path):
    """Mode 0600, both halves."""
    keys = ProcessKeys.create()
    path = tmp_path / "server.key"
    write_secret(path, keys)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret(path) == CurveKeys(keys.public, keys.secret)


def test_nothing_is_replaced_or_followed_when_a_key_is_written(tmp_path):
    """An existing file or a planted link is refused."""
    path = tmp_path / "k"
    path.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for place in (path, link, tmp_path / "no" / "dir"):
        with pytest.raises(ConfigError):
            write_secret(place, ProcessKeys.create())
    assert path.read_text() == "precious"
    assert not (tmp_path / "elsewhere").exists()


def test_a_key_file_others_can_read_is_refused_with_the_command_to_type(tmp_path):
    """Row 83."""
    path = tmp_path / "k"
    write_secret(path, ProcessKeys.create())
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="private") as caught:
        read_secret(path)
    assert "chmod 600" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"x" * 81, b"\n\n", b"a" * 40 + b"\n" + b"b" * 40 + b"\n"])
def test_a_file_that_is_no_key_is_refused(tmp_path, content):
    """Garbage and halves that do not belong together are found before use."""
    path = tmp_path / "k"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError):
        read_secret(path)


def test_a_link_a_fifo_or_a_missing_file_is_refused(tmp_path):
    """Only a plain file is read, and reading never waits."""
    import os

    real = tmp_path / "real"
    write_secret(real, ProcessKeys.create())
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo", "missing"):
        with pytest.raises(ConfigError):
            read_secret(tmp_path / name)
