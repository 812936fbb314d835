"""Target 2: any frames are a reply, a request or an event of the in-flight table, or `RemoteProtocolError`.

An input is four bytes that choose, then the material of the frames:
byte 0 the dialect, byte 1 the mode (`MODES`), byte 2 the kind of request, byte 3 is free for the mode. Frames are
two bytes of length, little endian, and that many bytes; the last takes what is left.
"""

# ruff: noqa: SIM105  # contextlib.suppress is slower than try, and this runs millions of times

from __future__ import annotations

from typing import Any, Final

import msgspec

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.values import CorrelationId, InstanceId, RequestId, TokenIds

from .guard import MARKS, Violation

MAX_LEN: Final = 1024
HEAD: Final = 4
REPLY, REQUEST, RAW, EXCHANGE = MODES = range(4)
DIALECTS: Final = tuple(p.DIALECTS.values())
_UID: Final = b"\x07"
_KEY: Final = p.IPCCacheServerKey(
    model_name="m", world_size=1, worker_id=0, token_ids=TokenIds([1]), start=0, end=1, request_id=RequestId("r")
)
_REGISTRATION: Final = p.Registration(
    instance_id=InstanceId(1), model_name="m", world_size=1, block_size=1, num_layers=1, hidden_dim_size=1,
    dtype_str="uint8", use_mla=True,
)  # fmt: skip
_FIELDS: Final[dict[str, object]] = {
    "key": _KEY,
    "registration": _REGISTRATION,
    "instance_id": InstanceId(1),
    "request_id": RequestId("r"),
    "timeout": 1.0,
    "alignment": 1,
}


def _request_of(rule: p.Rule[Any]) -> p.Request[Any]:
    return rule.request(**{name: _FIELDS[name] for name in rule.frames if name in _FIELDS})


RULES: Final = {dialect.release: tuple(dialect.rules.values()) for dialect in DIALECTS}
REQUESTS: Final = {release: tuple(_request_of(rule) for rule in rules) for release, rules in RULES.items()}
_OPCODES: Final = {
    release: tuple(msgspec.msgpack.encode(rule.opcode) for rule in rules) for release, rules in RULES.items()
}


def num_frames(data: bytes) -> int:
    """Into how many frames an input's material is cut."""
    mode = data[1] % len(MODES)
    if mode == REPLY:
        return 1
    if mode == REQUEST:
        rules = RULES[DIALECTS[data[0] % len(DIALECTS)].release]
        return len(rules[data[2] % len(rules)].frames) or 1
    return 2 + data[3] % 5 if mode == RAW else 2 * (1 + (data[3] >> 2 & 3))


def split(material: bytes, most: int) -> list[bytes]:
    """Cuts material into at most that many frames."""
    frames: list[bytes] = []
    while len(frames) < most - 1 and len(material) >= 2:
        length = material[0] | material[1] << 8
        frames.append(material[2 : 2 + length])
        material = material[2 + length :]
    frames.append(material)
    return frames


def join(frames: list[bytes]) -> bytes:
    """Material that `split` cuts into these frames."""
    return b"".join(len(frame).to_bytes(2, "little") + frame for frame in frames[:-1]) + frames[-1]


def check(data: bytes) -> None:
    """One execution."""
    if len(data) < HEAD:
        return
    dialect = DIALECTS[data[0] % len(DIALECTS)]
    kind = data[2] % len(RULES[dialect.release])
    mode, material = data[1] % len(MODES), data[HEAD:]
    before = 2 * (kind + 32 * (mode + 4 * (data[0] % len(DIALECTS))))
    MARKS.hit(before)
    accepted = False
    if mode == REPLY:
        accepted = _check_reply(dialect, kind, [_UID, _OPCODES[dialect.release][kind], material])
    elif mode == REQUEST:
        rule = RULES[dialect.release][kind]
        payloads = split(material, num_frames(data)) if rule.frames else []
        accepted = _check_request(dialect, [_UID, _OPCODES[dialect.release][kind], *payloads])
    elif mode == RAW:
        frames = split(material, num_frames(data))
        _check_reply(dialect, kind, frames[data[3] >> 7 :])
        _check_request(dialect, frames[data[3] >> 7 :])
    else:
        _check_exchange(dialect, kind, data[3], split(material, num_frames(data)))
    if accepted:
        MARKS.hit(before + 1)


def _check_reply(dialect: p.Dialect, kind: int, frames: list[bytes]) -> bool:
    """What decodes, encodes again to something that decodes to the same. Tells whether it does."""
    request = REQUESTS[dialect.release][kind]
    try:
        p.decode_correlation_id(frames)
    except RemoteProtocolError:
        pass
    try:
        reply = p.decode_reply(dialect, request, frames)
    except RemoteProtocolError:
        return False
    received = p.ReceivedRequest(frames[0], frames[1], request)
    again = p.encode_reply(dialect, received, reply)
    if p.decode_reply(dialect, request, again) != reply:
        raise Violation(f"{reply!r} does not survive {again!r}")
    return True


def _check_request(dialect: p.Dialect, frames: list[bytes]) -> bool:
    try:
        received = p.decode_request(dialect, frames)
    except RemoteProtocolError:
        return False
    again = p.encode_request(dialect, CorrelationId(7), received.request)
    twice = p.encode_request(dialect, CorrelationId(7), p.decode_request(dialect, again).request)
    if list(map(bytes, again)) != list(map(bytes, twice)):  # by bytes: a timeout may be NaN
        raise Violation(f"{received.request!r} does not survive {again!r}")
    return True


def _check_exchange(dialect: p.Dialect, kind: int, how: int, frames: list[bytes]) -> None:
    """Messages to a table with two entries, one of them perhaps abandoned: each settles what it names, or nothing."""
    exchange = p.Exchange(dialect)
    entries = [exchange.send(REQUESTS[dialect.release][kind]), exchange.send(p.Noop())]
    if how & 1:
        exchange.abandon(entries[how >> 1 & 1])
    abandoned = [entry.state is p.InFlightState.ABANDONED for entry in entries]
    per_message = 1 + (how >> 2 & 3)
    for message in (frames[:per_message], frames[per_message:]):
        before = exchange.num_in_flight
        try:
            event = exchange.receive(message)
        except RemoteProtocolError:
            if exchange.num_in_flight != before:
                raise Violation("a refused message took an entry out") from None
            continue
        if exchange.num_in_flight != before - 1 or not event.entry.settled:
            raise Violation("an event without an entry")
        if isinstance(event, p.AnsweredLate) is not abandoned[entries.index(event.entry)]:
            raise Violation("late and in time are confused")
        try:
            event.entry.reply()
        except RemoteProtocolError:
            pass
