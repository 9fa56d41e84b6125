"""Bytes of the control messages: one `struct.Struct` each, little-endian, no padding.

Texts are UTF-8 behind a u16 length, lists behind a u16 count; both have limits, so that no length
read from the network is used before it was compared with one. A decoder must consume its whole
body, except that of HELLO and ERROR: later versions may append to these two, which any version must
be able to read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from fastdecode_rdma.config import AttentionGeometry, KVGroup
from fastdecode_rdma.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from fastdecode_rdma.wire import messages as m

MAX_NAME_BYTES = 64
"""Versions, dtypes, ISA and host names. Host names are cut to it, the others are far shorter."""

MAX_ERROR_TEXT_BYTES = 800
"""Keeps an ERROR within the greeting limit of framing.py, so that it can always be sent."""

MAX_DETAILS_BYTES = 768
"""One end of a data plane, a queue pair say: a DATA_HELLO is within the greeting limit."""

MAX_OFFERS = 16
MAX_OFFER_BYTES = 16384  # adapters, ports and GIDs of a large machine

MAX_LAYERS = 4096  # AttentionGeometry's own limit
_NO_WINDOW = 0  # a window is at least 1

_LENGTH = struct.Struct("<H")
_HELLO = struct.Struct("<HBB32s")  # version, role, auth required, nonce
_AUTH = struct.Struct("<32s")
_GEOMETRY = struct.Struct("<dBdIIH")  # scale, has softcap, softcap, max rows, max model len, groups
_GROUP = struct.Struct("<HHHIHB")  # query heads, KV heads, head dim, window, layers, extras
_HAS_SINKS, _HAS_SLOPES = 1, 2  # extras of a group: rows of doubles behind its layers
_SLOTS = struct.Struct("<HHII")  # latency slots, bulk slots, latency nbytes, bulk nbytes
_BENCH = struct.Struct("<B")  # beside sequences of others
_SESSION_OPENED = struct.Struct("<QQQIII")  # id, epoch, capacity, threads, block, segment tokens
_DATA_HELLO = struct.Struct("<Q32s32s")  # session id, nonce, mac
_DATA_ACCEPTED = struct.Struct("<32s")
_HEARTBEAT = struct.Struct("<QI")  # progress, pending
_STATUS = struct.Struct("<dQQIIQQ")  # uptime, limit, used, sessions, threads, sequences, messages
_ERROR = struct.Struct("<H")


class _Reader:
    """Walks over a body; every step checks the length first."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._offset = 0

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        if len(self._body) - self._offset < layout.size:
            raise RemoteProtocolError("a control message ends before its last field")
        values = layout.unpack_from(self._body, self._offset)
        self._offset += layout.size
        return values

    def text(self, max_bytes: int = MAX_NAME_BYTES) -> str:
        (nbytes,) = self.unpack(_LENGTH)
        if nbytes > max_bytes or nbytes > len(self._body) - self._offset:
            raise RemoteProtocolError(f"a text of {nbytes} bytes; at most {max_bytes} allowed")
        raw = self._body[self._offset : self._offset + nbytes]
        self._offset += nbytes
        try:
            text = raw.decode()
        except UnicodeDecodeError as exc:
            raise RemoteProtocolError("a text that is not UTF-8") from exc
        if not text.isprintable():  # it goes to logs and terminals, also from unproved peers
            raise RemoteProtocolError("a text with control characters")
        return text

    def blob(self, max_bytes: int) -> bytes:
        (nbytes,) = self.unpack(_LENGTH)
        if nbytes > max_bytes or nbytes > len(self._body) - self._offset:
            raise RemoteProtocolError(f"a field of {nbytes} bytes; at most {max_bytes} allowed")
        self._offset += nbytes
        return self._body[self._offset - nbytes : self._offset]

    def end(self) -> None:
        if self._offset != len(self._body):
            raise RemoteProtocolError("a control message goes on behind its last field")


def _text(text: str, max_bytes: int = MAX_NAME_BYTES) -> bytes:
    raw = text.encode()
    if len(raw) > max_bytes:
        raise LocalProtocolError(f"a text of {len(raw)} bytes; at most {max_bytes} allowed")
    return _LENGTH.pack(len(raw)) + raw


def _blob(value: bytes, max_bytes: int) -> bytes:
    if len(value) > max_bytes:
        raise LocalProtocolError(f"a field of {len(value)} bytes; at most {max_bytes} allowed")
    return _LENGTH.pack(len(value)) + value


def _secret(value: bytes, nbytes: int) -> bytes:
    if len(value) != nbytes:  # struct would pad or cut it without a word
        raise LocalProtocolError(f"a nonce or MAC has {nbytes} bytes, got {len(value)}")
    return value


def _encode_hello(msg: m.Hello) -> bytes:
    nonce = _secret(msg.nonce, m.NONCE_BYTES)
    return _HELLO.pack(msg.version, msg.role, msg.auth_required, nonce) + _text(msg.software)


def _decode_hello(reader: _Reader) -> m.Hello:
    version, role, auth_required, nonce = reader.unpack(_HELLO)
    return m.Hello(_role(role), nonce, reader.text(), bool(auth_required), version)


def _role(value: int) -> m.Role:
    try:
        return m.Role(value)
    except ValueError as exc:
        raise RemoteProtocolError(f"unknown role {value}") from exc


def _encode_auth(msg: m.Auth) -> bytes:
    return _AUTH.pack(_secret(msg.mac, m.MAC_BYTES))


def _decode_auth(reader: _Reader) -> m.Auth:
    return m.Auth(*reader.unpack(_AUTH))


def _encode_geometry(geometry: AttentionGeometry) -> bytes:
    softcap = geometry.softcap
    parts = [
        _GEOMETRY.pack(
            geometry.scale,
            softcap is not None,
            0.0 if softcap is None else softcap,
            geometry.max_rows,
            geometry.max_model_len,
            len(geometry.groups),
        ),
        _text(geometry.kv_dtype),
        _text(geometry.wire_dtype),
    ]
    for group in geometry.groups:
        window = _NO_WINDOW if group.window is None else group.window
        num_layers = len(group.layers)
        extras = _HAS_SINKS * (group.sinks is not None) | _HAS_SLOPES * (group.slopes is not None)
        heads = (group.num_q_heads, group.num_kv_heads, group.head_dim)
        parts.append(_GROUP.pack(*heads, window, num_layers, extras))
        parts.append(struct.pack(f"<{num_layers}H", *group.layers))
        for values in (*(group.sinks or ()), group.slopes or ()):
            parts.append(struct.pack(f"<{len(values)}d", *values))
    return b"".join(parts)


def _decode_group(reader: _Reader) -> KVGroup:
    num_q_heads, num_kv_heads, head_dim, window, num_layers, extras = reader.unpack(_GROUP)
    if num_layers > MAX_LAYERS:
        raise RemoteProtocolError(f"a KV group of {num_layers} layers; at most {MAX_LAYERS}")
    if extras & ~(_HAS_SINKS | _HAS_SLOPES):
        raise RemoteProtocolError(f"a KV group with extras {extras:#x}, which are unknown")
    layers = reader.unpack(struct.Struct(f"<{num_layers}H"))
    per_head = struct.Struct(f"<{num_q_heads}d")
    return KVGroup(
        layers,
        num_q_heads,
        num_kv_heads,
        head_dim,
        None if window == _NO_WINDOW else window,
        tuple(reader.unpack(per_head) for _ in layers) if extras & _HAS_SINKS else None,
        reader.unpack(per_head) if extras & _HAS_SLOPES else None,
    )


def _decode_geometry(reader: _Reader) -> AttentionGeometry:
    scale, has_softcap, softcap, max_rows, max_model_len, num_groups = reader.unpack(_GEOMETRY)
    kv_dtype, wire_dtype = reader.text(), reader.text()
    if num_groups > MAX_LAYERS:
        raise RemoteProtocolError(f"{num_groups} KV groups; at most {MAX_LAYERS}")
    return AttentionGeometry(
        groups=tuple(_decode_group(reader) for _ in range(num_groups)),
        scale=scale,
        softcap=softcap if has_softcap else None,
        kv_dtype=kv_dtype,
        wire_dtype=wire_dtype,
        max_rows=max_rows,
        max_model_len=max_model_len,
    )


def _encode_slots(slots: m.SlotPlan) -> bytes:
    return _SLOTS.pack(slots.num_latency, slots.num_bulk, slots.latency_nbytes, slots.bulk_nbytes)


def _encode_open_session(msg: m.OpenSession) -> bytes:
    return _encode_slots(msg.slots) + _text(msg.transport) + _encode_geometry(msg.geometry)


def _decode_open_session(reader: _Reader) -> m.OpenSession:
    slots = m.SlotPlan(*reader.unpack(_SLOTS))
    transport = reader.text()
    return m.OpenSession(_decode_geometry(reader), slots, transport)


def _encode_open_bench(msg: m.OpenBench) -> bytes:
    opening = m.OpenSession(msg.geometry, msg.slots, msg.transport)
    return _BENCH.pack(msg.force) + _encode_open_session(opening)


def _decode_open_bench(reader: _Reader) -> m.OpenBench:
    (force,) = reader.unpack(_BENCH)
    if force not in (0, 1):
        raise RemoteProtocolError(f"a flag of {force}")
    opening = _decode_open_session(reader)
    return m.OpenBench(opening.geometry, opening.slots, opening.transport, bool(force))


def _encode_session_opened(msg: m.SessionOpened) -> bytes:
    fixed = _SESSION_OPENED.pack(
        msg.session_id,
        msg.epoch,
        msg.capacity_bytes,
        msg.num_threads,
        msg.block_tokens,
        msg.seg_tokens,
    )
    return fixed + _encode_slots(msg.slots) + _text(msg.transport) + _text(msg.isa)


def _decode_session_opened(reader: _Reader) -> m.SessionOpened:
    session_id, epoch, capacity, num_threads, block_tokens, seg = reader.unpack(_SESSION_OPENED)
    slots = m.SlotPlan(*reader.unpack(_SLOTS))
    transport, isa = reader.text(), reader.text()
    return m.SessionOpened(
        session_id, epoch, capacity, num_threads, isa, block_tokens, seg, slots, transport
    )


def _encode_data_hello(msg: m.DataHello) -> bytes:
    nonce, mac = _secret(msg.nonce, m.NONCE_BYTES), _secret(msg.mac, m.MAC_BYTES)
    return _DATA_HELLO.pack(msg.session_id, nonce, mac) + _blob(msg.details, MAX_DETAILS_BYTES)


def _decode_data_hello(reader: _Reader) -> m.DataHello:
    return m.DataHello(*reader.unpack(_DATA_HELLO), reader.blob(MAX_DETAILS_BYTES))


def _encode_data_accepted(msg: m.DataAccepted) -> bytes:
    mac = _DATA_ACCEPTED.pack(_secret(msg.mac, m.MAC_BYTES))
    return mac + _blob(msg.details, MAX_DETAILS_BYTES)


def _decode_data_accepted(reader: _Reader) -> m.DataAccepted:
    return m.DataAccepted(*reader.unpack(_DATA_ACCEPTED), reader.blob(MAX_DETAILS_BYTES))


def _encode_planes(msg: m.Planes) -> bytes:
    if len(msg.offers) > MAX_OFFERS:
        raise LocalProtocolError(f"{len(msg.offers)} data planes; at most {MAX_OFFERS}")
    offers = [_text(name) + _blob(details, MAX_OFFER_BYTES) for name, details in msg.offers]
    return _LENGTH.pack(len(offers)) + b"".join(offers)


def _decode_planes(reader: _Reader) -> m.Planes:
    (count,) = reader.unpack(_LENGTH)
    if count > MAX_OFFERS:
        raise RemoteProtocolError(f"{count} data planes; at most {MAX_OFFERS}")
    return m.Planes(tuple((reader.text(), reader.blob(MAX_OFFER_BYTES)) for _ in range(count)))


def _encode_heartbeat(msg: m.Heartbeat) -> bytes:
    return _HEARTBEAT.pack(msg.progress, msg.pending)


def _decode_heartbeat(reader: _Reader) -> m.Heartbeat:
    return m.Heartbeat(*reader.unpack(_HEARTBEAT))


def _encode_status(msg: m.Status) -> bytes:
    fixed = _STATUS.pack(
        msg.uptime_s,
        msg.memory_limit_bytes,
        msg.memory_used_bytes,
        msg.num_sessions,
        msg.num_threads,
        msg.num_sequences,
        msg.num_messages,
    )
    return fixed + _text(msg.name) + _text(msg.software) + _text(msg.isa)


def _decode_status(reader: _Reader) -> m.Status:
    uptime_s, limit, used, sessions, threads, sequences, frames = reader.unpack(_STATUS)
    if not math.isfinite(uptime_s):
        raise RemoteProtocolError(f"an uptime of {uptime_s} s")
    name, software, isa = reader.text(), reader.text(), reader.text()
    return m.Status(
        name, software, uptime_s, limit, used, sessions, threads, isa, sequences, frames
    )


def _encode_error(msg: m.Error) -> bytes:
    # Cut, not refused: an error that cannot be sent because it explains too much helps nobody.
    text = "".join(char if char.isprintable() else " " for char in msg.text)
    raw = text.encode(errors="replace")[:MAX_ERROR_TEXT_BYTES].decode(errors="ignore").encode()
    return _ERROR.pack(msg.code) + _LENGTH.pack(len(raw)) + raw


def _decode_error(reader: _Reader) -> m.Error:
    (code,) = reader.unpack(_ERROR)
    text = reader.text(MAX_ERROR_TEXT_BYTES)
    try:
        return m.Error(m.ErrorCode(code), text)
    except ValueError:  # a later version's code: its text still says what happened
        return m.Error(m.ErrorCode.PROTOCOL, f"{text} (error code {code})")


class _Codec(NamedTuple):
    message: type
    encode: Callable[[Any], bytes]
    decode: Callable[[_Reader], m.Message]
    may_grow: bool = False


_CODECS: dict[int, _Codec] = {
    1: _Codec(m.Hello, _encode_hello, _decode_hello, may_grow=True),
    2: _Codec(m.Auth, _encode_auth, _decode_auth),
    3: _Codec(m.OpenSession, _encode_open_session, _decode_open_session),
    4: _Codec(m.SessionOpened, _encode_session_opened, _decode_session_opened),
    5: _Codec(m.DataHello, _encode_data_hello, _decode_data_hello),
    6: _Codec(m.DataAccepted, _encode_data_accepted, _decode_data_accepted),
    7: _Codec(m.Heartbeat, _encode_heartbeat, _decode_heartbeat),
    8: _Codec(m.StatusRequest, lambda msg: b"", lambda reader: m.StatusRequest()),
    9: _Codec(m.Status, _encode_status, _decode_status),
    10: _Codec(m.Error, _encode_error, _decode_error, may_grow=True),
    11: _Codec(m.Bye, lambda msg: b"", lambda reader: m.Bye()),
    12: _Codec(m.PlanesRequest, lambda msg: b"", lambda reader: m.PlanesRequest()),
    13: _Codec(m.Planes, _encode_planes, _decode_planes),
    14: _Codec(m.OpenBench, _encode_open_bench, _decode_open_bench),
}
_TYPE_CODES = {codec.message: code for code, codec in _CODECS.items()}


def encode(msg: m.Message) -> tuple[int, bytes]:
    """Returns (message type, body).

    Raises:
        LocalProtocolError: a field is out of range, or `msg` is no message.
    """
    code = _TYPE_CODES.get(type(msg))
    if code is None:
        raise LocalProtocolError(f"{type(msg).__name__} is not a control message")
    try:
        return code, _CODECS[code].encode(msg)
    except (struct.error, TypeError, UnicodeEncodeError) as exc:
        raise LocalProtocolError(f"cannot encode {type(msg).__name__}: {exc}") from exc


def decode(type_code: int, body: bytes) -> m.Message:
    """Returns the message in `body`.

    Raises:
        RemoteProtocolError: an unknown type, a malformed body, or values that are not allowed.
    """
    codec = _CODECS.get(type_code)
    if codec is None:
        raise RemoteProtocolError(f"unknown control message type {type_code}")
    reader = _Reader(body)
    try:
        msg = codec.decode(reader)
    except ConfigError as exc:
        raise RemoteProtocolError(f"the peer's model geometry is not usable: {exc}") from exc
    if not codec.may_grow:
        reader.end()
    return msg
