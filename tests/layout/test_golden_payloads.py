"""Every tensor payload that a real release wrote, read to the bit; and our own writer against the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmcache_sdk.layout import payload_of_tensors, read_payload, read_stored_payload
from lmcache_sdk.protocol import PayloadForm
from tests.layout.golden import FORMS, expected_tensors, payload_of, raw_bytes, tensor_payloads

PAYLOADS = [pytest.param(vector, id=name) for name, vector in tensor_payloads()]


def described(tensors: list[torch.Tensor]) -> list[tuple[torch.dtype, list[int], bytes]]:
    return [(tensor.dtype, list(tensor.shape), raw_bytes(tensor)) for tensor in tensors]


def test_golden_payloads_are_there() -> None:
    assert len(PAYLOADS) >= 60
    assert {vector["encoding"] for _, vector in tensor_payloads()} == set(FORMS)


@pytest.mark.parametrize("vector", PAYLOADS)
@pytest.mark.parametrize("writable", [False, True])
def test_golden_payload_is_read_to_the_bit(vector: dict[str, Any], writable: bool) -> None:
    payload = payload_of(vector)
    expected = expected_tensors(vector)
    given = memoryview(bytearray(payload)) if writable else memoryview(payload)
    form = FORMS[vector["encoding"]]
    tensors = read_payload(given, form, num_tensors=len(expected), max_nbytes=sum(len(raw) for *_, raw in expected))
    assert described(tensors) == expected
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)
    assert described(read_stored_payload(given, form, max_nbytes=2**20)) == expected


@pytest.mark.parametrize("vector", PAYLOADS)
def test_golden_tensors_are_views_of_a_writable_payload(vector: dict[str, Any]) -> None:
    payload = bytearray(payload_of(vector))
    expected = expected_tensors(vector)
    tensors = read_payload(
        memoryview(payload), FORMS[vector["encoding"]], num_tensors=len(expected), max_nbytes=len(payload)
    )
    for tensor, (_, _, raw) in zip(tensors, expected, strict=True):
        place = payload.index(raw)
        payload[place : place + len(raw)] = bytes(len(raw))
        assert raw_bytes(tensor) == bytes(len(raw))


@pytest.mark.parametrize("vector", PAYLOADS)
def test_golden_payload_is_what_the_server_side_writer_makes(vector: dict[str, Any]) -> None:
    expected, form = expected_tensors(vector), FORMS[vector["encoding"]]
    tensors = [
        torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).view(shape) for dtype, shape, raw in expected
    ]
    written = payload_of_tensors(tensors, form)
    if form is PayloadForm.ENVELOPE:
        assert bytes(written) == payload_of(vector)
    again = read_payload(memoryview(written), form, num_tensors=len(tensors), max_nbytes=2**20)
    assert described(again) == expected


@pytest.mark.parametrize("vector", [each for each in PAYLOADS if "0.5.7rc2" not in str(each.id)])
def test_golden_storage_streams_have_the_structure_we_write(vector: dict[str, Any]) -> None:
    """Storage keys are addresses in the real ones; everything else inside a storage is the same bytes."""
    recorded = payload_of(vector)
    tensors = read_payload(
        memoryview(recorded), PayloadForm.PICKLE, num_tensors=len(vector["tensors"]), max_nbytes=2**20
    )
    written = bytes(payload_of_tensors(tensors, PayloadForm.PICKLE))
    for before_key in (b"\x80\x02\x8a\nl\xfc\x9cF", b"Storage\nq"):
        assert recorded.count(before_key) == len(tensors)
    assert written.count(b"\x80\x02\x8a\nl\xfc\x9cF") == len(tensors)
    for name in vector["pickle_globals"]:
        assert name.rpartition(".")[2].encode() in written


@pytest.mark.parametrize("vector", PAYLOADS)
def test_golden_payload_of_another_count_or_size_is_refused(vector: dict[str, Any]) -> None:
    from lmcache_sdk.errors import RemoteProtocolError

    payload, form, count = memoryview(payload_of(vector)), FORMS[vector["encoding"]], len(vector["tensors"])
    for num_tensors in {count - 1, count + 1} - {-1}:
        with pytest.raises(RemoteProtocolError, match="tensors"):
            read_payload(payload, form, num_tensors=num_tensors, max_nbytes=2**20)
    if count:
        nbytes = sum(len(raw) for *_, raw in expected_tensors(vector))
        with pytest.raises(RemoteProtocolError, match="bytes"):
            read_payload(payload, form, num_tensors=count, max_nbytes=nbytes - 1)
