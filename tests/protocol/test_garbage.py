"""One sentence against all garbage: frames decode, or raise the one error. For every dialect, in both directions.

Random bytes hardly ever get past the header, so most frames here begin with what is legal: a known id, an opcode of the
dialect, well-formed MessagePack of some other shape, a golden message with a piece changed.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import LocalProtocolError, RemoteProtocolError
from lmcache_sdk.values import CorrelationId, InstanceId, RequestId, TokenIds

GOLDEN: Final = Path(__file__).parent.parent / "golden" / "wire"
DIALECTS: Final = st.sampled_from(list(p.DIALECTS.values()))
FRAMES: Final = st.lists(st.binary(max_size=64), max_size=8)

NAMES: Final = st.sampled_from(
    [
        *("context", "slots", "chunk_indices", "offset", "length", "shape", "dtype", "success", "data", "shm_name"),
        *("pool_size", "model_name", "world_size", "worker_id", "token_ids", "token_bytes", "start", "end"),
        *("request_id", "cache_salt", "request_configs", "num_kv_readers", "instance_id", "num_layers", "block_size"),
    ]
)
SCALARS: Final = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
VALUES: Final = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=6),
    max_leaves=12,
)
PACKED: Final = VALUES.map(msgspec.msgpack.encode)


def _golden(kind: str) -> list[list[bytes]]:
    found = []
    for path in sorted(GOLDEN.glob("*.json")):
        vectors: list[dict[str, Any]] = json.loads(path.read_text())["vectors"]
        found += [[bytes.fromhex(frame) for frame in v["frames"]] for v in vectors if v["kind"] == kind]
    return [frames for frames in found if sum(map(len, frames)) < 2000]


def _any_key() -> p.IPCCacheServerKey:
    return p.IPCCacheServerKey(
        model_name="m", world_size=1, worker_id=0, token_ids=TokenIds([]), start=0, end=0, request_id=RequestId("r")
    )


def _requests() -> dict[type[p.Request[Any]], p.Request[Any]]:
    registration = p.Registration(
        instance_id=InstanceId(1), model_name="m", world_size=1, block_size=1, num_layers=1, hidden_dim_size=1,
        dtype_str="uint8", use_mla=True,
    )  # fmt: skip
    key, instance, request_id = _any_key(), InstanceId(1), RequestId("r")
    made: list[p.Request[Any]] = [
        *(p.Lookup(key=key), p.FreeLookupLocks(key=key), p.EndSession(request_id=request_id)),
        *(p.QueryPrefetchStatus(request_id=request_id), p.WaitPrefetchStatus(request_id=request_id, timeout=1.0)),
        *(p.Register(registration=registration), p.Unregister(instance_id=instance)),
        *(p.PrepareStore(key=key, instance_id=instance), p.CommitStore(key=key, instance_id=instance)),
        *(p.PrepareRetrieve(key=key, instance_id=instance), p.CommitRetrieve(key=key, instance_id=instance)),
        *(p.Clear(), p.GetChunkSize(), p.Ping(), p.Noop(), p.GetExperimental(), p.NegotiateChunkSize(alignment=1)),
    ]
    return {type(request): request for request in made}


REQUESTS: Final = _requests()


def test_there_is_a_request_of_every_kind() -> None:
    assert set(REQUESTS) == set(p.DIALECTS["0.5.7rc2"].rules)


# ---- replies


@given(DIALECTS, FRAMES)
def test_any_frames_decode_or_are_refused_as_a_reply(dialect: p.Dialect, frames: list[bytes]) -> None:
    exchange = p.Exchange(dialect)
    entry = exchange.send(p.Noop())
    with suppress(RemoteProtocolError):
        event = exchange.receive(frames)
        assert event.entry is entry
        entry.reply()


@given(DIALECTS, st.data(), PACKED | st.binary(max_size=64))
@settings(max_examples=100)
def test_any_payload_of_any_reply_decodes_or_is_refused(dialect: p.Dialect, data: st.DataObject, frame: bytes) -> None:
    request = REQUESTS[data.draw(st.sampled_from(sorted(dialect.rules, key=lambda kind: kind.__name__)))]
    exchange = p.Exchange(dialect)
    entry = exchange.send(request)
    exchange.receive([bytes(entry.frames[0]), bytes(entry.frames[1]), frame])
    assert entry.settled
    with suppress(RemoteProtocolError):
        assert entry.reply() is not None


@given(DIALECTS, st.sampled_from(list(REQUESTS.values())), FRAMES)
def test_decode_reply_alone_has_the_same_one_error(
    dialect: p.Dialect, request: p.Request[Any], frames: list[bytes]
) -> None:
    if type(request) in dialect.rules:
        with suppress(RemoteProtocolError):
            p.decode_reply(dialect, request, frames)


@given(DIALECTS, st.data())
@settings(max_examples=100)
def test_a_golden_reply_with_one_byte_changed(dialect: p.Dialect, data: st.DataObject) -> None:
    frames = _changed(data, data.draw(st.sampled_from(REPLIES)))
    for request in REQUESTS.values():
        if type(request) in dialect.rules:
            with suppress(RemoteProtocolError):
                p.decode_correlation_id(frames)
                p.decode_reply(dialect, request, frames)


# ---- requests


@given(DIALECTS, FRAMES)
def test_any_frames_decode_or_are_refused_as_a_request(dialect: p.Dialect, frames: list[bytes]) -> None:
    with suppress(RemoteProtocolError):
        p.decode_request(dialect, frames)


@given(DIALECTS, st.data())
@settings(max_examples=100)
def test_any_payloads_of_any_request_decode_or_are_refused(dialect: p.Dialect, data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(sorted(dialect.rules.values(), key=lambda rule: rule.name)))
    payloads = data.draw(st.lists(PACKED | st.binary(max_size=64), min_size=len(rule.frames), max_size=4))
    with suppress(RemoteProtocolError):
        received = p.decode_request(dialect, [b"\x00", msgspec.msgpack.encode(rule.opcode), *payloads])
        assert isinstance(received.request, rule.request)


@given(DIALECTS, st.data())
@settings(max_examples=100)
def test_a_golden_request_with_one_byte_changed(dialect: p.Dialect, data: st.DataObject) -> None:
    frames = _changed(data, data.draw(st.sampled_from(ASKED)))
    with suppress(RemoteProtocolError):
        received = p.decode_request(dialect, frames)
        assert p.encode_reply(dialect, received, _void_or_fitting(dialect, received.request))[0] == frames[0]


@given(st.integers(0, 2**64 - 1), DIALECTS)
def test_what_the_client_encodes_the_server_decodes(uid: int, dialect: p.Dialect) -> None:
    for kind, request in REQUESTS.items():
        if kind in dialect.rules:
            received = p.decode_request(dialect, p.encode_request(dialect, CorrelationId(uid), request))
            assert type(received.request) is kind


@pytest.mark.parametrize("release", p.DIALECTS)
def test_what_cannot_be_encoded_has_one_error_too(release: str) -> None:
    dialect = p.DIALECTS[release]
    deep: object = 0
    for _ in range(100_000):
        deep = [deep]
    broken: list[p.Request[Any]] = [
        p.EndSession(request_id=RequestId("\ud800")),
        p.Unregister(instance_id=InstanceId(2**70)),
        p.Lookup(key=msgspec.structs.replace(_any_key(), model_name="\udfff")),
        p.Lookup(key=msgspec.structs.replace(_any_key(), end=2**64)),
        p.CommitStore(key=_any_key(), instance_id=InstanceId(1), data=object()),  # type: ignore[arg-type]  # broken
    ]
    if dialect.key_form is not p.KeyForm.TOKEN_IDS_8:
        broken.append(p.Lookup(key=msgspec.structs.replace(_any_key(), request_configs={"x": object()})))
        broken.append(p.Lookup(key=msgspec.structs.replace(_any_key(), request_configs={"x": deep})))
    for request in broken:
        with pytest.raises(LocalProtocolError):
            p.encode_request(dialect, CorrelationId(0), request)
    with pytest.raises(LocalProtocolError):
        p.encode_request(dialect, CorrelationId(2**64), p.Noop())


# ---- messages that contradict themselves

_SLOT: Final = {"offset": 0, "length": 4, "shape": [1], "dtype": "uint8"}


def _stored(slots: list[object] | None, indices: list[int] | None) -> object:
    """What a PREPARE_STORE answers."""
    context = {"slots": slots, "chunk_indices": indices}
    return {"context": {name: value for name, value in context.items() if value is not None}}


def _read(success: bool, data: bytes, **context: object) -> object:
    """What a PREPARE_RETRIEVE answers."""
    return {"success": success, "data": data, "context": context}


CONTRADICTIONS: Final[list[tuple[type[p.Request[Any]], object, str]]] = [
    (p.PrepareStore, _stored(None, [0]), "prepare_store.context"),
    (p.PrepareStore, _stored([_SLOT], None), "prepare_store.context.chunk_indices"),
    (p.PrepareStore, _stored([], [0]), "prepare_store.context.chunk_indices"),
    (p.PrepareStore, _stored([_SLOT, _SLOT], [1, 1]), "prepare_store.context.chunk_indices"),
    (p.PrepareStore, _stored([_SLOT, _SLOT], [1, 0]), "prepare_store.context.chunk_indices"),
    (p.PrepareStore, _stored([_SLOT], [-1]), "prepare_store.context.chunk_indices"),
    (p.PrepareStore, _stored([{**_SLOT, "shape": []}], [0]), "prepare_store.context.slots[0].shape"),
    (p.PrepareStore, _stored([_SLOT, {**_SLOT, "shape": [1] * 17}], [0, 1]), "prepare_store.context.slots[1].shape"),
    (p.PrepareStore, _stored([{**_SLOT, "shape": [0]}], [0]), "prepare_store.context.slots[0].shape"),
    (p.PrepareRetrieve, _read(False, b"x"), "prepare_retrieve.success"),
    (p.PrepareRetrieve, _read(False, b"", slots=[_SLOT]), "prepare_retrieve.success"),
    (p.PrepareRetrieve, _read(True, b"x", slots=[_SLOT]), "prepare_retrieve.data"),
    (p.PrepareRetrieve, _read(True, b"", slots=[{**_SLOT, "offset": -1}]), "prepare_retrieve.context.slots[0].offset"),
    (p.Register, {"shm_name": "x", "pool_size": -1}, "register.pool_size"),
    (p.QueryPrefetchStatus, -1, "prefetch_status"),
    (p.QueryPrefetchStatus, 2**40, "prefetch_status"),
    (p.GetChunkSize, 2**40, "chunk_size"),
]


@pytest.mark.parametrize(("kind", "reply", "path"), CONTRADICTIONS)
@pytest.mark.parametrize("release", ["0.5.0", "0.5.7rc2"])
def test_a_reply_that_contradicts_itself_is_refused_with_its_path(
    release: str, kind: type[p.Request[Any]], reply: object, path: str
) -> None:
    exchange = p.Exchange(p.DIALECTS[release])
    entry = exchange.send(REQUESTS[kind])
    exchange.receive([bytes(entry.frames[0]), bytes(entry.frames[1]), msgspec.msgpack.encode(reply)])
    with pytest.raises(RemoteProtocolError) as caught:
        entry.reply()
    assert caught.value.path == path and str(caught.value).startswith(path.split(".", maxsplit=1)[0])


@pytest.mark.parametrize("release", p.DIALECTS)
def test_a_key_with_tokens_that_are_none_is_refused(release: str) -> None:
    dialect = p.DIALECTS[release]
    frames = p.encode_request(dialect, CorrelationId(0), REQUESTS[p.Lookup])
    key = msgspec.msgpack.decode(frames[2])
    packed = dialect.key_form is p.KeyForm.TOKEN_BYTES
    wrong = [b"abc", b"abcde"] if packed else [[-1], [2**32], [2**63]]
    for tokens in wrong:
        key["token_bytes" if packed else "token_ids"] = tokens
        with pytest.raises(RemoteProtocolError, match=r"^key: token ids out of range or torn"):
            p.decode_request(dialect, [frames[0], frames[1], msgspec.msgpack.encode(key), *frames[3:]])


# ---- sizes


@pytest.mark.parametrize(
    "header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
)
@pytest.mark.parametrize("release", p.DIALECTS)
def test_a_header_that_claims_gigabytes_is_refused_before_they_are_made(release: str, header: bytes) -> None:
    dialect = p.DIALECTS[release]
    for kind, request in REQUESTS.items():
        if kind in dialect.rules:
            exchange = p.Exchange(dialect)
            entry = exchange.send(request)
            exchange.receive([bytes(entry.frames[0]), bytes(entry.frames[1]), header])
            with pytest.raises(RemoteProtocolError):
                entry.reply()


@pytest.mark.parametrize("depth", [10, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    nested = b"\x91" * depth + b"\xc0"
    for dialect in p.DIALECTS.values():
        for kind, request in REQUESTS.items():
            if kind in dialect.rules:
                exchange = p.Exchange(dialect)
                entry = exchange.send(request)
                exchange.receive([bytes(entry.frames[0]), bytes(entry.frames[1]), nested])
                with pytest.raises(RemoteProtocolError):
                    entry.reply()


# ---- helpers


REPLIES: Final = _golden("reply")
ASKED: Final = _golden("request")


def _changed(data: st.DataObject, frames: list[bytes]) -> list[bytes]:
    """One byte of one frame replaced, removed or added; or a frame removed or doubled."""
    index = data.draw(st.integers(0, len(frames) - 1))
    frame = frames[index]
    at = data.draw(st.integers(0, len(frame)))
    match data.draw(st.sampled_from(["replace", "remove", "add", "drop frame", "double frame"])):
        case "replace":
            frame = frame[:at] + data.draw(st.binary(min_size=1, max_size=1)) + frame[at + 1 :]
        case "remove":
            frame = frame[:at] + frame[at + 1 :]
        case "add":
            frame = frame[:at] + data.draw(st.binary(min_size=1, max_size=4)) + frame[at:]
        case "drop frame":
            return [*frames[:index], *frames[index + 1 :]]
        case _:
            return [*frames[: index + 1], *frames[index:]]
    return [*frames[:index], frame, *frames[index + 1 :]]


def _void_or_fitting(dialect: p.Dialect, request: p.Request[Any]) -> p.Reply:
    """Some reply that fits the request."""
    fitting: dict[type[p.Request[Any]], p.Reply] = {
        p.QueryPrefetchStatus: p.PrefetchStatus(1),
        p.WaitPrefetchStatus: p.PrefetchStatus(None),
        p.Register: p.Registered(),
        p.PrepareStore: p.PreparedStore(None, ()),
        p.PrepareRetrieve: p.PreparedRetrieve(success=False, data=b"", slots=None),
        p.CommitStore: p.Committed(True),
        p.CommitRetrieve: p.Committed(True),
        p.GetChunkSize: p.ChunkSize(1),
        p.NegotiateChunkSize: p.ChunkSize(1),
        p.Ping: p.Pong(True),
        p.Noop: p.NoopAnswer("OK"),
        p.GetExperimental: p.Experimental(()),
    }
    return fitting.get(type(request), p.Void())
