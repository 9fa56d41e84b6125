from __future__ import annotations

import pytest

from fastdecode_rdma.config import DEFAULT_PORT
from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.wire.address import format_address, parse_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ("host", DEFAULT_PORT)),
        ("host:1", ("host", 1)),
        ("tcp://host:65535", ("host", 65535)),
        (":0", ("", 0)),
        ("10.0.0.1:18815", ("10.0.0.1", 18815)),
        ("[::1]:9", ("::1", 9)),
        ("[::1]", ("::1", DEFAULT_PORT)),
        ("fe80::1", ("fe80::1", DEFAULT_PORT)),
        (" host:2 ", ("host", 2)),
    ],
)
def test_addresses(text, expected):
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", "tcp://", "host:", "host:x", "host:65536", "host:-1", "host:¹", "a b:1", "h/x:1",
             "rdma://host:1", "a..b:1", "x" * 64 + ":1", "host:1?option=2"]
)  # fmt: skip
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="address"):
        parse_address(text)


def test_v6_addresses_get_their_brackets():
    assert format_address("::1", 7) == "tcp://[::1]:7"
    assert parse_address(format_address("::1", 7)) == ("::1", 7)
    assert format_address("host", 7) == "tcp://host:7"
