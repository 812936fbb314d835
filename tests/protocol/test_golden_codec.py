"""The codec against bytes made by the real releases: encoders byte for byte, decoders by value.

Vectors that hold values which a client must not send (no worker id, readers 0) are here too: the codec encodes them,
validation sits above it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.values import CorrelationId, InstanceId, RequestId, TokenIds

GOLDEN = Path(__file__).parent.parent / "golden" / "wire"
RELEASES_OF_FILE = {
    "0.5.1": ("0.5.0", "0.5.1", "0.5.2"),
    "0.5.3": ("0.5.3", "0.5.4"),
    "0.5.6": ("0.5.6",),
    "0.5.7rc2": ("0.5.7rc2",),
}
"""Vectors are byte-identical within a group (PROTOCOL.md); 0.5.5 differs from 0.5.6 in CLEAR only, and has a test of
its own."""

REQUESTS: dict[str, type[p.Request[Any]]] = {rule.name: rule.request for rule in p.DIALECTS["0.5.7rc2"].rules.values()}


def vectors(kind: str) -> list[Any]:
    return list(_vectors(kind))


def _vectors(kind: str) -> Iterator[Any]:
    for path in sorted(GOLDEN.glob("*.json")):
        document = json.loads(path.read_text())
        for release in RELEASES_OF_FILE.get(document["lmcache_version"], (document["lmcache_version"],)):
            for vector in document["vectors"]:
                if vector["kind"] == kind:
                    yield pytest.param(p.DIALECTS[release], vector, id=f"{release}-{vector['name']}-{vector['uid']}")


def plain(value: Any) -> Any:
    """Undoes the JSON form of bytes."""
    if isinstance(value, dict):
        if set(value) == {"$bytes_b64"}:
            return base64.b64decode(value["$bytes_b64"])
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def tuples(value: Any) -> Any:
    return tuple(tuples(v) for v in value) if isinstance(value, list) else value


def as_field(name: str, value: Any) -> Any:
    if name == "key":
        fields = dict(value)
        packed = fields.pop("token_bytes", None)
        tokens = TokenIds(fields.pop("token_ids")) if packed is None else TokenIds.from_big_endian(packed)
        return p.IPCCacheServerKey(token_ids=tokens, **fields)
    if name == "registration":
        fields = dict(value)
        groups = tuple(p.GroupLayout(**group) for group in fields.pop("group_layouts", []))
        return p.Registration(group_layouts=groups, **fields)
    return tuples(value)


def request_of(dialect: p.Dialect, vector: Any) -> p.Request[Any]:
    kind = REQUESTS[vector["op"]]
    names = dialect.rules[kind].frames
    assert len(names) == len(vector["payloads"])
    return kind(**{n: as_field(n, plain(v)) for n, v in zip(names, vector["payloads"], strict=True)})


@pytest.mark.parametrize(("dialect", "vector"), vectors("request"))
def test_request_is_encoded_as_the_release_does(dialect: p.Dialect, vector: Any) -> None:
    frames = p.encode_request(dialect, CorrelationId(vector["uid"]), request_of(dialect, vector))
    assert [bytes(frame).hex() for frame in frames] == vector["frames"]


@pytest.mark.parametrize(("dialect", "vector"), vectors("request"))
def test_request_is_decoded_by_the_embedded_server(dialect: p.Dialect, vector: Any) -> None:
    received = p.decode_request(dialect, [bytes.fromhex(frame) for frame in vector["frames"]])
    expected = request_of(dialect, vector)
    assert received.uid.hex() == vector["frames"][0]
    # the wire of old releases has no readers and no configs: those come back as what a missing field means
    for name in dialect.rules[type(expected)].frames:
        got, want = getattr(received.request, name), getattr(expected, name)
        if isinstance(want, p.IPCCacheServerKey) and dialect.key_form is p.KeyForm.TOKEN_IDS_8:
            want = msgspec.structs.replace(want, num_kv_readers=0, request_configs=None)
        assert got == want


def reply_of(vector: Any) -> Any:
    """The struct that a golden reply value means, written down here and not taken from the codec."""
    op, value = vector["op"], plain(vector["value"])
    if op in ("query_prefetch_status", "wait_prefetch_status"):
        return p.PrefetchStatus(value)
    if op in ("commit_store", "commit_retrieve"):
        return p.Committed(value)
    if op == "ping":
        return p.Pong(value)
    if op == "noop":
        return p.NoopAnswer(value)
    if op == "get_chunk_size":
        return p.ChunkSize(value)
    if op == "get_experimental":
        return p.Experimental(tuple(value))
    if op == "register_kv_cache_engine_driven_context":
        return p.Registered(**value)
    if op in ("prepare_store", "prepare_retrieve"):
        slots = value["context"].get("slots")
        made = (
            None
            if slots is None
            else tuple(p.Slot(s["offset"], s["length"], tuple(s["shape"]), s["dtype"]) for s in slots)
        )
        if op == "prepare_store":
            return p.PreparedStore(made, tuple(value["context"].get("chunk_indices", ())))
        return p.PreparedRetrieve(value["success"], value["data"], made)
    assert value is None
    return p.Void()


def any_request(dialect: p.Dialect, op: str) -> p.Request[Any]:
    key = p.IPCCacheServerKey(
        model_name="m", world_size=1, worker_id=0, token_ids=TokenIds([]), start=0, end=0, request_id=RequestId("r")
    )
    known: dict[str, Any] = {
        "key": key,
        "instance_id": InstanceId(1),
        "request_id": RequestId("r"),
        "timeout": 0.0,
        "alignment": 1,
        "registration": p.Registration(
            instance_id=InstanceId(1), model_name="m", world_size=1, block_size=1, num_layers=1, hidden_dim_size=1,
            dtype_str="uint8", use_mla=True,
        ),
    }  # fmt: skip
    kind = REQUESTS[op]
    return kind(**{name: known[name] for name in kind.__struct_fields__ if name in known})


@pytest.mark.parametrize(("dialect", "vector"), vectors("reply"))
def test_reply_is_decoded_to_its_value(dialect: p.Dialect, vector: Any) -> None:
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    assert p.decode_correlation_id(frames) == vector["uid"]
    assert p.decode_reply(dialect, any_request(dialect, vector["op"]), frames) == reply_of(vector)


@pytest.mark.parametrize(("dialect", "vector"), vectors("reply"))
def test_reply_is_encoded_by_the_embedded_server(dialect: p.Dialect, vector: Any) -> None:
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    received = p.ReceivedRequest(frames[0], frames[1], any_request(dialect, vector["op"]))
    assert [bytes(f) for f in p.encode_reply(dialect, received, reply_of(vector))] == frames


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_opcodes_are_those_of_the_release(path: Path) -> None:
    document = json.loads(path.read_text())
    for release in RELEASES_OF_FILE.get(document["lmcache_version"], (document["lmcache_version"],)):
        for rule in p.DIALECTS[release].rules.values():
            if isinstance(rule.opcode, int):
                assert document["operation_ids"][rule.name] == rule.opcode, (release, rule.name)


def test_there_are_golden_vectors() -> None:
    assert len(list(vectors("request"))) > 400
    assert len(list(vectors("reply"))) > 200


def test_clear_of_0_5_5_has_no_frame_and_of_0_5_6_one() -> None:
    assert len(p.encode_request(p.DIALECTS["0.5.5"], CorrelationId(1), p.Clear(force=True))) == 2
    assert p.encode_request(p.DIALECTS["0.5.6"], CorrelationId(1), p.Clear(force=True))[2] == b"\xc3"


def test_tokens_of_a_call_are_encoded_once() -> None:
    tokens = TokenIds(range(1000))
    dialect = p.DIALECTS["0.5.6"]
    key = p.IPCCacheServerKey(
        model_name="m", world_size=1, worker_id=0, token_ids=tokens, start=0, end=1000, request_id=RequestId("r")
    )
    p.encode_request(dialect, CorrelationId(1), p.Lookup(key=key))
    made = tokens.wire_forms["array"]
    p.encode_request(dialect, CorrelationId(2), p.FreeLookupLocks(key=key))
    assert tokens.wire_forms["array"] is made
