from __future__ import annotations

import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.wire.token_file import find_token, new_token_text, read_token


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


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_can_touch_is_refused_with_the_remedy(token_file, mode):
    token_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {token_file}") as caught:
        read_token(token_file)
    assert token_file.read_text().strip() not in str(caught.value)


@pytest.mark.parametrize("text", ["", "abc", "zz" * 32, "ab" * 31, "ab" * 33, "ü" * 64, "a b" * 99])
def test_what_is_no_token_is_refused_without_quoting_it(token_file, text):
    token_file.write_text(text)
    with pytest.raises(ConfigError, match="holds no token") as caught:
        read_token(token_file)
    assert not text or text not in str(caught.value)
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
