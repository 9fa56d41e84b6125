"""Worker URLs."""

from __future__ import annotations

import pytest

from fastdecode_rdma.errors import ConfigError
from fastdecode_rdma.transport import _TRANSPORTS
from fastdecode_rdma.transport.address import SCHEMES, Address, parse_url


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        ("host", Address("host", 18815, "auto"), "host:18815"),
        (" host:9 ", Address("host", 9, "auto"), "host:9"),
        ("auto://host:9", Address("host", 9, "auto"), "host:9"),
        ("shm://localhost", Address("localhost", 18815, "shm"), "shm://localhost:18815"),
        (
            "shm://h?spin_us=0",
            Address("h", 18815, "shm", options={"spin_us": 0}),
            "shm://h:18815",
        ),
        (
            "rdma://h?dev=mlx5_1&gid=0&sl=0",
            Address("h", 18815, "rdma", options={"dev": "mlx5_1", "gid": "0", "sl": "0"}),
            "rdma://h:18815",
        ),
        ("tcp://10.0.0.1:65535", Address("10.0.0.1", 65535), "tcp://10.0.0.1:65535"),
        ("tcp://[::1]:7", Address("::1", 7), "tcp://[::1]:7"),
        ("[fe80::2]", Address("fe80::2", 18815, "auto"), "[fe80::2]:18815"),
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
        ("http://host:1", "unknown transport 'http'; expected auto://, shm://, rdma://, tcp://"),
        ("tcp://host?dev=mlx5_0", "option dev says nothing to tcp://, only to rdma://"),
        ("rdma://host?retry=7", "option retry must be 0 to 6, got '7'; 7 means for ever"),
        ("rdma://host?mtu=1500", "option mtu must be one of 256"),
        ("rdma://host?dev=", "option dev names no device"),
        ("tcp://host?spin_us=3", "option spin_us says nothing to tcp://, only to shm://"),
        ("shm://host?buffer_bytes=3", "option buffer_bytes says nothing to shm://"),
        ("shm://host?spin_us=-1", "must be zero or positive"),
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
    assert {"auto", *_TRANSPORTS} == set(SCHEMES)
