"""Hostile and broken files: one clear line each, in bounded time and memory, nothing left."""

from __future__ import annotations

import struct
from typing import Any

import gguf
import numpy as np
import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.hub.gguf_file import GGUFFile
from fastdecode_rdma.hub.gguf_header import MalformedError, read_header

HUGE = (1 << 64) - 1


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def info(name: str, shape: tuple[int, ...], *, kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def raw(*parts: bytes, tensors: int = 0, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)


def one(kind: int, payload: bytes, key: str = "k") -> bytes:
    return raw(pair(key, kind, payload), pairs=1)


VALUES: dict[str, tuple[int, bytes, Any]] = {
    "u8": (0, b"\xff", 255),
    "i8": (1, b"\xff", -1),
    "u16": (2, struct.pack("<H", 65535), 65535),
    "i16": (3, struct.pack("<h", -3), -3),
    "u32": (4, struct.pack("<I", 1 << 31), 1 << 31),
    "i32": (5, struct.pack("<i", -7), -7),
    "f32": (6, struct.pack("<f", 1e-5), 1e-5),  # the decimal that was meant
    "bool": (7, b"\x01", True),
    "text": (8, text("grüße"), "grüße"),
    "u64": (10, struct.pack("<Q", HUGE), HUGE),
    "i64": (11, struct.pack("<q", -9), -9),
    "f64": (12, struct.pack("<d", 0.1), 0.1),
    "texts": (9, struct.pack("<IQ", 8, 2) + text("a") + text(""), ["a", ""]),
    "numbers": (9, struct.pack("<IQ2i", 5, 2, 1, -1), [1, -1]),
    "none": (9, struct.pack("<IQ", 4, 0), []),
}


@pytest.mark.parametrize(("kind", "payload", "expected"), VALUES.values(), ids=VALUES.keys())
def test_values(kind, payload, expected):
    value = read_header(one(kind, payload)).metadata["k"]
    assert value == expected and type(value) is type(expected)


def test_tensors():
    data = raw(info("a", (2, 3), offset=64), info("b", (5,), kind=8), tensors=2)
    header = read_header(data)
    start = -(-len(data) // 32) * 32
    assert [(t.name, t.shape, t.type_id, t.start) for t in header.tensors] == [
        ("a", (2, 3), 0, start + 64),
        ("b", (5,), 8, start),
    ]


BROKEN: dict[str, tuple[bytes, str]] = {
    "magic": (b"PK\x03\x04" + bytes(40), "first bytes are not 'GGUF'"),
    "version 1": (raw(version=1), "version 1 is not supported"),
    "version 4": (raw(version=4), "version 4 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (b"GGUF\x03\x00\x00\x00", "it ends at byte 8"),
    "tensors": (raw(tensors=HUGE), f"a count of {HUGE}"),
    "pairs": (raw(pairs=1 << 40), f"a count of {1 << 40}"),
    "pairs beyond the file": (raw(bytes(64), pairs=100), "a count of 100"),
    "length of a key": (raw(struct.pack("<Q", HUGE), bytes(40), pairs=1), f"{HUGE} bytes are due"),
    "length of a text": (one(8, struct.pack("<Q", 1 << 50)), f"{1 << 50} bytes are due"),
    "length of a list": (one(9, struct.pack("<IQ", 0, HUGE)), f"a count of {HUGE}"),
    "length of texts": (one(9, struct.pack("<IQ", 8, 1 << 23)), f"a count of {1 << 23}"),
    "list of lists": (one(9, struct.pack("<IQ", 9, 1) + bytes(20)), "value type 9"),
    "value type": (one(13, bytes(20)), "value type 13"),
    "value type, huge": (one(0xFFFFFFFF, bytes(20)), "value type 4294967295"),
    "UTF-8": (one(8, text(b"\xff\xfe")), "not UTF-8"),
    "key twice": (raw(pair("k", 0, b"\0"), pair("k", 0, b"\0"), pairs=2), "'k' is there twice"),
    "tensor twice": (raw(info("a", (1,)), info("a", (1,)), tensors=2), "the same name"),
    "dimensions, none": (raw(info("a", ()), bytes(32), tensors=1), "'a' has 0 dimensions"),
    "dimensions, five": (raw(info("a", (1,) * 5), tensors=1), "'a' has 5 dimensions"),
    "dimensions, many": (
        raw(text("a") + struct.pack("<I", 1 << 31), bytes(32), tensors=1),
        "dimensions",
    ),
    "alignment 0": (one(4, struct.pack("<I", 0), "general.alignment"), "power of two, got 0"),
    "alignment 24": (one(4, struct.pack("<I", 24), "general.alignment"), "power of two, got 24"),
    "alignment, text": (one(8, text("x" * 500), "general.alignment"), "power of two, got 'xxx"),
    "alignment, huge": (one(4, struct.pack("<I", 1 << 31), "general.alignment"), "power of two"),
    "offset": (raw(info("a", (1,), offset=8), tensors=1), "'a' is not aligned"),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_headers(data, message):
    with pytest.raises(MalformedError) as caught:
        read_header(data)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_every_cut_of_a_header():
    whole = raw(
        pair("general.architecture", 8, text("llama")),
        pair("list", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
        pair("x", 12, bytes(8)),
        info("a", (2, 3)),
        info("b", (5,)),
        pairs=3,
        tensors=2,
    )
    read_header(whole)
    for length in range(len(whole)):
        with pytest.raises(MalformedError):
            read_header(whole[:length])


# -- whole files


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": 4}, "type Q4_2, which was removed"),
        ({"kind": 31}, "type Q4_0_4_4, which was removed"),
        ({"kind": 99}, r"gguf package does not know \(number 99\)"),
        ({"shape": (0,)}, "has shape"),
        ({"shape": (3,), "kind": 8}, "of type Q8_0 has shape"),
        ({"shape": (1 << 62, 1 << 62)}, "ends at byte .* the file at byte"),
        ({"shape": (HUGE,)}, "ends at byte"),
        ({"offset": 1 << 40}, "ends at byte"),
        ({"offset": HUGE - 31}, "ends at byte"),
    ],
)
def test_tensors_outside_of_the_file(tmp_path, changes, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw(info("a", **({"shape": (8,)} | changes)), bytes(256), tensors=1))
    with pytest.raises(ConfigError, match=message):
        GGUFFile(path)


def test_big_endian_file_of_the_package(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("a", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="big-endian"):
        GGUFFile(tmp_path / "m.gguf")
