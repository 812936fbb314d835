"""connect and the model: which is there, in how many pieces, with which layout, the engine's or the caller's."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from lmcache_sdk import (
    KVLayout,
    LayoutError,
    NotRegisteredError,
    UnknownLayoutError,
    UnsupportedError,
)
from lmcache_sdk import protocol as p
from tests.facade.rig import CHUNK, LAYOUT, MODEL, TOKENS, Rig, kv, status_entry
from tests.fix_fake_server import NOTHING
from tests.fix_faults import wrong_opcode
from tests.session.pages import status_page

pytestmark = pytest.mark.usefixtures("hasty")

MLA: Final = KVLayout(num_layers=2, dtype=torch.float32, head_dim=8, is_mla=True)


# ---- the model -------------------------------------------------------------------------------------------------------


def test_an_unknown_model_is_refused_with_those_there_are(rig: Rig) -> None:
    rig.engines["8"] = {**status_entry(), "model_name": "another/model"}
    with pytest.raises(NotRegisteredError, match=r"'another/model', 'org/model'.*layout=KVLayout") as caught:
        rig.connect(model_name="org/modle")
    assert caught.value.registered_models == ("another/model", MODEL)
    assert rig.server.requests == []


def test_no_model_at_all(rig: Rig) -> None:
    rig.engines.clear()
    with pytest.raises(NotRegisteredError, match=r"registered: none"):
        rig.connect()


@pytest.mark.parametrize("world_size", [2, 8])
def test_a_model_cut_into_shards_is_refused(rig: Rig, world_size: int) -> None:
    rig.engines["8"] = {**status_entry(), "world_size": world_size}
    with pytest.raises(UnsupportedError, match=f"world_size {world_size}"):
        rig.connect()
    rig.engines.clear()
    rig.http.pages["/status"] = status_page(
        non_cuda_context_meta={"9": {"model_name": MODEL, "world_size": world_size, "block_size": 4, "use_mla": False}}
    )
    with pytest.raises(UnsupportedError, match=f"world_size {world_size}"):
        rig.connect()
    assert rig.server.requests == []


def test_several_kernel_groups_are_refused(rig: Rig) -> None:
    entry = status_entry()
    entry["kv_cache_layout"]["kernel_groups"] *= 2
    rig.engines["7"] = entry
    with pytest.raises(UnsupportedError, match="group"):
        rig.connect()
    assert rig.server.requests == []


def test_workers_that_agree_are_one_model(rig: Rig) -> None:
    rig.engines["8"] = status_entry()
    assert rig.connect().layout == LAYOUT


def test_entries_that_disagree_are_refused_with_both(rig: Rig) -> None:
    rig.engines["8"] = status_entry(dtype="torch.int32")
    with pytest.raises(LayoutError, match=r"cache_context_meta\.7.*float32.*cache_context_meta\.8.*int32"):
        rig.connect()
    assert rig.server.requests == []


def test_a_compressed_cache_is_refused(rig: Rig) -> None:
    rig.engines["7"] = status_entry(tokens_per_block=2 * CHUNK)
    with pytest.raises(UnsupportedError):
        rig.connect()


@pytest.mark.parametrize(
    "entry",
    [
        status_entry(engine_kv_format="NL_X_SOMETHING_NEW"),
        status_entry(dtype="torch.float4"),
        status_entry(engine_kv_concrete_shape="nonsense"),
        status_entry(engine_kv_concrete_shape="2 x [8, 2, 1, 4]"),
        status_entry(num_layers=0),
        {**status_entry(), "kv_cache_layout": {}},
        {**status_entry(), "kv_cache_layout": {"cache_size_per_token": 64, "kernel_groups": []}},
    ],
    ids=["format", "dtype", "shape", "rank", "layers", "empty", "no groups"],
)
def test_a_layout_that_cannot_be_decoded_prevents_storing_and_nothing_else(rig: Rig, entry: dict[str, Any]) -> None:
    """An object describes itself: what cannot be decoded prevents storing, never retrieving."""
    rig.engines["7"] = entry
    cached = rig.cache(2)
    ctx = rig.connect()
    assert ctx.layout is None
    said = rig.said()
    with pytest.raises(UnknownLayoutError, match=r"layout=KVLayout.*retrieve"):
        ctx.store(kv(), TOKENS)
    assert rig.said() == said
    found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, cached)
    assert rig.server.held() == NOTHING


def test_the_layout_of_a_retrieved_object_is_learned_for_stores(rig: Rig) -> None:
    rig.engines["7"] = status_entry(engine_kv_format="NL_X_SOMETHING_NEW")
    rig.cache(1)
    ctx = rig.connect()
    assert ctx.retrieve(TOKENS) is not None
    assert ctx.layout is not None
    assert (ctx.layout.num_layers, ctx.layout.planes, ctx.layout.hidden_dim) == (2, 2, 4)
    assert ctx.store(kv(), TOKENS)
    ctx.close()
    assert rig.server.instances == {} and rig.server.held() == NOTHING


def test_a_layout_that_cannot_be_registered_does_not_spoil_what_was_retrieved(rig: Rig) -> None:
    rig.engines["7"] = status_entry(engine_kv_format="NL_X_SOMETHING_NEW")
    cached = rig.cache(1)
    ctx = rig.connect()
    rig.server.on(p.Register, wrong_opcode)
    found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, cached) and ctx.layout is None
    assert ctx.retrieve(TOKENS) is not None and ctx.layout is not None  # the next retrieve tries again
    ctx.close()
    assert rig.server.instances == {}


def test_a_learned_layout_survives_a_reconnect(rig: Rig) -> None:
    rig.engines["7"] = status_entry(engine_kv_format="NL_X_SOMETHING_NEW")
    rig.cache(1)
    ctx = rig.connect()
    assert ctx.retrieve(TOKENS) is not None
    learned = ctx.layout
    rig.restart()
    assert ctx.retrieve(TOKENS) is None
    assert ctx.layout == learned and ctx.store(kv(), TOKENS)
    found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, kv())


def test_a_model_that_only_engine_driven_instances_hold(rig: Rig) -> None:
    rig.engines.clear()
    entry = {"9": {"model_name": MODEL, "world_size": 1, "block_size": 16, "use_mla": False}}
    rig.http.pages["/status"] = lambda: status_page(
        non_cuda_context_meta=entry, registered_non_cuda_instance_ids=[*rig.server.instances]
    )
    cached = rig.cache(3)
    ctx = rig.connect()
    assert ctx.layout is None
    with pytest.raises(UnknownLayoutError):
        ctx.store(kv(), TOKENS)
    found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, cached)
    other = rig.connect(layout=LAYOUT)
    assert other.layout == LAYOUT
    assert all(request.registration.model_name != MODEL for request in rig.server.asked(p.Register))


# ---- layout= ---------------------------------------------------------------------------------------------------------


def test_the_same_layout_is_fine(rig: Rig) -> None:
    same = KVLayout(num_layers=2, dtype=torch.float32, hidden_dim=4)
    assert rig.connect(layout=same).layout == LAYOUT


@pytest.mark.parametrize(
    "other",
    [
        KVLayout(num_layers=3, dtype=torch.float32, hidden_dim=4),
        KVLayout(num_layers=2, dtype=torch.float16, hidden_dim=4),
        KVLayout(num_layers=2, dtype=torch.float32, hidden_dim=8),
        KVLayout(num_layers=2, dtype=torch.float32, hidden_dim=4, planes=1),
        MLA,
    ],
)
def test_another_layout_than_the_engines_is_refused(rig: Rig, other: KVLayout) -> None:
    with pytest.raises(LayoutError, match=r"layout=.*was given.*engine's layout"):
        rig.connect(layout=other)
    assert rig.server.requests == []


def test_a_layout_for_an_engine_that_publishes_none_that_can_be_decoded(rig: Rig) -> None:
    rig.engines["7"] = status_entry(engine_kv_format="NL_X_SOMETHING_NEW")
    ctx = rig.connect(layout=LAYOUT)
    assert ctx.layout == LAYOUT and ctx.store(kv(), TOKENS)


def test_prewarming_registers_the_real_name_with_the_given_layout(rig: Rig) -> None:
    rig.engines.clear()
    ctx = rig.connect(layout=MLA)
    registration = rig.server.asked(p.Register)[0].registration
    assert (registration.model_name, registration.use_mla, registration.hidden_dim_size) == (MODEL, True, 8)
    assert ctx.layout == MLA
    ctx.close()
    assert rig.server.instances == {}


def test_a_compressed_layout_is_refused(rig: Rig) -> None:
    packed = KVLayout(num_layers=2, dtype=torch.float32, hidden_dim=4, tokens_per_block=16, slots_per_block=8)
    rig.engines.clear()
    with pytest.raises(UnsupportedError):
        rig.connect(layout=packed)
