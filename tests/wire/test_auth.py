from __future__ import annotations

import hashlib
import hmac

import pytest

from fastdecode_rdma.wire.auth import check_mac, data_mac, handshake_mac, session_key
from fastdecode_rdma.wire.messages import Role

TOKEN = bytes(range(32))


def test_macs_are_plain_hmac_sha256_over_length_prefixed_parts():
    text = b"\x17\0\0\0fastdecode ENGINE proof" + b"\x03\0\0\0one" + b"\x03\0\0\0two"
    expected = hmac.new(TOKEN, text, hashlib.sha256).digest()
    assert handshake_mac(TOKEN, Role.ENGINE, b"one", b"two") == expected
    assert expected.hex() == "2159b531249ad1da37448ed823ac71d146364fbf597610d4d5dfd46a30ce9d7b"
    assert (
        session_key(TOKEN, b"one", b"two").hex()
        == "ce46723e66a5eb940111f4f6cfb66202d5da98f10b32cc995c6aaac7319c0739"
    )
    session = {"session_id": 1, "epoch": 2, "nonce": b"n" * 32}
    mac = data_mac(TOKEN, Role.WORKER, **session, plane="shm", details=b"d")
    assert mac.hex() == "d1c2a1a8219604dc59c0f39211b79a56202cc0f3dea954ef5d07bfc0dfe07198"


def test_every_input_changes_the_proof():
    base = handshake_mac(TOKEN, Role.ENGINE, b"one", b"two")
    others = {
        handshake_mac(TOKEN, Role.WORKER, b"one", b"two"),  # else a worker could reflect it
        handshake_mac(b"other", Role.ENGINE, b"one", b"two"),
        handshake_mac(TOKEN, Role.ENGINE, b"onet", b"wo"),  # lengths count, not only the text
        handshake_mac(TOKEN, Role.ENGINE, b"two", b"one"),
        session_key(TOKEN, b"one", b"two"),
    }
    assert len(others) == 5 and base not in others


@pytest.mark.parametrize(
    "change", ["session_id", "epoch", "nonce", "plane", "details", "key", "sender"]
)
def test_a_data_proof_fits_one_socket_only(change):
    inputs = {"session_id": 1, "epoch": 2, "nonce": b"n" * 32}
    base = data_mac(TOKEN, Role.ENGINE, **inputs)
    key, sender = TOKEN, Role.ENGINE
    if change == "key":
        key = b"other"
    elif change == "sender":
        sender = Role.WORKER
    elif change == "nonce":
        inputs["nonce"] = b"m" * 32
    elif change == "plane":
        inputs["plane"] = "shm"
    elif change == "details":
        inputs["details"] = b"other end"
    else:
        inputs[change] += 1
    assert data_mac(key, sender, **inputs) != base


def test_check_mac_compares_in_constant_time(monkeypatch):
    calls = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: calls.append((a, b)) or a == b)
    assert check_mac(b"a", b"a") and not check_mac(b"a", b"b")
    assert calls == [(b"a", b"a"), (b"a", b"b")]
