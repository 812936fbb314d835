"""The JSON documents of HTTP: /config, /status, /version. Names and values are those that the releases give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lmcache_sdk.devserver.core import Core

JsonDocument = dict[str, object]

COMMITS: Final[Mapping[str, str]] = {
    "0.5.0": "g389b9cfc",
    "0.5.1": "g979719d7",
    "0.5.4": "g3e11b8ed",
    "0.5.5": "g05a013b2",
    "0.5.6": "g3e11e108",
    "0.5.7rc2": "gbf85b41f",
}
"""The build that each release's /version names; "NA" is what a source build says."""

DEFAULT_L1: Final = "_default"


def version(core: Core) -> str:
    """/version."""
    release = core.settings.speak
    return f"{release}-{COMMITS.get(release, 'NA')}"


def config(core: Core, host: str, port: int, http_port: int) -> JsonDocument:
    """/config, and /conf on 0.5.0."""
    settings = core.settings
    return {
        "mp": {"host": host, "port": port, **_mp_config(core)},
        "storage_manager": {
            "l1_manager_config": {
                "memory_config": _memory_config(core),
                "gds_l1_config": None,
                "write_ttl_seconds": settings.write_ttl,
                "read_ttl_seconds": settings.read_ttl,
            },
            "eviction_config": {
                "eviction_policy": "LRU",
                "trigger_watermark": settings.eviction_watermark,
                "eviction_ratio": settings.eviction_ratio,
            },
            "l2_adapter_config": {"adapters": []},
        },
        "observability": {"enabled": False},
        "http": {"http_host": host, "http_port": http_port},
        "coordinator": {"url": ""},
    }


def _mp_config(core: Core) -> JsonDocument:
    settings = core.settings
    document: JsonDocument = {
        "chunk_size": settings.chunk_size,
        "max_workers": 1,
        "max_gpu_workers": 1,
        "max_cpu_workers": 1,
        "hash_algorithm": "blake3",
        "engine_type": "default",
        "supported_transfer_mode": settings.supported_transfer_mode,
        "shm_name": settings.shm_name,
        "instance_id": core.server_id,
        "worker_reap_timeout_seconds": settings.reap,
        "worker_registration_grace_seconds": settings.grace,
    }
    if core.dialect.readers_required:
        document["transport"] = "zmq"
    if core.dialect.free_needs_live_session:
        document["session_ttl_seconds"] = settings.session_ttl
    return document


def _memory_config(core: Core) -> JsonDocument:
    return {
        "size_in_bytes": core.pool.size,
        "use_lazy": False,
        "init_size_in_bytes": core.pool.size,
        "align_bytes": 4096,
        "shm_name": core.pool.shm_name,
        "devdax_path": None,
        "devdax_size_in_bytes": 0,
    }


def status(core: Core) -> JsonDocument:
    """/status."""
    with core.lock:
        document: JsonDocument = {
            "is_healthy": True,
            "engine_type": "MPCacheServer",
            "chunk_size": core.chunk_size,
            "hash_algorithm": "blake3",
            "active_sessions": len(core.sessions),
            "storage_manager": _storage_manager(core),
            "active_prefetch_jobs": len(core.jobs),
            "p2p_enabled": False,
            "worker_liveness": {
                "enabled": core.instances.reap > 0,
                "reap_timeout_seconds": core.instances.reap,
                "registration_grace_seconds": core.instances.grace,
                "tracked_instances": len(core.instances) + len(core.engines),
            },
        }
        if core.settings.supported_transfer_mode != "engine_driven":
            document["registered_gpu_ids"] = list(core.engines)
            document["cache_context_meta"] = {
                str(instance_id): engine.entry(core.behaviour) for instance_id, engine in core.engines.items()
            }
        if core.settings.engine_driven:
            document["registered_non_cuda_instance_ids"] = [found for found, _ in core.instances.items()]
            document["non_cuda_context_meta"] = {
                str(instance_id): {
                    "model_name": instance.model_name,
                    "world_size": instance.world_size,
                    "block_size": instance.block_size,
                    "use_mla": instance.use_mla,
                }
                for instance_id, instance in core.instances.items()
            }
        return document


def _storage_manager(core: Core) -> JsonDocument:
    manager = _l1_manager(core)
    document: JsonDocument = {
        "is_healthy": True,
        "l1_manager": manager,
        "l1_eviction_controller": {
            "is_healthy": True,
            "thread_alive": True,
            "eviction_policy": "LRU",
            "trigger_watermark": core.settings.eviction_watermark,
            "eviction_ratio": core.settings.eviction_ratio,
        },
        "l2_adapters": [],
        "num_l2_adapters": 0,
    }
    if core.behaviour.writes_are_staged:
        document["l1_managers"] = {DEFAULT_L1: manager}
    return document


def _l1_manager(core: Core) -> JsonDocument:
    counts = core.objects.counts()
    document: JsonDocument = {
        "is_healthy": True,
        "total_object_count": counts.total,
        "write_locked_count": counts.write_locked,
        "read_locked_count": counts.read_locked,
        "temporary_count": 0,
        "memory_used_bytes": core.pool.used_nbytes,
        "memory_total_bytes": core.pool.size,
        "memory_usage_ratio": core.pool.used_nbytes / core.pool.size,
        "write_ttl_seconds": core.objects.write_ttl,
        "read_ttl_seconds": core.objects.read_ttl,
    }
    if core.behaviour.writes_are_staged:
        document["staging_object_count"] = counts.staged
        document["staging_bytes"] = counts.staged_nbytes
    return document
