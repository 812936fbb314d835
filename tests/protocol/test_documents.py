"""HTTP bodies: what is read, what is ignored, and that every refusal names the path of the field that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import RemoteProtocolError

GROUP: Final = {
    "kernel_group_idx": 0,
    "num_layers": 8,
    "tokens_per_block": 16,
    "slots_per_block": 16,
    "dtype": "torch.bfloat16",
    "engine_kv_concrete_shape": "8 x [64, 2, 4, 16, 8]",
    "engine_kv_format": "NL_X_NB_TWO_NH_BS_HS",
    "is_mla": False,
}
LAYOUT: Final = {"num_layers": 8, "num_blocks": 64, "cache_size_per_token": 1024, "kernel_groups": [GROUP]}
ENTRY: Final = {"model_name": "m", "world_size": 1, "kv_cache_layout": LAYOUT}
STATUS: Final[dict[str, Any]] = {
    "is_healthy": True,
    "chunk_size": 256,
    "active_sessions": 3,
    "storage_manager": {
        "l1_manager": {
            "total_object_count": 4,
            "write_locked_count": 1,
            "read_locked_count": 2,
            "memory_used_bytes": 4096,
            "memory_total_bytes": 2**30,
            "write_ttl_seconds": 600.0,
            "read_ttl_seconds": 300,
        }
    },
    "cache_context_meta": {"7": ENTRY},
    "non_cuda_context_meta": {"9": {"model_name": "cpu", "world_size": 1, "block_size": 16, "use_mla": False}},
    "registered_non_cuda_instance_ids": [9],
}
CONFIG: Final[dict[str, Any]] = {
    "mp": {
        "chunk_size": 256,
        "supported_transfer_mode": "auto",
        "transport": "zmq",
        "shm_name": None,
        "instance_id": "abc",
        "port": 5555,
        "hash_algorithm": "blake3",
    },
    "storage_manager": {},
}


def body(document: object) -> bytes:
    return json.dumps(document).encode()


def edited(document: dict[str, Any], path: str, new: object = ...) -> dict[str, Any]:
    """A deep copy with the value at a dotted path replaced, or removed."""
    copied: dict[str, Any] = json.loads(json.dumps(document))
    *way, last = path.split(".")
    place: Any = copied
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if new is ...:
        del place[last]
    else:
        place[last] = new
    return copied


def refusal(call: Callable[[], object]) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        call()
    assert caught.value.path
    assert str(caught.value).startswith(caught.value.path), str(caught.value)
    return caught.value


def refused_at(call: Callable[[], object]) -> str:
    """The path of the refusal; "" when there is none."""
    with suppress(RemoteProtocolError):
        call()
        return ""
    return refusal(call).path


# ---- /status ---------------------------------------------------------------------------------------------------------


def test_status_is_read() -> None:
    status = p.parse_status(body(STATUS))
    assert (status.chunk_size, status.active_sessions, status.registered_non_cuda_instance_ids) == (256, 3, [9])
    l1 = status.storage_manager.l1_manager
    assert (l1.write_ttl_seconds, l1.read_ttl_seconds, l1.memory_total_bytes) == (600.0, 300, 2**30)


def test_what_a_client_can_do_without_may_be_missing() -> None:
    status = p.parse_status(b'{"chunk_size": 16}')
    assert status.cache_context_meta == {} and status.registered_non_cuda_instance_ids is None
    assert status.storage_manager.l1_manager.read_ttl_seconds is None


def test_unknown_fields_are_ignored() -> None:
    assert p.parse_status(body({**STATUS, "new_in_0.6": {"x": [1]}})).chunk_size == 256


STATUS_WRONGS: Final[list[tuple[str, object, str]]] = [
    ("chunk_size", ..., "status.chunk_size"),
    ("chunk_size", None, "status.chunk_size"),
    ("chunk_size", "256", "status.chunk_size"),
    ("chunk_size", 256.0, "status.chunk_size"),
    ("chunk_size", True, "status.chunk_size"),
    ("chunk_size", 0, "status.chunk_size"),
    ("chunk_size", -1, "status.chunk_size"),
    ("chunk_size", 2**40, "status.chunk_size"),
    ("chunk_size", 10**30, "status.chunk_size"),
    ("is_healthy", 10**300, "status.is_healthy"),
    ("is_healthy", "yes", "status.is_healthy"),
    ("active_sessions", [], "status.active_sessions"),
    ("cache_context_meta", [], "status.cache_context_meta"),
    ("cache_context_meta", None, "status.cache_context_meta"),
    ("non_cuda_context_meta", "x", "status.non_cuda_context_meta"),
    ("registered_non_cuda_instance_ids", {}, "status.registered_non_cuda_instance_ids"),
    ("storage_manager", None, "status.storage_manager"),
    ("storage_manager", [1], "status.storage_manager"),
    ("storage_manager.l1_manager", 5, "status.storage_manager.l1_manager"),
    ("storage_manager.l1_manager", "x", "status.storage_manager.l1_manager"),
    ("storage_manager.l1_manager.write_ttl_seconds", "600", "status.storage_manager.l1_manager.write_ttl_seconds"),
    ("storage_manager.l1_manager.read_ttl_seconds", True, "status.storage_manager.l1_manager.read_ttl_seconds"),
    ("storage_manager.l1_manager.memory_total_bytes", 1.5, "status.storage_manager.l1_manager.memory_total_bytes"),
]


@pytest.mark.parametrize(("path", "new", "expected"), STATUS_WRONGS)
def test_status_refusal_names_the_field(path: str, new: object, expected: str) -> None:
    error = refusal(lambda: p.parse_status(body(edited(STATUS, path, new))))
    assert error.path.startswith(expected)


@pytest.mark.parametrize(
    "wrong", [b"", b"null", b"[]", b"[1]", b'"x"', b"1", b"<html>busy</html>", b"{", b"\xff", b"{}x", b"[" * 100_000]
)
@pytest.mark.parametrize("parse", [p.parse_status, p.parse_config])
def test_other_bodies_are_refused(parse: Callable[[bytes], object], wrong: bytes) -> None:
    error = refusal(lambda: parse(wrong))
    assert error.path in ("status", "config")
    assert len(str(error)) < 400


# ---- entries ---------------------------------------------------------------------------------------------------------


def test_entries_of_a_model_are_found_by_name() -> None:
    status = p.parse_status(body(STATUS))
    entries = p.model_entries(status, "m")
    assert list(entries) == ["status.cache_context_meta.7"]
    assert entries["status.cache_context_meta.7"].world_size == 1
    assert p.model_entries(status, "cpu") == {} and p.model_entries(status, "other") == {}
    assert list(p.engine_driven_entries(status, "cpu")) == ["status.non_cuda_context_meta.9"]
    assert p.registered_models(status) == ("cpu", "m")


@pytest.mark.parametrize("strange", [None, 5, "x", [], {}, {"model_name": 5}, {"model_name": "other"}])
def test_a_strange_entry_of_another_model_keeps_nobody_from_connecting(strange: object) -> None:
    document = {**STATUS, "cache_context_meta": {"1": strange, "7": ENTRY}, "non_cuda_context_meta": {"2": strange}}
    status = p.parse_status(body(document))
    assert list(p.model_entries(status, "m")) == ["status.cache_context_meta.7"]
    assert p.engine_driven_entries(status, "m") == {}
    assert "m" in p.registered_models(status)


@pytest.mark.parametrize(
    ("path", "new", "expected"),
    [
        ("world_size", ..., "world_size"),
        ("world_size", 0, "world_size"),
        ("world_size", 256, "world_size"),
        ("world_size", "1", "world_size"),
    ],
)
def test_entry_refusal_names_the_field(path: str, new: object, expected: str) -> None:
    document = {**STATUS, "cache_context_meta": {"7": edited(ENTRY, path, new)}}
    status = p.parse_status(body(document))
    error = refusal(lambda: p.model_entries(status, "m"))
    assert error.path == f"status.cache_context_meta.7.{expected}"


@pytest.mark.parametrize(
    ("path", "new"), [("world_size", ...), ("world_size", -1), ("block_size", "16"), ("use_mla", 1)]
)
def test_engine_driven_refusal_names_the_field(path: str, new: object) -> None:
    entry = edited({"model_name": "m", "world_size": 1, "block_size": 16, "use_mla": False}, path, new)
    status = p.parse_status(body({**STATUS, "non_cuda_context_meta": {"9": entry}}))
    assert refusal(lambda: p.engine_driven_entries(status, "m")).path == f"status.non_cuda_context_meta.9.{path}"


@pytest.mark.parametrize("layout", [..., None, [], "x", {}])
def test_a_layout_stays_raw_until_somebody_needs_it(layout: object) -> None:
    """What cannot be decoded prevents storing, never retrieving: the entry itself is good."""
    entry = edited(ENTRY, "kv_cache_layout", layout)
    status = p.parse_status(body({**STATUS, "cache_context_meta": {"7": entry}}))
    found = p.model_entries(status, "m")["status.cache_context_meta.7"]
    assert found.kv_cache_layout == (None if layout is ... else layout)
    assert refused_at(lambda: p.parse_layout(found.kv_cache_layout, "at")).startswith("at")


@pytest.mark.parametrize(
    ("path", "new", "expected"),
    [
        ("cache_size_per_token", ..., "at.cache_size_per_token"),
        ("cache_size_per_token", 1.5, "at.cache_size_per_token"),
        ("kernel_groups", ..., "at.kernel_groups"),
        ("kernel_groups", None, "at.kernel_groups"),
        ("kernel_groups", [], "at.kernel_groups"),
        ("kernel_groups", [GROUP] * 1025, "at.kernel_groups"),
        ("kernel_groups", [GROUP, 5], "at.kernel_groups[1]"),
        ("kernel_groups.0.dtype", ..., "at.kernel_groups[0].dtype"),
        ("kernel_groups.0.dtype", 5, "at.kernel_groups[0].dtype"),
        ("kernel_groups.0.num_layers", "8", "at.kernel_groups[0].num_layers"),
        ("kernel_groups.0.is_mla", 0, "at.kernel_groups[0].is_mla"),
        ("kernel_groups.0.engine_kv_format", None, "at.kernel_groups[0].engine_kv_format"),
    ],
)
def test_layout_refusal_names_the_field(path: str, new: object, expected: str) -> None:
    error = refusal(lambda: p.parse_layout(edited(LAYOUT, path, new), "at"))
    assert error.path.startswith(expected)


def test_layout_is_read() -> None:
    group = p.parse_layout(LAYOUT, "at").kernel_groups[0]
    assert (group.num_layers, group.dtype, group.engine_kv_format) == (8, "torch.bfloat16", "NL_X_NB_TWO_NH_BS_HS")


# ---- /config and the version -----------------------------------------------------------------------------------------


def test_config_is_read() -> None:
    mp = p.parse_config(body(CONFIG)).mp
    assert (mp.chunk_size, mp.supported_transfer_mode, mp.transport, mp.shm_name) == (256, "auto", "zmq", None)
    assert (mp.instance_id, mp.port) == ("abc", 5555)


def test_a_release_before_0_5_5_does_not_name_its_transport() -> None:
    assert p.parse_config(body(edited(CONFIG, "mp.transport"))).mp.transport == "zmq"


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("mp", ...),
        ("mp", []),
        ("mp", None),
        ("mp.chunk_size", ...),
        *(("mp.chunk_size", new) for new in (0, -5, "abc", None, 1.0, True, 2**50)),
        ("mp.supported_transfer_mode", ...),
        ("mp.supported_transfer_mode", None),
        ("mp.transport", 5),
        ("mp.shm_name", 0),
        ("mp.port", "5555"),
        ("mp.instance_id", [1]),
    ],
)
def test_config_refusal_names_the_field(path: str, new: object) -> None:
    error = refusal(lambda: p.parse_config(body(edited(CONFIG, path, new))))
    assert error.path.startswith(f"config.{path}")


@pytest.mark.parametrize("version", ["0.5.6", "", "0.5.6-g3e11e108", "NA"])
def test_version_is_a_json_string(version: str) -> None:
    assert p.parse_version(body(version), "lmc_version") == version


@pytest.mark.parametrize("wrong", [b"0.5.6", b"null", b"56", b'{"version": "0.5.6"}', b'["0.5.6"]', b"", b"<html>"])
def test_other_versions_are_refused(wrong: bytes) -> None:
    assert refusal(lambda: p.parse_version(wrong, "lmc_version")).path == "lmc_version"


def test_an_endless_version_is_not_repeated_in_full() -> None:
    error = refusal(lambda: p.parse_version(body("9" * 10_000), "version"))
    assert len(str(error)) < 400


# ---- any JSON --------------------------------------------------------------------------------------------------------

KEYS: Final = st.sampled_from([*STATUS, *CONFIG["mp"], "mp", *ENTRY, *LAYOUT, *GROUP, "l1_manager", "7"])
JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=6),
    max_leaves=15,
)
PARSERS: Final = [
    p.parse_status,
    p.parse_config,
    lambda text: p.parse_version(text, "version"),
]


@given(st.sampled_from(PARSERS), JSON)
@settings(max_examples=100)
def test_any_json_is_a_document_or_refused(parse: Callable[[bytes], object], document: object) -> None:
    with suppress(RemoteProtocolError):
        parse(body(document))


@given(st.sampled_from(PARSERS), st.binary(max_size=100))
def test_any_body_is_a_document_or_refused(parse: Callable[[bytes], object], text: bytes) -> None:
    with suppress(RemoteProtocolError):
        parse(text)


@given(st.sampled_from(["cache_context_meta", "non_cuda_context_meta"]), JSON)
@settings(max_examples=100)
def test_any_entry_is_read_or_refused_with_its_path(registry: str, entry: object) -> None:
    if isinstance(entry, dict):
        entry = {**entry, "model_name": "m"}
    status = p.parse_status(body({"chunk_size": 16, registry: {"7": entry}}))
    for read in (p.model_entries, p.engine_driven_entries):
        where = refused_at(partial(read, status, "m"))
        assert where == "" or where.startswith(f"status.{registry}.7")


@given(JSON)
@settings(max_examples=100)
def test_any_layout_is_read_or_refused_with_its_path(layout: object) -> None:
    if isinstance(layout, dict):
        where = refused_at(lambda: p.parse_layout({**LAYOUT, **layout}, "at"))
        assert where == "" or where.startswith("at")


@given(st.sampled_from([path for path, _, _ in STATUS_WRONGS]), JSON)
@settings(max_examples=100)
def test_one_wrong_field_of_a_good_status(path: str, new: object) -> None:
    where = refused_at(lambda: p.parse_status(body(edited(STATUS, path, new))))
    assert where == "" or where.startswith("status.")
