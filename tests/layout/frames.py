"""Frames with inline payloads, as a client makes them."""

from __future__ import annotations

import torch

from lmcache_sdk.layout import KVLayout, payload_frame_nbytes, write_payload_into
from lmcache_sdk.protocol import PayloadForm


def frame_of(
    kv: torch.Tensor, layout: KVLayout, chunk_size: int, first_chunk: int, num_chunks: int, form: PayloadForm
) -> bytearray:
    """The frame that carries some chunks: a MessagePack bin header, then the payload."""
    frame = bytearray(payload_frame_nbytes(layout, chunk_size, num_chunks, form))
    write_payload_into(memoryview(frame), kv, layout, chunk_size, first_chunk, num_chunks, form)
    return frame
