"""The rules that surprise clients, one test each, so that a failure names the rule. The traces hold the whole of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmcache_sdk import protocol as p
from lmcache_sdk.devserver import unique_shm_name
from lmcache_sdk.devserver.hashing import whole_chunk_hashes
from lmcache_sdk.layout import read_payload
from tests.devserver.raw import (
    CHUNK,
    RELEASES,
    SHAPE,
    RawClient,
    chunks,
    commit_retrieve,
    commit_store,
    end,
    free,
    key,
    lookup,
    payload,
    prepare_retrieve,
    prepare_store,
    query,
    registration,
    running,
    tokens_of,
    unregister,
)

ENVELOPES = tuple(r for r in RELEASES if p.dialect_named(r).payload_form is p.PayloadForm.ENVELOPE)
PICKLES = tuple(release for release in RELEASES if release not in ENVELOPES)
every_release = pytest.mark.parametrize("release", RELEASES)


def shared(release: str = "0.5.6", **settings: Any) -> Any:
    return running(release, shm_name=unique_shm_name(), **settings)


def hit(client: RawClient, tokens: list[int], request_id: str, **parts: Any) -> int | None:
    client.call(lookup(tokens, request_id, **parts))
    return client.call(query(request_id)).ready_chunks


def store_inline(client: RawClient, tokens: list[int], tensors: list[torch.Tensor], instance_id: int = 1) -> bool:
    data = payload(client.dialect.release, tensors)
    return client.call(commit_store(instance_id, key(tokens), data)).success


def read_inline(client: RawClient, tokens: list[int], request_id: str, instance_id: int = 1) -> list[torch.Tensor]:
    prepared = client.call(prepare_retrieve(instance_id, key(tokens, request_id=request_id)))
    assert prepared.success
    form = client.dialect.payload_form
    return read_payload(memoryview(prepared.data), form, num_tensors=len(tokens) // CHUNK, max_nbytes=2**24)


# ---- slots -----------------------------------------------------------------------------------------------------------


@every_release
def test_slots_are_aligned_to_pages_and_as_large_as_the_chunk(release: str) -> None:
    with shared(release) as (_, client):
        client.call(registration(1, layers=3, hidden=100, dtype="bfloat16"))
        slots = client.call(prepare_store(1, key(tokens_of(0, 5 * CHUNK)))).slots
        assert slots is not None
        nbytes = 2 * 3 * CHUNK * 100 * 2
        stride = -(-nbytes // 4096) * 4096
        assert [slot.offset for slot in slots] == [index * stride for index in range(5)]
        assert {slot.length for slot in slots} == {nbytes}
        assert {slot.shape for slot in slots} == {(2, 3, CHUNK, 100)}
        assert {slot.dtype for slot in slots} == {"bfloat16"}


@every_release
def test_the_second_prepare_of_a_key_gets_nothing_and_its_commit_publishes_the_first(release: str) -> None:
    with shared(release) as (server, client):
        client.call(registration(1))
        client.call(prepare_store(1, key(tokens_of(0))))
        assert client.call(prepare_store(1, key(tokens_of(0)))).slots == ()
        assert client.call(commit_store(1, key(tokens_of(0)))).success, "half-written slots are published"
        assert not client.call(commit_store(1, key(tokens_of(0)))).success
        assert server.locks() == 0
        assert hit(client, tokens_of(0), "r") == 2


@every_release
def test_two_prepared_retrieves_of_a_key_leave_one_lock(release: str) -> None:
    with shared(release) as (server, client):
        client.call(registration(1))
        store_inline(client, tokens_of(0), chunks(2))
        for name in "ab":
            assert hit(client, tokens_of(0), name) == 2
            assert client.call(prepare_retrieve(1, key(tokens_of(0), request_id=name))).success
        for name in "ab":
            assert client.call(commit_retrieve(1, key(tokens_of(0), request_id=name))).success
        assert server.leases() == 2


@every_release
def test_slots_of_a_reservation_are_only_those_that_nobody_holds(release: str) -> None:
    with shared(release) as (_, client):
        client.call(registration(1))
        tokens = tokens_of(0, 4 * CHUNK)
        client.call(prepare_store(1, key(tokens, start=CHUNK, end=2 * CHUNK)))
        assert client.call(prepare_store(1, key(tokens))).chunk_indices == (0, 2, 3)


@every_release
def test_no_room_is_empty_slots_for_all_or_true_for_nothing(release: str) -> None:
    with shared(release, l1_size_bytes=3 * 4096, eviction_interval=1000) as (_, client):
        client.call(registration(1))
        assert client.call(prepare_store(1, key(tokens_of(0, 4 * CHUNK)))).slots == ()
        assert store_inline(client, tokens_of(100, 4 * CHUNK), chunks(4))
        assert hit(client, tokens_of(100, 4 * CHUNK), "r") == 0


def test_a_miss_unlocks_what_was_there() -> None:
    with shared() as (server, client):
        client.call(registration(1))
        store_inline(client, tokens_of(0), chunks(2))
        assert hit(client, tokens_of(0, 3 * CHUNK), "r") == 2
        assert not client.call(prepare_retrieve(1, key(tokens_of(0, 3 * CHUNK), request_id="r"))).success
        assert server.leases() == 0


# ---- inline ----------------------------------------------------------------------------------------------------------


@every_release
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("mla", [True, False])
def test_bytes_come_back_as_they_were(release: str, dtype: torch.dtype, mla: bool) -> None:
    shape = SHAPE[1:] if mla else SHAPE
    bits = torch.randint(0, 256, (2, *shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    given = [each.view(dtype) for each in bits]
    with running(release) as (_, client):
        client.call(registration(1, mla=mla, dtype=str(dtype).removeprefix("torch.")))
        assert client.call(prepare_store(1, key(tokens_of(0)))).slots is None
        assert store_inline(client, tokens_of(0), given)
        assert hit(client, tokens_of(0), "r") == 2
        found = read_inline(client, tokens_of(0), "r")
        assert [each.dtype for each in found] == [dtype] * 2
        for before, after in zip(given, found, strict=True):
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


@pytest.mark.parametrize("release", PICKLES)
def test_wrong_shapes_wedge_until_0_5_6(release: str) -> None:
    with running(release) as (server, client):
        client.call(registration(1))
        assert not store_inline(client, tokens_of(0), chunks(1))
        assert server.locks() == 1
        assert store_inline(client, tokens_of(0), chunks(2)), "the retry says true and stores nothing"
        assert hit(client, tokens_of(0), "r") == 1


@pytest.mark.parametrize("release", ENVELOPES)
def test_wrong_shapes_are_silent_from_0_5_7(release: str) -> None:
    with running(release) as (server, client):
        client.call(registration(1))
        wrong = (chunks(1), chunks(3), chunks(2, (2, 2, CHUNK, 9)), chunks(2, dtype=torch.float16))
        for position, tensors in enumerate(wrong):
            data = payload(release, tensors)
            assert client.is_silent(commit_store(1, key(tokens_of(100 * position)), data))
            assert server.locks() == 0
            assert store_inline(client, tokens_of(100 * position), chunks(2))


@pytest.mark.parametrize("release", PICKLES)
def test_another_dtype_is_converted_until_0_5_6(release: str) -> None:
    with running(release) as (_, client):
        client.call(registration(1, dtype="float16"))
        given = chunks(2)
        assert store_inline(client, tokens_of(0), given)
        assert hit(client, tokens_of(0), "r") == 2
        assert all(
            torch.equal(before.half(), after)
            for before, after in zip(given, read_inline(client, tokens_of(0), "r"), strict=True)
        )


@every_release
def test_first_writer_wins(release: str) -> None:
    with running(release) as (_, client):
        client.call(registration(1))
        first = chunks(2, seed=1)
        assert store_inline(client, tokens_of(0), first)
        assert store_inline(client, tokens_of(0), chunks(2, seed=2))
        hit(client, tokens_of(0), "r")
        assert torch.equal(read_inline(client, tokens_of(0), "r")[1], first[1])


CODE = b"cos\nsystem\n(S'echo > /tmp/devserver-was-here'\ntR."


@every_release
def test_code_is_never_run(release: str) -> None:
    with running(release) as (server, client):
        client.call(registration(1))
        for data in (CODE, b"\x80\x04N.", b"]", b"\xff" * 100, b"\x82\xa7version\x01\xa7tensors\x90"):
            refused = client.is_silent(commit_store(1, key(tokens_of(0)), data))
            assert refused, data
        assert server.locks() == 0


# ---- sessions and keys -----------------------------------------------------------------------------------------------


@every_release
def test_a_request_id_keeps_the_hashes_of_its_first_tokens(release: str) -> None:
    with running(release) as (_, client):
        client.call(registration(1))
        for tokens in (tokens_of(0), tokens_of(100)):
            data = payload(release, chunks(2))
            assert client.call(commit_store(1, key(tokens, request_id="same"), data)).success
        assert hit(client, tokens_of(100), "r") == 0, "true, and lost"
        client.call(end("same"))
        assert client.call(commit_store(1, key(tokens_of(100), request_id="same"), payload(release, chunks(2)))).success
        assert hit(client, tokens_of(100), "s") == 2


@every_release
def test_the_number_is_given_once(release: str) -> None:
    with running(release) as (_, client):
        client.call(registration(1))
        store_inline(client, tokens_of(0), chunks(2))
        assert hit(client, tokens_of(0), "r") == 2
        assert client.call(query("r")).ready_chunks == 0


@every_release
def test_end_releases_nothing(release: str) -> None:
    with running(release) as (server, client):
        client.call(registration(1))
        store_inline(client, tokens_of(0), chunks(2))
        hit(client, tokens_of(0), "r")
        client.call(end("r"))
        assert server.leases() == 2
        client.call(free(tokens_of(0), "r"))
        remembered = not client.dialect.free_needs_live_session
        assert server.leases() == (0 if remembered else 2)


@every_release
def test_free_twice_steals(release: str) -> None:
    with running(release) as (server, client):
        client.call(registration(1))
        store_inline(client, tokens_of(0), chunks(2))
        hit(client, tokens_of(0), "mine")
        hit(client, tokens_of(0), "theirs")
        client.call(free(tokens_of(0), "mine"))
        client.call(free(tokens_of(0), "mine"))
        assert server.leases() == 0


@pytest.mark.parametrize("release", RELEASES)
def test_a_second_lookup_adds_locks_and_replaces_the_result(release: str) -> None:
    """FREE before its result was asked for goes by the key, the first result, or the second, as releases differ."""
    with running(release) as (server, client):
        client.call(registration(1))
        store_inline(client, tokens_of(0, 4 * CHUNK), chunks(4))
        assert hit(client, tokens_of(0), "r") == 2
        client.call(lookup(tokens_of(0, 4 * CHUNK), "r"))
        assert server.leases() == 6
        client.call(free(tokens_of(0, 4 * CHUNK), "r"))
        # only 0.5.4 still goes by the first result
        assert server.leases() == (4 if release == "0.5.4" else 2)


@every_release
@pytest.mark.parametrize("prepared", [True, False])
def test_a_commit_retrieve_of_a_wrong_key(release: str, prepared: bool) -> None:
    """It is true to whoever has not prepared; after a prepare the key is looked at, once."""
    with running(release) as (_, client):
        client.call(registration(1))
        store_inline(client, tokens_of(0), chunks(2))
        hit(client, tokens_of(0), "r")
        if prepared:
            client.call(prepare_retrieve(1, key(tokens_of(0), request_id="r")))
        wrong = commit_retrieve(1, key(tokens_of(0), request_id="r", end=20))
        assert client.is_silent(wrong) is prepared
        assert client.call(wrong).success


@pytest.mark.parametrize("readers", [1, 5, 128, 1000])
def test_readers_are_counted_up_to_a_limit(readers: int) -> None:
    with running() as (server, client):
        client.call(registration(1))
        store_inline(client, tokens_of(0), chunks(2))
        hit(client, tokens_of(0), "r", readers=readers)
        assert server.leases() == 2 * min(readers, 128)
        client.call(free(tokens_of(0), "r", readers=readers))
        assert server.leases() == 0


def test_the_same_text_at_another_prefix_is_another_chunk() -> None:
    with running() as (_, client):
        client.call(registration(1))
        store_inline(client, tokens_of(0), chunks(2))
        assert hit(client, tokens_of(16), "r") == 0
        assert hit(client, tokens_of(0, 16), "s") == 1


def test_hashes_roll() -> None:
    packed = bytes(range(256))
    hashes = whole_chunk_hashes(packed, 16)
    assert len(set(hashes)) == 4
    assert whole_chunk_hashes(packed[:200], 16) == hashes[:3]
    assert whole_chunk_hashes(packed, 16, 16, 48) == hashes[1:3]
    assert whole_chunk_hashes(packed, 16, 17, 47) == []
    other = whole_chunk_hashes(b"x" + packed[1:], 16)
    assert not set(other) & set(hashes)


# ---- registrations ---------------------------------------------------------------------------------------------------


@every_release
def test_registering_again_ignores_the_new_layout(release: str) -> None:
    with shared(release) as (server, client):
        client.call(registration(1))
        client.call(registration(1, layers=9, model="other"))
        slots = client.call(prepare_store(1, key(tokens_of(0)))).slots
        assert slots is not None
        assert slots[0].shape == SHAPE
        assert server.held().registrations == {1}


@every_release
def test_layouts_are_counted(release: str) -> None:
    with running(release) as (_, client):
        client.call(registration(1))
        client.call(registration(2))
        store_inline(client, tokens_of(0), chunks(2))
        for turn, (instance_id, found) in enumerate(((1, 2), (1, 2), (2, 0))):
            client.call(unregister(instance_id))
            assert hit(client, tokens_of(0), f"r{turn}") == found
        client.call(registration(3))
        assert hit(client, tokens_of(0), "again") == 2


@pytest.mark.parametrize("release", ["0.5.4", "0.5.5", "0.5.7rc2"])
def test_physical_slots(release: str) -> None:
    with shared(release) as (_, client):
        # a field that the release's form does not have does not travel
        client.call(registration(1, slots=4))
        slots = client.call(prepare_store(1, key(tokens_of(0)))).slots
        assert slots is not None
        assert slots[0].shape == (2, 2, CHUNK if release == "0.5.4" else 4, 8)


def test_group_layouts_are_taken_and_several_groups_are_not_transferred() -> None:
    group = p.GroupLayout(num_layers=2, hidden_dim_size=8, dtype_str="float32", tokens_per_block=16)
    wrong = p.GroupLayout(num_layers=2, hidden_dim_size=8, dtype_str="nope", tokens_per_block=16)
    with shared("0.5.7rc2") as (_, client):
        client.call(registration(1, groups=[group]))
        assert client.call(prepare_store(1, key(tokens_of(0)))).slots
        client.call(registration(2, groups=[group, group]))
        assert client.is_silent(prepare_store(2, key(tokens_of(100))))
        assert client.is_silent(registration(3, groups=[wrong]))
        skipping = p.PrepareStore(
            key=key(tokens_of(200)), instance_id=prepare_store(1, key([])).instance_id, skipped_chunks=((0,),)
        )
        assert client.is_silent(skipping)


def test_the_chunk_size_is_negotiated_once() -> None:
    with running("0.5.7rc2") as (server, client):
        assert client.is_silent(p.NegotiateChunkSize(alignment=0))
        assert client.call(p.NegotiateChunkSize(alignment=24)).num_tokens == 24
        assert client.call(p.NegotiateChunkSize(alignment=12)).num_tokens == 24
        assert client.is_silent(p.NegotiateChunkSize(alignment=16))
        assert server.status()["chunk_size"] == 24
        client.call(registration(1))
        store = commit_store(1, key(list(range(48))), payload("0.5.7rc2", chunks(2, (2, 2, 24, 8))))
        assert client.call(store).success


@pytest.mark.parametrize("release", ["0.5.6", "0.5.7rc2"])
def test_asking_for_the_chunk_size_freezes_it(release: str) -> None:
    with running(release) as (_, client):
        assert client.call(p.GetChunkSize()).num_tokens == CHUNK
        if client.dialect.get_chunk_size_freezes:
            assert client.is_silent(p.NegotiateChunkSize(alignment=24))


def test_sessions_freeze_it_too() -> None:
    with running("0.5.7rc2") as (_, client):
        client.call(registration(1))
        client.call(lookup(tokens_of(0), "r"))
        assert client.is_silent(p.NegotiateChunkSize(alignment=24))
        client.call(end("r"))
        assert client.call(p.NegotiateChunkSize(alignment=24)).num_tokens == 24
