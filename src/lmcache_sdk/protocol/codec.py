"""Request <-> frames, reply <-> frames. Pure functions; the dialect says what goes where.

Takes structs and a dialect, gives frames, and back. `encode_*` raises `LocalProtocolError` or `UnsupportedError`,
`decode_*` raises `RemoteProtocolError`, and nothing else leaves this module. Tensor bytes pass through untouched: a
payload's memoryview is a view of the received frame, and a payload to be sent is never copied when it brings its own
header (`CommitStore.framed`).

The token ids of a call are encoded once per wire form and kept in their `TokenIds`; every later key of the call
splices the same bytes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
import msgspec

from lmcache_sdk.errors import LocalProtocolError, RemoteProtocolError
from lmcache_sdk.protocol import messages as m
from lmcache_sdk.protocol.rules import Dialect, KeyForm, RegistrationForm, Rule
from lmcache_sdk.values import CorrelationId, InstanceId, RequestId, TokenIds

R = TypeVar("R")
Frames = Sequence[m.Buffer]

_encode: Final = msgspec.msgpack.encode
_MAX_UID: Final = 2**64 - 1


class _Key8(msgspec.Struct):
    model_name: str
    world_size: int
    worker_id: int | None
    token_ids: msgspec.Raw
    start: int
    end: int
    request_id: str
    cache_salt: str = ""


class _Key10(_Key8):
    request_configs: dict[str, Any] | None = None
    num_kv_readers: int = 0


class _KeyBytes(msgspec.Struct):
    model_name: str
    world_size: int
    worker_id: int | None
    token_bytes: msgspec.Raw
    start: int
    end: int
    request_id: str
    cache_salt: str = ""
    request_configs: dict[str, Any] | None = None
    num_kv_readers: int = 0


class _Registration8(msgspec.Struct):
    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool


class _Registration9(_Registration8):
    num_physical_slots: int | None = None


class _Registration10(_Registration9):
    group_layouts: list[m.GroupLayout] = msgspec.field(default_factory=list)


_KEY_STRUCTS: Final = {
    KeyForm.TOKEN_IDS_8: _Key8,
    KeyForm.TOKEN_IDS_10: _Key10,
    KeyForm.TOKEN_BYTES: _KeyBytes,
}
_REGISTRATION_STRUCTS: Final = {
    RegistrationForm.BASIC: _Registration8,
    RegistrationForm.PHYSICAL_SLOTS: _Registration9,
    RegistrationForm.GROUP_LAYOUTS: _Registration10,
}


@attrs.frozen(eq=False, repr=False)
class ReceivedRequest:
    """A request as a server received it, with the two header frames that its reply must echo."""

    uid: bytes
    operation: bytes
    request: m.Request[Any]


# ---- the client's two directions ------------------------------------------------------------------------------------


def encode_request(dialect: Dialect, correlation_id: CorrelationId, request: m.Request[Any]) -> list[m.Buffer]:
    """Gives the frames of a request: correlation id, opcode, then one frame per field that travels."""
    rule = dialect.rule_for(request)
    try:
        return [
            _encode(int(correlation_id)),
            _encode(rule.opcode),
            *(_encode_field(dialect, request, field) for field in rule.frames),
        ]
    except (msgspec.EncodeError, TypeError, OverflowError, ValueError, RecursionError) as error:
        raise LocalProtocolError(f"{rule.name}: {error}") from error


def decode_correlation_id(frames: Frames) -> CorrelationId:
    """Reads which request a reply belongs to; whether the rest is a reply is for `decode_reply` to say."""
    if not frames:
        raise RemoteProtocolError("reply: a message without frames", path="reply")
    uid = _decode_frame(frames[0], int, "reply.uid")
    if not 0 <= uid <= _MAX_UID:
        raise RemoteProtocolError(f"reply.uid: not an id of ours: {uid}", path="reply.uid")
    return CorrelationId(uid)


def decode_reply(dialect: Dialect, request: m.Request[R], frames: Frames) -> R:
    """Reads the reply to `request`; `frames` are all frames, correlation id included."""
    rule = dialect.rule_for(request)
    if not 2 <= len(frames) <= 3:
        raise RemoteProtocolError(f"{rule.name}: expected 2 or 3 frames, got {len(frames)}", path="reply")
    if bytes(frames[1]) != _encode(rule.opcode):
        raise RemoteProtocolError(f"{rule.name}: the reply names another operation", path="reply.operation")
    return rule.reply.decode(frames[2] if len(frames) == 3 else None)


# ---- the embedded server's two directions ---------------------------------------------------------------------------


def decode_request(dialect: Dialect, frames: Frames) -> ReceivedRequest:
    """Reads a request as the dialect's server does: arity, field names and types must be right."""
    if len(frames) < 2:
        raise RemoteProtocolError(f"request: expected at least 2 frames, got {len(frames)}", path="request")
    rule = find_rule(dialect, frames[1])
    payloads = frames[2:]
    if len(payloads) != len(rule.frames):
        raise RemoteProtocolError(f"{rule.name}: expected {len(rule.frames)} payload frames, got {len(payloads)}")
    fields = {name: _decode_field(dialect, name, payload) for name, payload in zip(rule.frames, payloads, strict=True)}
    try:
        request = rule.request(**fields)
    except (TypeError, ValueError) as error:
        raise RemoteProtocolError(f"{rule.name}: {error}") from error
    return ReceivedRequest(bytes(frames[0]), bytes(frames[1]), request)


def find_rule(dialect: Dialect, operation: m.Buffer) -> Rule[Any]:
    """The rule that an operation frame names; raises RemoteProtocolError when the dialect defines none."""
    named = _decode_frame(operation, int | str, "request.operation")
    for rule in dialect.rules.values():
        if named == rule.opcode or (dialect.op_strings and named == rule.name):
            return rule
    raise RemoteProtocolError(
        f"request.operation: {named!r} is not defined in {dialect.release}", path="request.operation"
    )


def encode_reply(dialect: Dialect, received: ReceivedRequest, reply: m.Reply) -> list[m.Buffer]:
    """Gives the frames of a reply: the request's two header frames, and the value unless it is void."""
    encoded = dialect.rule_for(received.request).reply.encode(reply)
    return [received.uid, received.operation] if encoded is None else [received.uid, received.operation, encoded]


# ---- fields ---------------------------------------------------------------------------------------------------------


def _encode_field(dialect: Dialect, request: m.Request[Any], field: str) -> m.Buffer:
    value = getattr(request, field)
    if isinstance(value, m.IPCCacheServerKey):
        return _encode_key(dialect, value)
    if isinstance(value, m.Registration):
        return _encode_registration(dialect, value)
    if isinstance(request, m.CommitStore) and field == "data" and request.framed:
        return request.data
    return _encode(value)


def _encode_key(dialect: Dialect, key: m.IPCCacheServerKey) -> bytes:
    fields = {
        name: getattr(key, name) for name in _KEY_STRUCTS[dialect.key_form].__struct_fields__ if hasattr(key, name)
    }
    tokens = msgspec.Raw(encoded_tokens(dialect, key.token_ids))
    fields["token_bytes" if dialect.key_form is KeyForm.TOKEN_BYTES else "token_ids"] = tokens
    return _encode(_KEY_STRUCTS[dialect.key_form](**fields))


def encoded_tokens(dialect: Dialect, tokens: TokenIds) -> bytes:
    """The tokens' MessagePack value in this dialect; made once per `TokenIds`."""
    packed = dialect.key_form is KeyForm.TOKEN_BYTES
    form = "bytes" if packed else "array"
    if form not in tokens.wire_forms:
        tokens.wire_forms[form] = _encode(tokens.big_endian() if packed else tokens.to_list())
    return tokens.wire_forms[form]


def _encode_registration(dialect: Dialect, registration: m.Registration) -> bytes:
    struct = _REGISTRATION_STRUCTS[dialect.registration_form]
    return _encode(struct(**{name: getattr(registration, name) for name in struct.__struct_fields__}))


def _decode_field(dialect: Dialect, name: str, payload: m.Buffer) -> object:
    if name == "key":
        return _decode_key(dialect, payload)
    if name == "registration":
        wire = _decode_frame(payload, _REGISTRATION_STRUCTS[dialect.registration_form], "registration")
        fields = {field: getattr(wire, field) for field in wire.__struct_fields__}
        fields["instance_id"] = InstanceId(wire.instance_id)
        fields["group_layouts"] = tuple(fields.get("group_layouts", ()))
        return m.Registration(**fields)
    return _FIELD_DECODERS[name](payload)


def _decode_key(dialect: Dialect, payload: m.Buffer) -> m.IPCCacheServerKey:
    wire = _decode_frame(payload, _KEY_STRUCTS[dialect.key_form], "key")
    fields = {field: getattr(wire, field) for field in wire.__struct_fields__}
    try:
        if isinstance(wire, _KeyBytes):
            tokens = TokenIds.from_big_endian(_decode_frame(fields.pop("token_bytes"), bytes, "key.token_bytes"))
        else:
            tokens = TokenIds(_decode_frame(fields.pop("token_ids"), list[int], "key.token_ids"))
    except (ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"key: token ids out of range or torn: {error}", path="key") from error
    fields.setdefault("num_kv_readers", 0)
    return m.IPCCacheServerKey(token_ids=tokens, **fields)


def _decode_frame(frame: m.Buffer, kind: Any, path: str) -> Any:
    try:
        return msgspec.msgpack.decode(frame, type=kind, strict=True)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise RemoteProtocolError(f"{path}: {error}", path=path) from error


def _decodes(kind: Any, path: str) -> Callable[[m.Buffer], object]:
    return lambda payload: _decode_frame(payload, kind, path)


_FIELD_DECODERS: Final[Mapping[str, Callable[[m.Buffer], object]]] = {
    "tp_size": _decodes(int, "tp_size"),
    "request_id": lambda payload: RequestId(_decode_frame(payload, str, "request_id")),
    "timeout": _decodes(float, "timeout"),
    "extra_ranges": _decodes(tuple[tuple[int, int], ...], "extra_ranges"),
    "instance_id": _decodes(int | None, "instance_id"),
    "skipped_chunks": _decodes(tuple[tuple[int, ...], ...], "skipped_chunks"),
    "data": _decodes(memoryview, "data"),
    "force": _decodes(bool, "force"),
    "alignment": _decodes(int, "alignment"),
}
