"""Worker URLs."""

from __future__ import annotations

import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.transport import _TRANSPORTS
from fastdecode_rdma.transport.address import SCHEMES, Address, parse_url


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        ("host", Address("host", 18815), "tcp://host:18815"),
        (" host:9 ", Address("host", 9), "tcp://host:9"),
        ("tcp://10.0.0.1:65535", Address("10.0.0.1", 65535), "tcp://10.0.0.1:65535"),
        ("tcp://[::1]:7", Address("::1", 7), "tcp://[::1]:7"),
        ("[fe80::2]", Address("fe80::2", 18815), "tcp://[fe80::2]:18815"),
        (
            "tcp://h:7?connect_timeout_s=2.5&buffer_bytes=65536",
            Address("h", 7, options={"connect_timeout_s": 2.5, "buffer_bytes": 65536}),
            "tcp://h:7",
        ),
    ],
)
def test_addresses(text, expected, shown):
    assert parse_url(text) == expected
    assert str(parse_url(text)) == shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "address"),
        ("tcp://", "address"),
        ("tcp://:7", "host"),
        ("host:0", "port"),
        ("host:65536", "address"),
        ("host:x", "address"),
        ("shm://host", "shm transport is not available in this version"),
        ("rdma://host:1", "rdma transport is not available in this version"),
        ("auto://host", "auto transport is not available in this version"),
        ("http://host:1", "unknown transport 'http'; expected tcp://"),
        ("host?speed=3", "unknown option 'speed'"),
        ("host?buffer_bytes=4k", "must be a number"),
        ("host?buffer_bytes=-1", "must be positive"),
        ("host?connect_timeout_s=nan", "must be positive"),
        ("a b", "address"),
    ],
)
def test_bad_addresses_name_the_fault_in_one_line(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_url(text)
    assert "\n" not in str(caught.value)


def test_every_scheme_has_a_row():
    assert set(_TRANSPORTS) == set(SCHEMES)
