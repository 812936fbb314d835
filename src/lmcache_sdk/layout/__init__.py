"""A shape lives here: dtypes, axes, geometry, chunks, views, inline payloads. Torch and arithmetic; no I/O, no lock."""

from lmcache_sdk.layout.axes import HIDDEN, KV, LAYER, TOKEN
from lmcache_sdk.layout.blobs import (
    max_chunks_per_payload,
    payload_frame_nbytes,
    payload_of_tensors,
    read_payload,
    read_stored_payload,
    write_payload_into,
)
from lmcache_sdk.layout.chunking import batches, consecutive, tail_tokens, whole_chunks
from lmcache_sdk.layout.dtypes import dtype_from_name, dtype_name, itemsize
from lmcache_sdk.layout.geometry import KVLayout, check_uncompressed, layout_from_document, layout_from_object
from lmcache_sdk.layout.packing import check_kv, check_out, copied, new_result, pack, pack_chunk, unpack
from lmcache_sdk.layout.views import as_chunk, check_disjoint, slot_runs

__all__ = [
    "HIDDEN",
    "KV",
    "LAYER",
    "TOKEN",
    "KVLayout",
    "as_chunk",
    "batches",
    "check_disjoint",
    "check_kv",
    "check_out",
    "check_uncompressed",
    "consecutive",
    "copied",
    "dtype_from_name",
    "dtype_name",
    "itemsize",
    "layout_from_document",
    "layout_from_object",
    "max_chunks_per_payload",
    "new_result",
    "pack",
    "pack_chunk",
    "payload_frame_nbytes",
    "payload_of_tensors",
    "read_payload",
    "read_stored_payload",
    "slot_runs",
    "tail_tokens",
    "unpack",
    "whole_chunks",
    "write_payload_into",
]
