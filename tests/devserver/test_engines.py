"""Played engines: /status shows entries like the real releases', which our decoder reads as the engine's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_sdk import protocol as p
from lmcache_sdk.devserver import DevServer, PlayedEngine
from lmcache_sdk.devserver.behaviours import of_dialect
from lmcache_sdk.errors import UsageError
from lmcache_sdk.layout import KVLayout
from tests.devserver.raw import RELEASES, lookup, registration, running, tokens_of, unregister

FORMS = ("HND", "NHD", "FLASH", "MLA", "FUSED")
GOLDEN = Path(__file__).parents[1] / "golden" / "layouts"


def engine(form: str = "NHD", **numbers: Any) -> PlayedEngine:
    heads = 1 if form == "MLA" else 4
    return PlayedEngine(
        **{"model_name": "m", "num_layers": 3, "num_kv_heads": heads, "head_dim": 32, "form": form, **numbers}
    )


def shown(server: DevServer) -> list[KVLayout]:
    status = p.parse_status(json.dumps(server.status()).encode())
    return [KVLayout.from_status(status.cache_context_meta[name]) for name in status.cache_context_meta]  # type: ignore[arg-type]  # JSON


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_the_entry_decodes_to_its_numbers(release: str, form: str, dtype: torch.dtype) -> None:
    played = engine(form, dtype=dtype)
    with DevServer(speak=release, models=[played]) as server:
        (layout,) = shown(server)
    fused = form == "FUSED" and release not in ("0.5.0", "0.5.1")
    planes = 1 if fused or form == "MLA" else 2
    assert (layout.num_layers, layout.planes, layout.dtype) == (3, planes, dtype)
    assert layout.hidden_dim == (32 if form == "MLA" else 4 * 32 * (2 if fused else 1))
    assert (layout.is_mla, layout.is_fused) == (form == "MLA", fused)
    assert (layout.tokens_per_block, layout.slots_per_block) == (16, 16)
    expected = played.stored_shape(of_dialect(p.dialect_named(release)), 256)
    assert layout.chunk_shape(256) == expected.shape


@pytest.mark.parametrize("release", ["0.5.1", "0.5.3", "0.5.6", "0.5.7rc2"])
def test_the_entries_have_the_fields_of_the_real_ones(release: str) -> None:
    behaviour = of_dialect(p.dialect_named(release))
    cases = json.loads((GOLDEN / f"status-{release}-cuda.json").read_text())["cases"]
    real: dict[tuple[str, str], Any] = {}
    for case in cases:
        layout = case["status_entry"]["kv_cache_layout"]
        for group in layout["kernel_groups"]:
            real[group["engine_kv_format"], group["engine_kv_shape"]] = (layout, group)
    compared = 0
    for form in FORMS:
        mine: Any = engine(form).entry(behaviour)["kv_cache_layout"]
        (group,) = mine["kernel_groups"]
        name = group["engine_kv_format"], group["engine_kv_shape"]
        assert name in real, name
        layout, other = real[name]
        assert list(mine) == list(layout)
        assert list(group) == list(other)
        assert group["engine_kv_concrete_shape"].startswith("Unknown") is other["engine_kv_concrete_shape"].startswith(
            "Unknown"
        )
        assert group["is_mla"] is other["is_mla"]
        compared += 1
    assert compared == len(FORMS)


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(num_layers=3, num_kv_heads=4, head_dim=32, dtype=torch.bfloat16),
        KVLayout(num_layers=3, head_dim=64, dtype=torch.float16, is_mla=True),
        KVLayout(num_layers=3, num_kv_heads=4, head_dim=32, dtype=torch.float32, is_fused=True, tokens_per_block=32),
    ],
    ids=lambda layout: layout.describe(),
)
def test_a_layout_is_played_as_it_is(layout: KVLayout) -> None:
    with DevServer(models=[PlayedEngine.from_layout("m", layout)]) as server:
        (found,) = shown(server)
        assert found.chunk_shape(256) == layout.chunk_shape(256)
        assert (found.dtype, found.is_mla, found.is_fused) == (layout.dtype, layout.is_mla, layout.is_fused)


def test_an_entry_is_shown_as_it_stands() -> None:
    entry = {"model_name": "odd", "world_size": 2, "kv_cache_layout": {"nonsense": [1, "two"]}}
    with DevServer(models=[PlayedEngine.from_status(entry)]) as server:
        assert server.status()["cache_context_meta"] == {"7": entry}
        assert server.status()["registered_gpu_ids"] == [7]


@pytest.mark.parametrize(
    "wrong",
    [{"num_layers": 0}, {"head_dim": -1}, {"world_size": 0}, {"form": "MLA", "num_kv_heads": 2}, {"form": "XYZ"}],
    ids=str,
)
def test_what_no_engine_is(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        engine(**wrong)
    with pytest.raises(UsageError):
        PlayedEngine.from_status({"world_size": 1})
    with pytest.raises(UsageError):
        PlayedEngine.from_layout("m", KVLayout(num_layers=1, hidden_dim=8, dtype=torch.float32, planes=2))


def test_an_engine_is_a_layout_for_lookups_until_it_is_dropped() -> None:
    with running() as (server, client):
        client.call(registration(1, model="private"))
        client.call(lookup(tokens_of(0), "before"))
        assert server.held().sessions == 0, "no layout, no session"
        first, second = server.register_engine(engine()), server.register_engine(engine("HND"))
        assert first != second
        client.call(lookup(tokens_of(0), "between"))
        assert server.held().sessions == 1
        client.call(unregister(1))
        server.drop_engine("other")
        server.drop_engine("m")
        assert server.status()["cache_context_meta"] == {}
        client.call(lookup(tokens_of(0), "after"))
        assert server.held().sessions == 1
        assert server.held().registrations == set()
