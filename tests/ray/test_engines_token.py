"""The token of a Ray pool in an engine's process."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from fastdecode_rdma.ray.engines import _TokenFile
from fastdecode_rdma.wire.token_file import read_token

TOKEN = bytes(range(32))


@pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")
def test_the_token_is_in_memory_alone_and_can_be_read_again() -> None:
    token = _TokenFile(TOKEN)
    assert read_token(token.path) == read_token(token.path) == TOKEN
    assert os.readlink(token.path).startswith("/memfd:")


def test_without_files_in_memory_it_is_a_file_for_its_owner_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    token = _TokenFile(TOKEN)
    assert read_token(token.path) == TOKEN and tmp_path in token.path.parents
    assert token.path.stat().st_mode & 0o777 == 0o600
