"""Proofs of a shared token, both ways, and the key that binds a data socket to its handshake.

Both ends know a secret token (empty where the worker runs without one). Each proves it with an
HMAC-SHA256 over both hellos, nonces and versions included, under a label that names who speaks, so
that no proof can be replayed or reflected. The token authenticates; nothing here encrypts.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from fastdecode_rdma.errors import RemoteProtocolError
from fastdecode_rdma.wire.messages import ErrorCode, Role

_SESSION = struct.Struct("<QQ")  # session id, epoch


class HandshakeError(RemoteProtocolError):
    """The peer was refused; `code` is what an Error message should tell it."""

    def __init__(self, message: str, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code


def _mac(key: bytes, label: str, *parts: bytes) -> bytes:
    # Lengths go in, so that no two lists of parts give the same text.
    text = b"".join(struct.pack("<I", len(part)) + part for part in (label.encode(), *parts))
    return hmac.new(key, text, hashlib.sha256).digest()


def handshake_mac(token: bytes, sender: Role, engine_hello: bytes, worker_hello: bytes) -> bytes:
    """Returns `sender`'s proof over the bytes of both hellos."""
    return _mac(token, f"fastdecode {sender.name} proof", engine_hello, worker_hello)


def session_key(token: bytes, engine_hello: bytes, worker_hello: bytes) -> bytes:
    """Returns the key of this handshake: both ends derive it, it never travels."""
    return _mac(token, "fastdecode session key", engine_hello, worker_hello)


def data_mac(
    key: bytes,
    sender: Role,
    *,
    session_id: int,
    epoch: int,
    nonce: bytes,
    plane: str = "tcp",
    details: bytes = b"",
) -> bytes:
    """Returns `sender`'s proof on a data socket. `key` is the session key, `nonce` DataHello's,
    `details` what the sender says of its end of the plane."""
    session = _SESSION.pack(session_id, epoch)
    label = f"fastdecode {sender.name} data socket"
    return _mac(key, label, session, nonce, plane.encode(), details)


def check_mac(got: bytes, expected: bytes) -> bool:
    """Compares two MACs in constant time."""
    return hmac.compare_digest(got, expected)
