"""HTTP JSON bodies -> attrs documents: what the server said, as it said it.

Takes the body's bytes; returns a document or raises `RemoteProtocolError` with the path of the field that is wrong,
such as `status.cache_context_meta.7.kv_cache_layout.kernel_groups[0].dtype`. Unknown fields are ignored, missing
required ones are errors, nothing is converted (a server that says "256" where a number belongs is wrong, not
generous).

Entries of other models stay raw until somebody asks for them: one engine's strange entry must not keep the others
from connecting. Paths and field names: PROTOCOL.md section 10, read from servers 0.5.0 to 0.5.7rc2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import attrs
import msgspec

from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.protocol.showing import MAX_SHOWN, show
from lmcache_sdk.protocol.structuring import structured
from lmcache_sdk.values import PRIVATE_MODEL_PREFIX

T = TypeVar("T")
JsonObject = Mapping[str, object]

MAX_KERNEL_GROUPS: Final = 1024
MAX_CHUNK_SIZE: Final = 2**20
"""No release allows anything near it; it bounds what a wrong /config can make us compute with."""


@attrs.frozen(eq=False, repr=False)
class McpConfig:
    """`/config` (0.5.0: `/conf`), the part under `mp`: how the message server was started."""

    chunk_size: int
    supported_transfer_mode: str
    transport: str = "zmq"
    shm_name: str | None = None
    instance_id: str | int | None = None
    port: int | None = None
    worker_registration_grace_seconds: float | None = None
    """How long an instance that never pinged may be silent before the server forgets it."""
    max_cpu_workers: int | None = None
    """Threads that handle lookups; with one of them they are handled in the order in which they were sent."""


@attrs.frozen(eq=False, repr=False)
class ConfigDocument:
    """`/config`, as far as a client needs it."""

    mp: McpConfig


@attrs.frozen(eq=False, repr=False)
class L1Status:
    """`/status.storage_manager.l1_manager`: the pool's counters and the time-to-live of its locks, in seconds."""

    total_object_count: int = 0
    write_locked_count: int = 0
    read_locked_count: int = 0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    write_ttl_seconds: float | None = None
    read_ttl_seconds: float | None = None


@attrs.frozen(eq=False, repr=False)
class StorageStatus:
    """`/status.storage_manager`."""

    l1_manager: L1Status = L1Status()


@attrs.frozen(eq=False, repr=False)
class StatusDocument:
    """`/status`. The registries stay raw; `model_entries` and `engine_driven_entries` read the entries of one model."""

    chunk_size: int
    is_healthy: bool = True
    active_sessions: int = 0
    active_prefetch_jobs: int = 0
    storage_manager: StorageStatus = StorageStatus()
    cache_context_meta: dict[str, object] = attrs.field(factory=dict)
    non_cuda_context_meta: dict[str, object] = attrs.field(factory=dict)
    registered_non_cuda_instance_ids: list[object] | None = None
    worker_liveness: dict[str, object] | None = None


@attrs.frozen
class CacheContextEntry:
    """One worker of an engine in `/status.cache_context_meta`; `kv_cache_layout` is read by `parse_layout`."""

    model_name: str
    world_size: int
    kv_cache_layout: object = None
    """Read by `parse_layout` only: an odd one must not keep anybody from retrieving."""


@attrs.frozen(eq=False, repr=False)
class EngineDrivenEntry:
    """One instance in `/status.non_cuda_context_meta`: it publishes no geometry."""

    model_name: str
    world_size: int
    block_size: int = 0
    use_mla: bool = False


@attrs.frozen
class KernelGroupDocument:
    """Layers that share one tensor shape. `num_layers` here is what an object holds (LAYOUT.md section 2)."""

    num_layers: int
    tokens_per_block: int
    slots_per_block: int
    dtype: str
    engine_kv_concrete_shape: str
    engine_kv_format: str
    is_mla: bool = False
    object_group_idx: int = 0


@attrs.frozen(eq=False, repr=False)
class _LayoutHead:
    cache_size_per_token: int
    kernel_groups: list[object]


@attrs.frozen
class KVCacheLayoutDocument:
    """`kv_cache_layout` of a status entry."""

    cache_size_per_token: int
    kernel_groups: list[KernelGroupDocument]


def parse_config(body: bytes) -> ConfigDocument:
    """Reads the body of GET /config."""
    config = structured(_load_object(body, "config"), ConfigDocument, "config")
    _check_range(config.mp.chunk_size, "config.mp.chunk_size", 1, MAX_CHUNK_SIZE)
    return config


def parse_status(body: bytes) -> StatusDocument:
    """Reads the body of GET /status."""
    status = structured(_load_object(body, "status"), StatusDocument, "status")
    _check_range(status.chunk_size, "status.chunk_size", 1, MAX_CHUNK_SIZE)
    return status


def parse_version(body: bytes, path: str) -> str:
    """Reads the body of GET /lmc_version or /version: a JSON string."""
    version = _load(body, path)
    if not isinstance(version, str) or len(version) > MAX_SHOWN:
        raise RemoteProtocolError(f"{path}: expected a JSON string, got {show(version)}", path=path)
    return version


def parse_layout(layout: object, path: str) -> KVCacheLayoutDocument:
    """Reads one `kv_cache_layout`; `path` says where it stood.

    Groups are counted before any is read, and read one by one up to the first wrong one: an error for each of a million
    would cost thousands of times the bytes that came.
    """
    head = structured(layout, _LayoutHead, path)
    where = f"{path}.kernel_groups"
    if not 1 <= len(head.kernel_groups) <= MAX_KERNEL_GROUPS:
        raise RemoteProtocolError(
            f"{where}: expected 1 to {MAX_KERNEL_GROUPS}, got {len(head.kernel_groups)}", path=where
        )
    groups = [
        structured(group, KernelGroupDocument, f"{where}[{index}]") for index, group in enumerate(head.kernel_groups)
    ]
    return KVCacheLayoutDocument(head.cache_size_per_token, groups)


def parse_entry(entry: object, path: str) -> CacheContextEntry:
    """Reads one value of `cache_context_meta`."""
    found = structured(entry, CacheContextEntry, path)
    _check_range(found.world_size, f"{path}.world_size", 1, 255)
    return found


def model_entries(status: StatusDocument, model_name: str) -> dict[str, CacheContextEntry]:
    """The entries of `cache_context_meta` that name this model, by the path at which each stands."""
    found = {}
    for key, entry in status.cache_context_meta.items():
        if _model_name_of(entry) == model_name:
            path = f"status.cache_context_meta.{key}"
            found[path] = parse_entry(entry, path)
    return found


def engine_driven_entries(status: StatusDocument, model_name: str) -> dict[str, EngineDrivenEntry]:
    """The entries of `non_cuda_context_meta` that name this model, by the path at which each stands."""
    found = {}
    for key, entry in status.non_cuda_context_meta.items():
        if _model_name_of(entry) == model_name:
            path = f"status.non_cuda_context_meta.{key}"
            found[path] = structured(entry, EngineDrivenEntry, path)
            _check_range(found[path].world_size, f"{path}.world_size", 1, 255)
    return found


def registered_models(status: StatusDocument) -> tuple[str, ...]:
    """Every model name that is registered, sorted, each once; the private names of this library's clients left out."""
    entries = [*status.cache_context_meta.values(), *status.non_cuda_context_meta.values()]
    names = {name for entry in entries if (name := _model_name_of(entry)) is not None}
    return tuple(sorted(name for name in names if not name.startswith(PRIVATE_MODEL_PREFIX)))


def _model_name_of(entry: object) -> str | None:
    name = entry.get("model_name") if isinstance(entry, Mapping) else None
    return name if isinstance(name, str) else None


def _load(body: bytes, path: str) -> object:
    try:
        loaded: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        shown = show(bytes(body[:MAX_SHOWN]))
        raise RemoteProtocolError(f"{path}: the body is not JSON: {shown}", path=path) from error
    return loaded


def _load_object(body: bytes, path: str) -> JsonObject:
    loaded = _load(body, path)
    if not isinstance(loaded, dict):
        raise RemoteProtocolError(f"{path}: expected a JSON object, got {show(loaded)}", path=path)
    return loaded


def _check_range(value: int, path: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RemoteProtocolError(f"{path}: expected {low} to {high}, got {value}", path=path)
