"""Inline tensor bytes in and out, by the layout layer's own parser and writer: nothing is ever deserialised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lmcache_sdk.devserver.sessions import RefusedError
from lmcache_sdk.errors import KVCacheSDKError
from lmcache_sdk.layout import payload_of_tensors, read_stored_payload
from lmcache_sdk.protocol import Buffer, PayloadForm

MAX_INLINE_NBYTES: Final = 2**34
"""The envelope's own limit (PROTOCOL.md section 4.2)."""


def read_chunks(data: Buffer, form: PayloadForm) -> list[torch.Tensor]:
    """The tensors that a client sent; refused when they are anything else."""
    try:
        return read_stored_payload(memoryview(data), form, max_nbytes=MAX_INLINE_NBYTES)
    except KVCacheSDKError as error:
        raise RefusedError(f"inline data: {error}") from error


def write_chunks(chunks: Sequence[torch.Tensor], form: PayloadForm) -> bytes | bytearray:
    """The payload that a reply carries."""
    return payload_of_tensors(chunks, form)
