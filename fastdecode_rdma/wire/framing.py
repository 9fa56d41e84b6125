"""Length-prefixed frames of the control connection, cut out of a byte stream.

Eight bytes go before each body: `FD`, the message type, the length of the body. The two letters let
anything that is not ours be refused at once, without waiting for a length that never comes.
"""

from __future__ import annotations

import struct

from fastdecode_rdma.errors import LocalProtocolError, RemoteProtocolError

HEADER = struct.Struct("<HHI")  # magic, message type, nbytes of the body
MAGIC = 0x4446  # "FD" in little-endian order

MAX_GREETING_BYTES = 1024
"""Before the peer is known: a hello takes under 120 bytes, an error text at most 800."""

MAX_BODY_BYTES = 640 * 1024
"""Afterwards: the largest message is OPEN_SESSION. 4096 layers in 4096 groups take 60 KiB, as many
sinks and slopes as a geometry may have 512 KiB."""


def frame(type_code: int, body: bytes) -> bytes:
    """Returns the bytes of one frame.

    Raises:
        LocalProtocolError: the body is longer than any peer accepts.
    """
    if len(body) > MAX_BODY_BYTES:
        raise LocalProtocolError(
            f"a control message holds at most {MAX_BODY_BYTES} bytes, got {len(body)}"
        )
    return HEADER.pack(MAGIC, type_code, len(body)) + body


class FrameReader:
    """Collects received bytes and returns whole frames; holds no more than what was fed."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Appends received bytes."""
        self._buffer += data

    @property
    def num_buffered(self) -> int:
        """Bytes fed and not yet returned as a frame."""
        return len(self._buffer)

    def bytes_needed(self) -> int:
        """Returns how many bytes are missing for the header or, once it is there, the body.

        A reader that receives no more than that never takes a byte of what follows the frame, so
        the socket can be handed on with nothing left behind.
        """
        if len(self._buffer) < HEADER.size:
            return HEADER.size - len(self._buffer)
        nbytes = HEADER.unpack_from(self._buffer)[2]
        return max(0, HEADER.size + nbytes - len(self._buffer))

    def next_frame(self, max_body_bytes: int) -> tuple[int, bytes] | None:
        """Returns (message type, body) of the next whole frame, or None when more bytes are needed.

        Raises:
            RemoteProtocolError: the bytes are no frame of ours, or its body is over the limit.
        """
        magic = MAGIC.to_bytes(2, "little")
        if not magic.startswith(self._buffer[:2]):
            raise RemoteProtocolError("the peer does not speak the fastdecode control protocol")
        if len(self._buffer) < HEADER.size:
            return None
        _, type_code, nbytes = HEADER.unpack_from(self._buffer)
        if nbytes > max_body_bytes:
            raise RemoteProtocolError(
                f"the peer announced a control message of {nbytes} bytes; at most {max_body_bytes} "
                "are allowed here"
            )
        end = HEADER.size + nbytes
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return type_code, body
