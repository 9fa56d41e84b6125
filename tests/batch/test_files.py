"""Lines in and out, on real files and pipes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from functools import partial
from pathlib import Path

import pytest

from fastdecode_rdma.batch import files
from fastdecode_rdma.batch.files import LineSource, LineWriter, RawLine, check_output, read_lines
from fastdecode_rdma.errors import ConfigError


def lines_of(path: Path) -> list[tuple[int, bytes | None]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return [(line.number, line.data) for line in read_lines(fd)]
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"a", [(1, b"a")]),
        (b"a\n", [(1, b"a")]),
        (b"a\nb", [(1, b"a"), (2, b"b")]),
        (b"a\r\nb\r\n", [(1, b"a"), (2, b"b")]),
        (b"\xef\xbb\xbfa\nb\n", [(1, b"a"), (2, b"b")]),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbf\n\xef\xbb\xbfa", [(2, b"\xef\xbb\xbfa")]),  # only at the start
        (b"\n\n a \n\t\r\n\nb\n\n", [(3, b"a"), (6, b"b")]),
        ("a\u2028b\x0bc\x85\n".encode(), [(1, "a\u2028b\x0bc\x85".encode())]),  # only \n ends one
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 1 << 16])
def test_lines_are_numbered_as_editors_do(tmp_path, monkeypatch, content, expected, chunk_bytes):
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "in"
    path.write_bytes(content)
    assert lines_of(path) == expected


@pytest.mark.parametrize("chunk_bytes", [7, 1 << 16])
def test_a_line_without_end_costs_no_memory_and_the_rest_is_read(
    tmp_path, monkeypatch, chunk_bytes
):
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    path = tmp_path / "in"
    path.write_bytes(b"x" * 100 + b"\n" + b"y" * 101 + b"\nz\n" + b"w" * 1000)
    assert lines_of(path) == [(1, b"x" * 100), (2, None), (3, b"z"), (4, None)]


def test_inputs_that_cannot_be_read_are_one_line(tmp_path):
    for path, words in (
        (tmp_path / "nowhere", "No such file"),
        (tmp_path, "it is a directory"),
        ("a\0b", "null"),
    ):
        with pytest.raises(ConfigError, match=f"cannot read .*{words}"):
            LineSource(str(path))


def test_a_pipe_says_that_it_has_nothing_just_now(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    opened: list[int] = []
    thread = threading.Thread(target=lambda: opened.append(os.open(fifo, os.O_WRONLY)))
    thread.start()
    source = LineSource(str(fifo))
    thread.join(5)
    news: queue.SimpleQueue[None] = queue.SimpleQueue()
    source.on_news = partial(news.put, None)
    assert source.next_line() is None and not source.ended
    os.write(opened[0], b"a\nb")
    news.get(timeout=5)
    assert source.next_line() == RawLine(1, b"a")
    assert source.next_line() is None and not source.ended and news.empty()
    os.close(opened[0])
    news.get(timeout=5)
    assert source.next_line() == RawLine(2, b"b")
    news.get(timeout=5)
    assert source.next_line() is None and source.ended


def test_a_file_is_read_as_it_is_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "in"
    path.write_bytes(b"line\n" * 100_000)
    taken = 0
    real = os.read

    def read(fd: int, nbytes: int) -> bytes:
        nonlocal taken
        data = real(fd, nbytes)
        taken += len(data)
        return data

    monkeypatch.setattr(os, "read", read)
    source = LineSource(str(path))
    assert source.next_line() == RawLine(1, b"line")
    assert taken <= 1 << 16
    source.close()


def test_output_that_would_destroy_something_is_refused(tmp_path):
    path, other, link = tmp_path / "in", tmp_path / "out", tmp_path / "link"
    path.write_text("{}\n")
    os.link(path, link)
    (tmp_path / "symbolic").symlink_to(path)
    source = LineSource(str(path))
    for same in (path, link, tmp_path / "symbolic"):
        with pytest.raises(ConfigError, match="same file"):
            check_output(str(same), source, overwrite=True)
    other.write_text("results of a night\n")
    with pytest.raises(ConfigError, match=r"already and not empty; .*--overwrite"):
        check_output(str(other), source, overwrite=False)
    check_output(str(other), source, overwrite=True)
    with pytest.raises(ConfigError, match="it is a directory"):
        check_output(str(tmp_path), source, overwrite=True)
    with pytest.raises(ConfigError, match="there is no folder"):
        check_output(str(tmp_path / "no" / "out"), source, overwrite=False)
    (tmp_path / "empty").touch()
    for fine in ("empty", "new"):
        check_output(str(tmp_path / fine), source, overwrite=False)
    check_output("/dev/null", source, overwrite=False)
    assert not (tmp_path / "new").exists() and other.read_text() == "results of a night\n"
    source.close()


def test_what_may_not_be_written_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    (tmp_path / "empty").touch()
    for name in ("empty", "new"):
        with pytest.raises(ConfigError, match=r"cannot write .*: no permission"):
            check_output(str(tmp_path / name), None, overwrite=True)
    check_output("-", None, overwrite=False)


def test_a_file_that_came_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "out"
    path.write_text("somebody else's\n")
    with pytest.raises(ConfigError, match="already and not empty"):
        LineWriter(str(path), overwrite=False)
    assert path.read_text() == "somebody else's\n"
    writer = LineWriter(str(path), overwrite=True)
    writer.write(b"ours\n")
    writer.close()
    assert path.read_text() == "ours\n"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("written", [0, 3])
def test_no_part_of_a_line_stays_in_the_file(tmp_path, monkeypatch, error, written):
    path = tmp_path / "out"
    writer = LineWriter(str(path), overwrite=False)
    writer.write(b"first line\n")
    real = os.write
    left = [written]

    def write(fd: int, data: bytes) -> int:
        if not left or not left[-1]:
            raise error
        return real(fd, data[: left.pop()])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(type(error)):
        writer.write(b"second line\n")
    assert path.read_bytes() == b"first line\n"
    writer.close()


def test_a_line_is_written_whole_however_little_goes_at_once(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:2]))
    writer = LineWriter(str(tmp_path / "out"), overwrite=False)
    writer.write(b"a whole line\n")
    writer.close()
    assert (tmp_path / "out").read_bytes() == b"a whole line\n"


def test_an_output_that_cannot_be_opened_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*No such file"):
        LineWriter(str(tmp_path / "no" / "out"), overwrite=False)
    with (
        contextlib.closing(LineWriter("/dev/full", overwrite=False)) as writer,
        pytest.raises(OSError, match="No space left"),
    ):
        writer.write(b"x\n")
