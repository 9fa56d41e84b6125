from __future__ import annotations

import pytest

from fastdecode_rdma.errors import LocalProtocolError, RemoteProtocolError
from fastdecode_rdma.wire.framing import HEADER, MAX_BODY_BYTES, FrameReader, frame


def test_several_frames_in_one_piece():
    reader = FrameReader()
    reader.feed(frame(1, b"one") + frame(2, b"") + frame(3, b"three")[:-2])
    assert reader.next_frame(100) == (1, b"one")
    assert reader.next_frame(100) == (2, b"")
    assert reader.next_frame(100) is None
    assert reader.bytes_needed() == 2
    reader.feed(b"ee")
    assert reader.next_frame(100) == (3, b"three")
    assert reader.num_buffered == 0


def test_a_reader_that_takes_no_more_than_needed_leaves_what_follows():
    stream = frame(1, b"body") + b"frames of the data plane"
    reader, position = FrameReader(), 0
    while (found := reader.next_frame(100)) is None:
        length = reader.bytes_needed()
        reader.feed(stream[position : position + length])
        position += length
    assert found == (1, b"body")
    assert stream[position:] == b"frames of the data plane"


@pytest.mark.parametrize(
    "data", [b"G", b"FX", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00", b"\0"]
)
def test_what_is_not_ours_is_refused_at_its_first_bytes(data):
    reader = FrameReader()
    reader.feed(data)
    with pytest.raises(RemoteProtocolError, match="does not speak"):
        reader.next_frame(100)


def test_a_length_over_the_limit_is_refused_before_its_body():
    reader = FrameReader()
    reader.feed(HEADER.pack(0x4446, 1, 101))
    with pytest.raises(RemoteProtocolError, match="101 bytes; at most 100"):
        reader.next_frame(100)


def test_a_body_that_no_peer_would_take_is_not_sent():
    assert len(frame(1, bytes(MAX_BODY_BYTES))) == HEADER.size + MAX_BODY_BYTES
    with pytest.raises(LocalProtocolError):
        frame(1, bytes(MAX_BODY_BYTES + 1))
