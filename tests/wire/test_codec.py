from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode_rdma.config import MAX_HEAD_SCORES, AttentionGeometry, KVGroup
from fastdecode_rdma.errors import LocalProtocolError, RemoteProtocolError
from fastdecode_rdma.wire import codec, framing
from fastdecode_rdma.wire import messages as m
from fastdecode_rdma.wire.framing import FrameReader
from fastdecode_rdma.wire.messages import ErrorCode, Role

COUNT = bytes(range(32)).hex()

# Whole frames: magic "FD", type u16, body length u32, body; one line per example of conftest.py.
GOLDEN = (
    "4644 0100 2b000000 0200 01 00" + COUNT + "0500 302e312e30",
    "4644 0100 2b000000 0200 02 01" + bytes(range(32, 64)).hex() + "0500 302e312e30",
    "4644 0200 20000000" + COUNT,
    "4644 0300 78000000 0200 0400 00000100 00001000 0300 746370"
    "000000000000c03f 01 0000000000004940 00010000 00000200 0200 0400 66703136 0400 66703332"
    "0600 0200 4000 00020000 0200 00 0000 0200  0200 0200 0001 00000000 0100 03 0100"
    "000000000000f83f 00000000000000c0 000000000000e03f 000000000000d03f",
    "4644 0400 3b000000 0700000000000000 0100000000000080 0000000001000000 08000000 40000000"
    "00040000 0200 0400 00000100 00001000 0300 746370 0400 61767832",
    "4644 0500 4e000000 0700000000000000" + COUNT + "00" * 32 + "0400 6d61736b",
    "4644 0600 24000000" + COUNT + "0200 6f6b",
    "4644 0700 0c000000 3930000000000000 01000000",
    "4644 0800 00000000",
    "4644 0900 4a000000 000000000000f83f 0000000001000000 0010000000000000 02000000 08000000"
    "1f00000000000000 6300000000000000 0700 686f73743a3137 0500 302e312e30 0800 626173656c696e65",
    "4644 0a00 19000000 0600 1500 6b65696e20506c61747a2066c3bc72203320476942",
    "4644 0b00 00000000",
    "4644 0c00 00000000",
    "4644 0d00 15000000 0200 0300 73686d 0400 6e616d65 0400 72646d61 0000",
    "4644 0e00 79000000 01 0200 0400 00000100 00001000 0300 73686d"
    "000000000000c03f 01 0000000000004940 00010000 00000200 0200 0400 66703136 0400 66703332"
    "0600 0200 4000 00020000 0200 00 0000 0200  0200 0200 0001 00000000 0100 03 0100"
    "000000000000f83f 00000000000000c0 000000000000e03f 000000000000d03f",
)


@pytest.fixture(params=range(len(GOLDEN)))
def golden(request, examples):
    return examples[request.param], bytes.fromhex(GOLDEN[request.param])


def decode_frames(chunks):
    reader = FrameReader()
    found = []
    for chunk in chunks:
        reader.feed(chunk)
        while (frame := reader.next_frame(framing.MAX_BODY_BYTES)) is not None:
            found.append(codec.decode(*frame))
    return found, reader.num_buffered


def test_every_message_has_an_example(examples):
    assert {type(example) for example in examples} == set(m.Message.__args__)
    assert len(GOLDEN) == len(examples)


def test_bytes_are_the_golden_ones(golden):
    message, data = golden
    assert framing.frame(*codec.encode(message)) == data


def test_decodes_whole_byte_by_byte_and_with_trailing_data(golden):
    message, data = golden
    assert decode_frames([data]) == ([message], 0)
    assert decode_frames([data[i : i + 1] for i in range(len(data))]) == ([message], 0)
    assert decode_frames([data + b"FD\x07"]) == ([message], 3)
    assert decode_frames([data[:-1]]) == (([], len(data) - 1) if len(data) > 8 else ([], 7))


def test_a_body_cut_anywhere_is_refused(golden):
    message, _data = golden
    code, body = codec.encode(message)
    for length in range(len(body)):
        with pytest.raises(RemoteProtocolError):
            codec.decode(code, body[:length])


def test_a_longer_body_is_refused_except_where_versions_may_append(golden):
    message, _ = golden
    code, body = codec.encode(message)
    if isinstance(message, (m.Hello, m.Error)):
        assert codec.decode(code, body + b"later") == message
    else:
        with pytest.raises(RemoteProtocolError, match="behind its last field"):
            codec.decode(code, body + b"\0")


@given(code=st.integers(0, 12), body=st.binary(max_size=200))
def test_random_bodies_raise_remote_protocol_errors_only(code, body):
    try:
        message = codec.decode(code, body)
    except RemoteProtocolError:
        return
    # NaN-free by construction, so what was decoded must survive the way back
    assert codec.decode(*codec.encode(message)) == message


@given(data=st.data())
def test_a_flipped_byte_raises_remote_protocol_errors_only(data):
    golden = bytes.fromhex(data.draw(st.sampled_from(GOLDEN)))
    code, body = golden[2], bytearray(golden[8:])
    if body:
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        codec.decode(code, bytes(body))


score = st.floats(-1e30, 1e30)


@st.composite
def groups(draw):
    layers, kv_heads = draw(st.integers(1, 5)), draw(st.integers(1, 16))
    heads = kv_heads * draw(st.integers(1, 8))
    window = draw(st.none() | st.integers(1, 2**31))
    per_head = st.builds(lambda value, last: (value,) * (heads - 1) + (last,), score, score)
    sinks = draw(st.none() | st.tuples(*[per_head] * layers))
    slopes = draw(st.none() | per_head)
    return layers, heads, kv_heads, draw(st.integers(1, 128)) * 8, window, sinks, slopes


@given(
    shapes=st.lists(groups(), min_size=1, max_size=4),
    scale=st.floats(1e-6, 10.0),
    softcap=st.none() | st.floats(0.5, 100.0),
    kv_dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
)
def test_geometries_survive_the_wire(shapes, scale, softcap, kv_dtype):
    first, built = 0, []
    for num_layers, *shape in shapes:
        layers = tuple(range(first, first + num_layers))
        built.append(KVGroup(layers, *shape))
        first += num_layers
    geometry = AttentionGeometry(
        tuple(built), scale, kv_dtype, max_rows=7, max_model_len=99, softcap=softcap
    )
    request = m.OpenSession(geometry, m.SlotPlan(1, 2, 3, 4))
    assert codec.decode(*codec.encode(request)) == request


def test_the_largest_geometry_fits_a_frame():
    heads = MAX_HEAD_SCORES // codec.MAX_LAYERS // 2
    scores = (0.25,) * heads
    groups = tuple(
        KVGroup((layer,), heads, heads, 128, 99, (scores,), scores)
        for layer in range(codec.MAX_LAYERS)
    )
    assert sum(group.num_scores for group in groups) == MAX_HEAD_SCORES
    geometry = AttentionGeometry(groups, 0.1, "bf16", max_rows=1, max_model_len=1)
    code, body = codec.encode(m.OpenSession(geometry, m.SlotPlan(1, 1, 1, 1)))
    assert codec.decode(code, body).geometry == geometry
    assert len(framing.frame(code, body)) < framing.MAX_BODY_BYTES


def test_a_geometry_that_makes_no_sense_is_refused_with_the_reason(geometry, slots):
    code, body = codec.encode(m.OpenSession(geometry, slots))
    raw = bytearray(body)
    offset = body.index(struct.pack("<HHHI", 6, 2, 64, 512))
    raw[offset : offset + 4] = struct.pack("<HH", 7, 2)  # 7 query heads over 2 KV heads
    with pytest.raises(RemoteProtocolError, match="7 query heads"):
        codec.decode(code, bytes(raw))
    raw = bytearray(body)
    offset = body.index(struct.pack("<d", geometry.scale))
    raw[offset : offset + 8] = struct.pack("<d", float("nan"))
    with pytest.raises(RemoteProtocolError, match="scale"):
        codec.decode(code, bytes(raw))


def test_sinks_and_slopes_that_make_no_sense_are_refused(geometry, slots):
    code, body = codec.encode(m.OpenSession(geometry, slots))
    for value, what in ((1.5, "sinks"), (0.25, "slopes")):
        for wrong in (float("nan"), float("inf"), -1e31):
            raw = body.replace(struct.pack("<d", value), struct.pack("<d", wrong))
            assert raw != body
            with pytest.raises(RemoteProtocolError, match=f"{what} must be at most 1e.30 in size"):
                codec.decode(code, raw)
    fixed = struct.pack("<HHHIH", 2, 2, 256, 0, 1)
    raw = body.replace(fixed + b"\3", fixed + b"\7")
    with pytest.raises(RemoteProtocolError, match="extras 0x7"):
        codec.decode(code, raw)
    raw = body.replace(fixed, struct.pack("<HHHIH", 0xFFFF, 2, 256, 0, 1))  # 512 KiB of sinks
    with pytest.raises(RemoteProtocolError, match="ends before its last field"):
        codec.decode(code, raw)


def test_unknown_types_and_codes():
    with pytest.raises(RemoteProtocolError, match="type 15"):
        codec.decode(15, b"")
    later = struct.pack("<HH", 77, 4) + b"news"
    assert codec.decode(10, later) == m.Error(ErrorCode.PROTOCOL, "news (error code 77)")
    with pytest.raises(RemoteProtocolError, match="role 9"):
        codec.decode(1, struct.pack("<HBB32sH", 1, 9, 0, bytes(32), 0))


@pytest.mark.parametrize(
    "message",
    [
        m.Hello(Role.ENGINE, b"short", "0.1.0"),
        m.Hello(Role.ENGINE, bytes(32), "v" * 65),
        m.Auth(bytes(31)),
        m.Heartbeat(-1),
        m.Heartbeat(2**64),
        m.Heartbeat("1"),
        m.ConnectionClosed(),
    ],
)
def test_what_cannot_be_encoded_is_a_local_error(message):
    with pytest.raises(LocalProtocolError):
        codec.encode(message)


def test_texts_bring_no_control_characters():
    code, body = codec.encode(m.Error(ErrorCode.INTERNAL, "two\nlines\x1b[2J \ud800"))
    assert codec.decode(code, body).text == "two lines [2J  "
    code, body = codec.encode(m.Hello(Role.ENGINE, bytes(32), "0.1\n0"))
    with pytest.raises(RemoteProtocolError, match="control characters"):
        codec.decode(code, body)


def test_long_error_texts_are_cut_between_characters():
    code, body = codec.encode(m.Error(ErrorCode.INTERNAL, "ü" * 1000))
    text = codec.decode(code, body).text
    assert set(text) == {"ü"} and len(text) == codec.MAX_ERROR_TEXT_BYTES // 2
    assert len(body) < framing.MAX_GREETING_BYTES
