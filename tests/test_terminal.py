from __future__ import annotations

from collections.abc import Iterator

from fastdecode_rdma.sequence import TokenEvent
from fastdecode_rdma.terminal import print_stream


def events() -> Iterator[TokenEvent]:
    for index, text, reason in [
        (0, "a", None),
        (2, "x", None),
        (1, "m", "stop"),
        (0, "b", None),
        (2, "y", None),
        (0, "", "length"),
        (2, "z", "stop"),
    ]:
        yield TokenEvent(index, 0, 5, text, finish_reason=reason)


def test_blocks_come_in_order_and_whole(capsys):
    assert print_stream(["p", "q\n", "r"], events()) == 7
    assert capsys.readouterr().out == "[1/3] p\nab\n\n[2/3] q\nm\n\n[3/3] r\nxyz\n\n"


def test_without_headings_there_is_nothing_but_the_answers(capsys):
    assert print_stream(["p", "q\n", "r"], events(), with_headings=False) == 7
    assert capsys.readouterr().out == "ab\nm\nxyz\n"
