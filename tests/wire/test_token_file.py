from __future__ import annotations

import os
import stat

import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.wire.token_file import find_token, new_token_text, read_token, write_token


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(new_token_text() + "\n")
    path.chmod(0o600)
    return path


def test_a_new_token_reads_back(token_file):
    token = read_token(token_file)
    assert len(token) == 32 and token.hex() == token_file.read_text().strip()
    assert new_token_text() != new_token_text()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o610, 0o602, 0o777])
def test_a_file_that_others_can_touch_is_refused_with_the_remedy(token_file, mode):
    token_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {token_file}") as caught:
        read_token(token_file)
    assert token_file.read_text().strip() not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "abc", "zz" * 32, "ab" * 31, "ab" * 33, "ü" * 64, "a b" * 99, "\0" * 64, "5a" * 999],
)
def test_what_is_no_token_is_refused_without_quoting_it(token_file, text):
    token_file.write_text(text)
    with pytest.raises(ConfigError, match="holds no token") as caught:
        read_token(token_file)
    assert not text.strip() or text not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_a_missing_file_names_itself(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*No such file"):
        read_token(tmp_path / "nowhere")


def test_the_variable_is_the_default_and_the_argument_wins(token_file, tmp_path):
    environ = {"FASTDECODE_TOKEN_FILE": str(token_file)}
    assert find_token(None, {}) is None
    assert find_token(None, {"FASTDECODE_TOKEN_FILE": ""}) is None
    assert find_token(None, environ) == read_token(token_file)
    other = tmp_path / "other"
    other.write_text("cd" * 32)
    other.chmod(0o600)
    assert find_token(other, environ) == bytes.fromhex("cd" * 32)


def test_the_variable_is_named_when_it_is_to_blame(tmp_path):
    environ = {"FASTDECODE_TOKEN_FILE": str(tmp_path / "nowhere")}
    with pytest.raises(ConfigError, match=r"FASTDECODE_TOKEN_FILE: cannot read .*nowhere"):
        find_token(None, environ)


def test_an_empty_name_is_no_way_to_go_without_a_token():
    with pytest.raises(ConfigError, match="name of the token file is empty"):
        find_token("", {})


def test_the_home_folder_is_found(token_file, monkeypatch):
    monkeypatch.setenv("HOME", str(token_file.parent))
    assert find_token("~/token", {}) == read_token(token_file)
    assert find_token(None, {"FASTDECODE_TOKEN_FILE": "~/token"}) == read_token(token_file)


def test_a_link_counts_as_the_file_it_leads_to(token_file, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(token_file)
    assert read_token(link) == read_token(token_file)
    token_file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_token(link)
    token_file.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_token(link)


@pytest.mark.parametrize("kind", ["directory", "fifo", "device"])
def test_only_a_regular_file_holds_a_token(tmp_path, kind):
    path = tmp_path / "special"
    if kind == "directory":
        path.mkdir(mode=0o700)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)  # nobody writes into it: reading must not wait
    else:
        path = "/dev/zero"
    with pytest.raises(ConfigError, match="no regular file"):
        read_token(path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_impossible_names_are_one_line(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot read token file"):
        read_token(str(tmp_path / name))


def test_a_token_in_place_of_a_files_name_is_not_repeated():
    token = new_token_text()
    for give in (read_token, lambda name: find_token(None, {"FASTDECODE_TOKEN_FILE": name})):
        with pytest.raises(ConfigError, match="a token itself") as caught:
            give(token)
        assert token not in str(caught.value)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_file_is_made_for_its_owner_whatever_the_umask(tmp_path, umask):
    path = tmp_path / "new"
    before = os.umask(umask)
    try:
        write_token(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_token(path)) == 32


def test_a_file_that_is_there_is_not_touched_nor_a_link_followed(token_file, tmp_path):
    before = token_file.read_text()
    link, dangling = tmp_path / "link", tmp_path / "dangling"
    link.symlink_to(token_file)
    dangling.symlink_to(tmp_path / "elsewhere")
    for path in (token_file, link, dangling, tmp_path):
        with pytest.raises(ConfigError, match="is there already"):
            write_token(path)
    assert token_file.read_text() == before and not (tmp_path / "elsewhere").exists()
    with pytest.raises(ConfigError, match=r"cannot make token file .*No such file"):
        write_token(tmp_path / "no" / "folder")


def test_half_a_token_is_not_left_behind(tmp_path, monkeypatch):
    def fail(fd, mode):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", fail)
    with pytest.raises(ConfigError, match=r"cannot write token file .*No space left"):
        write_token(tmp_path / "new")
    assert not (tmp_path / "new").exists()
