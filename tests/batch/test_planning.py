"""Ranges of a file that others read."""

from __future__ import annotations

import pytest

from fastdecode_rdma.batch.job import DoneLines, SeenIds
from fastdecode_rdma.batch.planning import open_numbers, plan_ranges, read_range
from fastdecode_rdma.batch.records import OwnLines
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.sequence import SamplingParams

LINES = b"""\xef\xbb\xbf{"id": 1}\n\n{"id": 2}\r\n{"id": 1}\n{\n \n{"id": 2}\n{"id": 3}"""


@pytest.mark.parametrize("num_lines", [1, 2, 4, 9])
@pytest.mark.parametrize("limit", [None, 4])
def test_ranges_hold_all_lines_once(tmp_path, num_lines, limit):
    path = tmp_path / "in"
    path.write_bytes(LINES)
    done = DoneLines()
    done.add(3)
    seen = SeenIds()
    ranges = [
        *plan_ranges(
            str(path), OwnLines(SamplingParams(), 0), done, seen, num_lines=num_lines, limit=limit
        )
    ]
    seen.close()
    found = [line for part in ranges for line in read_range(str(path), part)]
    all_of_them = [(1, b'{"id": 1}'), (3, b'{"id": 2}'), (4, b'{"id": 1}'), (5, b"{"),
                   (7, b'{"id": 2}'), (8, b'{"id": 3}')][:limit]  # fmt: skip
    if num_lines == 1:
        all_of_them.remove((3, b'{"id": 2}'))  # a range that is done is no range
    assert [(line.number, line.data) for line in found] == all_of_them
    assert sum(part.nbytes for part in ranges) == sum(len(data) for _, data in all_of_them)
    repeats = {line: first for part in ranges for line, first in part.repeats.items()}
    assert repeats == ({4: 1} if limit else {4: 1, 7: 3})
    assert [*open_numbers(str(path), done, limit)] == [1, 4, 5, 7, 8][: limit and limit - 1]


def test_a_file_that_became_shorter_is_no_longer_the_same(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(LINES)
    seen = SeenIds()
    lines = OwnLines(SamplingParams(), 0)
    (part,) = plan_ranges(str(path), lines, DoneLines(), seen, num_lines=9)
    seen.close()
    path.write_bytes(LINES[:-9])
    with pytest.raises(ConfigError, match="has changed since the job began"):
        read_range(str(path), part)
