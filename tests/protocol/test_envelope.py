"""The typed envelope: recorded bytes both directions, its limits, and garbage."""

from __future__ import annotations

import base64
import json
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.errors import LocalProtocolError, RemoteProtocolError
from lmcache_sdk.protocol import envelope as module
from lmcache_sdk.protocol.envelope import MAX_TENSORS, bin_header, decode_envelope, envelope_head, tensor_head

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "wire" / "lmcache-0.5.7rc2.json").read_text())
PAYLOADS = [pytest.param(vector, id=vector["name"]) for vector in GOLDEN["tensor_payloads"] if "error" not in vector]
encode = msgspec.msgpack.encode


def tensor(**change: object) -> dict[str, object]:
    return {"dtype": "uint8", "shape": [2, 3], "data": bytes(6)} | change


def envelope(*tensors: dict[str, object], **change: object) -> dict[str, object]:
    return {"version": 1, "tensors": list(tensors)} | change


@pytest.mark.parametrize("vector", PAYLOADS)
def test_golden_envelope_both_directions(vector: dict[str, Any]) -> None:
    payload = base64.b64decode(vector["payload_b64"])
    found = decode_envelope(memoryview(payload)).tensors
    written = envelope_head(len(found))
    for each, expected in zip(found, vector["tensors"], strict=True):
        raw = base64.b64decode(expected["raw_le_b64"])
        assert (each.dtype, list(each.shape), bytes(each.data)) == (expected["dtype"], expected["shape"], raw)
        written += tensor_head(each.dtype, each.shape, len(raw)) + raw
    assert written == payload


def test_data_are_views_of_the_payload() -> None:
    payload = bytearray(encode(envelope(tensor(data=b"abcdef"))))
    [found] = decode_envelope(memoryview(payload)).tensors
    payload[payload.index(b"abcdef")] = ord("z")
    assert bytes(found.data) == b"zbcdef"


@pytest.mark.parametrize(
    "value",
    [
        envelope(version=2),
        envelope(version=True),
        envelope(version="1"),
        envelope(extra=1),
        envelope(groups=[]),
        {"version": 1, "groups": [{"chunk_indices": [0], "tensors": []}]},
        {"version": 1},
        {"tensors": []},
        [1, []],
        None,
        envelope(tensor(dtype=1)),
        envelope(tensor(dtype="x" * 65)),
        envelope(tensor(shape=[])),
        envelope(tensor(shape=[1] * 17)),
        envelope(tensor(shape=[0])),
        envelope(tensor(shape=[-1])),
        envelope(tensor(shape=[2**41])),
        envelope(tensor(shape=[1.0])),
        envelope(tensor(shape=[True])),
        envelope(tensor(shape="ab")),
        envelope(tensor(data="text")),
        envelope(tensor(data=None)),
        envelope(tensor(stride=[1])),
        envelope({"dtype": "uint8", "shape": [1]}),
        envelope(*[tensor()] * (MAX_TENSORS + 1)),
    ],
)
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_envelope(memoryview(encode(value)))
    assert caught.value.path == "payload"


def test_the_largest_counts_pass() -> None:
    assert len(decode_envelope(memoryview(encode(envelope(*[tensor()] * MAX_TENSORS)))).tensors) == MAX_TENSORS
    [found] = decode_envelope(memoryview(encode(envelope(tensor(shape=[1] * 16))))).tensors
    assert len(found.shape) == 16


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x80", b"\xc1", b"\x82\xa7version\x01\xa7tensors", encode(envelope()) + b"\x00", b"\x81" * 100_000],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_envelope(memoryview(payload))


@pytest.mark.parametrize("count", [MAX_TENSORS, 2**32 - 1])
def test_a_count_is_not_believed(count: int) -> None:
    payload = b"\x82\xa7version\x01\xa7tensors\xdd" + count.to_bytes(4, "big")
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode_envelope(memoryview(payload))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@given(st.binary(max_size=100), st.data())
def test_garbage_is_an_envelope_or_refused(garbage: bytes, data: st.DataObject) -> None:
    payload = bytearray(encode(envelope(tensor(), tensor())))
    start = data.draw(st.integers(0, len(payload)))
    payload[start : start + data.draw(st.integers(0, 9))] = garbage[:8]
    for each in (garbage, bytes(payload)):
        with suppress(RemoteProtocolError):
            assert decode_envelope(memoryview(each)).version == 1


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 65535, 65536, 2**20])
def test_bin_header_is_the_shortest(nbytes: int) -> None:
    assert bin_header(nbytes) + bytes(nbytes) == encode(bytes(nbytes))


@pytest.mark.parametrize(("nbytes", "header"), [(2**32 - 1, b"\xc6\xff\xff\xff\xff"), (2**31, b"\xc6\x80\x00\x00\x00")])
def test_bin_header_of_large_data(nbytes: int, header: bytes) -> None:
    assert bin_header(nbytes) == header


@pytest.mark.parametrize("num_tensors", [0, 1, 15, 16, 65535, 65536])
def test_envelope_head_announces_the_tensors(num_tensors: int) -> None:
    whole = envelope_head(num_tensors) + encode(tensor()) * num_tensors
    assert whole == encode(envelope(*[tensor()] * num_tensors))


@pytest.mark.parametrize(("limit", "most"), [("MAX_TENSOR_NBYTES", 5), ("MAX_ENVELOPE_NBYTES", 11)])
def test_more_bytes_than_the_limits_are_refused(limit: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real limits are gigabytes: lowered here to one byte below what two small tensors have."""
    payload = memoryview(encode(envelope(tensor(), tensor())))
    monkeypatch.setattr(module, limit, most + 1)
    assert len(decode_envelope(payload).tensors) == 2
    monkeypatch.setattr(module, limit, most)
    with pytest.raises(RemoteProtocolError, match="limits") as caught:
        decode_envelope(payload)
    assert caught.value.path.startswith("payload.tensors[")


def test_what_no_frame_can_carry_is_our_own_mistake() -> None:
    for nbytes in (-1, 2**32):
        with pytest.raises(LocalProtocolError):
            bin_header(nbytes)
    for count in (-1, MAX_TENSORS + 1):
        with pytest.raises(LocalProtocolError):
            envelope_head(count)
    for shape, nbytes in (((), 1), ((1,) * 17, 1), ((1,), 2**31 + 1)):
        with pytest.raises(LocalProtocolError):
            tensor_head("uint8", shape, nbytes)
    assert tensor_head("uint8", (2**31,), 2**31).endswith(b"\xc6\x80\x00\x00\x00")
