"""HTTP JSON bodies -> attrs documents: what the server said, as it said it.

Takes the body's bytes; returns a document or raises `RemoteProtocolError` with the path of the field that is wrong,
such as `status.cache_context_meta.7.kv_cache_layout.kernel_groups[0].dtype`. Unknown fields are ignored, missing
required ones are errors, nothing is converted (a server that says "256" where a number belongs is wrong, not
generous).

Entries of other models stay raw until somebody asks for them: one engine's strange entry must not keep the others
from connecting. Paths and field names: PROTOCOL.md section 10, read from servers 0.5.0 to 0.5.7rc2.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

import attrs
import cattrs
import msgspec
from cattrs.errors import BaseValidationError, ClassValidationError, IterableValidationError
from cattrs.gen import make_dict_structure_fn

from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.values import PRIVATE_MODEL_PREFIX

T = TypeVar("T")
JsonObject = Mapping[str, object]

MAX_KERNEL_GROUPS: Final = 1024
MAX_CHUNK_SIZE: Final = 2**20
"""No release allows anything near it; it bounds what a wrong /config can make us compute with."""
_MAX_SHOWN: Final = 120


@attrs.frozen
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


@attrs.frozen
class ConfigDocument:
    """`/config`, as far as a client needs it."""

    mp: McpConfig


@attrs.frozen
class L1Status:
    """`/status.storage_manager.l1_manager`: the pool's counters and the time-to-live of its locks, in seconds."""

    total_object_count: int = 0
    write_locked_count: int = 0
    read_locked_count: int = 0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    write_ttl_seconds: float | None = None
    read_ttl_seconds: float | None = None


@attrs.frozen
class StorageStatus:
    """`/status.storage_manager`."""

    l1_manager: L1Status = L1Status()


@attrs.frozen
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


@attrs.frozen
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


@attrs.frozen
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
    config = _structure(_load_object(body, "config"), ConfigDocument, "config")
    _check_range(config.mp.chunk_size, "config.mp.chunk_size", 1, MAX_CHUNK_SIZE)
    return config


def parse_status(body: bytes) -> StatusDocument:
    """Reads the body of GET /status."""
    status = _structure(_load_object(body, "status"), StatusDocument, "status")
    _check_range(status.chunk_size, "status.chunk_size", 1, MAX_CHUNK_SIZE)
    return status


def parse_version(body: bytes, path: str) -> str:
    """Reads the body of GET /lmc_version or /version: a JSON string."""
    version = _load(body, path)
    if not isinstance(version, str) or len(version) > _MAX_SHOWN:
        raise RemoteProtocolError(f"{path}: expected a JSON string, got {_show(version)}", path=path)
    return version


def parse_layout(layout: object, path: str) -> KVCacheLayoutDocument:
    """Reads one `kv_cache_layout`; `path` says where it stood.

    Groups are counted before any is read, and read one by one up to the first wrong one: an error for each of a million
    would cost thousands of times the bytes that came.
    """
    head = _structure(layout, _LayoutHead, path)
    where = f"{path}.kernel_groups"
    if not 1 <= len(head.kernel_groups) <= MAX_KERNEL_GROUPS:
        raise RemoteProtocolError(
            f"{where}: expected 1 to {MAX_KERNEL_GROUPS}, got {len(head.kernel_groups)}", path=where
        )
    groups = [
        _structure(group, KernelGroupDocument, f"{where}[{index}]") for index, group in enumerate(head.kernel_groups)
    ]
    return KVCacheLayoutDocument(head.cache_size_per_token, groups)


def parse_entry(entry: object, path: str) -> CacheContextEntry:
    """Reads one value of `cache_context_meta`."""
    found = _structure(entry, CacheContextEntry, path)
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
            found[path] = _structure(entry, EngineDrivenEntry, path)
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
        shown = _show(bytes(body[:_MAX_SHOWN]))
        raise RemoteProtocolError(f"{path}: the body is not JSON: {shown}", path=path) from error
    return loaded


def _load_object(body: bytes, path: str) -> JsonObject:
    loaded = _load(body, path)
    if not isinstance(loaded, dict):
        raise RemoteProtocolError(f"{path}: expected a JSON object, got {_show(loaded)}", path=path)
    return loaded


def _structure(value: object, document: type[T], path: str) -> T:
    try:
        return _CONVERTER.structure(value, document)
    except (BaseValidationError, KeyError, TypeError, ValueError, AttributeError) as error:
        where, problem = _first_problem(error, path)
        raise RemoteProtocolError(f"{where}: {problem}", path=where) from error


def _first_problem(error: BaseException, path: str) -> tuple[str, str]:
    """The path and words of the first leaf of cattrs' tree of errors."""
    if isinstance(error, ClassValidationError):
        noted, bare = error.group_exceptions()
        if noted:
            return _first_problem(noted[0][0], f"{path}.{noted[0][1].name}")
        return _first_problem(bare[0], path)
    if isinstance(error, IterableValidationError):
        items, loose = error.group_exceptions()
        if items:
            index = items[0][1].index
            step = f"[{index}]" if isinstance(index, int) else f".{index}"
            return _first_problem(items[0][0], f"{path}{step}")
        return _first_problem(loose[0], path)
    if isinstance(error, KeyError):
        return (path if path.endswith(f".{error.args[0]}") else f"{path}.{error.args[0]}"), "missing"
    return path, str(error)


def _check_range(value: int, path: str, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RemoteProtocolError(f"{path}: expected {low} to {high}, got {value}", path=path)


def _show(value: object) -> str:
    """A scalar as text, cut; of what may be large or deep only the type."""
    if isinstance(value, (str, bytes)):
        return repr(value[:_MAX_SHOWN]) + ("…" if len(value) > _MAX_SHOWN else "")
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, dict)) else type(value).__name__


def _exactly(kind: type, *also: type) -> Callable[[object, object], object]:
    """A structure hook that takes instances of `kind` as they are and refuses the rest, bool for int included."""

    def check(value: object, _: object) -> object:
        if isinstance(value, (kind, *also)) and (kind is bool or not isinstance(value, bool)):
            return value
        raise TypeError(f"expected {kind.__name__}, got {_show(value)}")

    return check


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    for kind, also in ((str, ()), (int, ()), (bool, ()), (float, (int,))):
        converter.register_structure_hook(kind, _exactly(kind, *also))
    raw = (
        (str | int | None, (str, int, type(None))),
        (dict[str, object], (dict,)),
        (list[object] | None, (list, type(None))),
        (list[object], (list,)),
        (object, (object,)),
    )
    for shape, kinds in (*raw, (dict[str, object] | None, (dict, type(None)))):
        converter.register_structure_hook_func(partial(operator.eq, shape), _exactly(*kinds))
    converter.register_structure_hook_factory(attrs.has, partial(_from_object_only, converter))
    return converter


def _from_object_only(converter: cattrs.Converter, document: type[T]) -> Callable[[object, object], T]:
    """A document is made of a JSON object: where every field is optional, cattrs alone would take a list for an empty
    one.
    """
    structure = make_dict_structure_fn(document, converter)

    def check(value: object, kind: object) -> T:
        if not isinstance(value, dict):
            raise TypeError(f"expected a JSON object, got {_show(value)}")
        return structure(value, kind)

    return check


_CONVERTER: Final = _make_converter()
