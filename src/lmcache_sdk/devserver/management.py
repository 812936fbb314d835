"""Registrations, CLEAR, the chunk size, and the operations that only answer."""

from __future__ import annotations

import torch

from lmcache_sdk.devserver.core import Core
from lmcache_sdk.devserver.objects import StoredShape
from lmcache_sdk.devserver.registry import Instance
from lmcache_sdk.devserver.sessions import RefusedError
from lmcache_sdk.errors import KVCacheSDKError
from lmcache_sdk.layout import dtype_from_name
from lmcache_sdk.protocol import (
    ChunkSize,
    Clear,
    Experimental,
    GetChunkSize,
    GetExperimental,
    NegotiateChunkSize,
    Noop,
    NoopAnswer,
    Ping,
    Pong,
    Register,
    Registered,
    Registration,
    Unregister,
    Void,
)


class ManagementHandlers:
    """Everything that is no lookup and no transfer."""

    def __init__(self, core: Core) -> None:
        self._core = core

    # ---- registrations -----------------------------------------------------------------------------------------------

    def register(self, request: Register) -> Registered:
        """Enters an instance and its layout; one that is known is only seen again."""
        core, told = self._core, request.registration
        with core.lock:
            if core.instances.find(told.instance_id) is None:
                instance = self._instance_of(told)
                core.instances.add(told.instance_id, instance)
                core.layouts.add(instance.layout_name, instance.layout)
            shared = bool(core.pool.shm_name)
            return Registered(shm_name=core.pool.shm_name, pool_size=core.pool.size if shared else 0)

    def _instance_of(self, told: Registration) -> Instance:
        for group in told.group_layouts:
            _dtype(group.dtype_str)
            if group.window_chunks < 0:
                raise RefusedError(f"window_chunks is negative: {group.window_chunks}")
        return Instance(
            model_name=told.model_name,
            world_size=told.world_size,
            block_size=told.block_size,
            use_mla=told.use_mla,
            layout=self._layout_of(told),
            num_groups=max(1, len(told.group_layouts)),
            last_seen=self._core.settings.clock(),
        )

    def _layout_of(self, told: Registration) -> StoredShape:
        dtype = _dtype(told.dtype_str)
        slots = told.num_physical_slots if self._core.behaviour.physical_slots else None
        if slots is not None and slots <= 0:
            raise RefusedError(f"num_physical_slots must be positive, got {slots}")
        shape = (told.num_layers, slots or self._core.chunk_size, told.hidden_dim_size)
        return StoredShape(shape if told.use_mla else (2, *shape), dtype)

    def unregister(self, request: Unregister) -> Void:
        """Takes an instance out; one that is not there is no matter."""
        with self._core.lock:
            self._core.remove_instance(request.instance_id)
        return Void()

    def ping(self, request: Ping) -> Pong:
        """Always yes; with an id it is a sign of life."""
        if request.instance_id is not None:
            with self._core.lock:
                self._core.instances.ping(request.instance_id)
        return Pong(alive=True)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def clear(self, request: Clear) -> Void:
        """Empties the pool for everybody."""
        with self._core.lock:
            self._core.objects.clear(force=request.force or not self._core.behaviour.clear_has_force)
        return Void()

    def get_chunk_size(self, request: GetChunkSize) -> ChunkSize:  # noqa: ARG002
        """The chunk size, which from 0.5.7 on nobody can raise any more after this."""
        with self._core.lock:
            self._core.chunk_size_chosen = True
            return ChunkSize(num_tokens=self._core.chunk_size)

    def negotiate(self, request: NegotiateChunkSize) -> ChunkSize:
        """Raises the chunk size to a multiple of what an engine needs, if it is still open."""
        core, alignment = self._core, request.alignment
        with core.lock:
            if alignment < 1:
                raise RefusedError(f"the alignment must be positive, got {alignment}")
            wanted = -(-core.chunk_size // alignment) * alignment
            if wanted != core.chunk_size and (core.chunk_size_chosen or len(core.sessions)):
                raise RefusedError(f"the chunk size {core.chunk_size} is no multiple of {alignment}, and it is fixed")
            core.chunk_size, core.chunk_size_chosen = wanted, True
            return ChunkSize(num_tokens=wanted)

    def noop(self, request: Noop) -> NoopAnswer:  # noqa: ARG002
        """Says that the socket loop runs."""
        return NoopAnswer(text="OK")

    def get_experimental(self, request: GetExperimental) -> Experimental:  # noqa: ARG002
        """None of the optional features is imitated."""
        return Experimental(names=())


def _dtype(name: str) -> torch.dtype:
    try:
        return dtype_from_name(name)
    except KVCacheSDKError as error:
        raise RefusedError(str(error)) from error
