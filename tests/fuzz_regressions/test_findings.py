"""What fuzzing found, minimised, each held by a test of its own. docs/fuzzing.md tells their story."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.layout import KVLayout

MANY = 20_000


@pytest.mark.parametrize(
    "groups",
    [[{}] * MANY, "a" * MANY, [1] * MANY, {str(number): 1 for number in range(MANY)}, [{}] * 1024, [[]] * 1024],
    ids=["objects", "text", "numbers", "a map", "as many as are allowed", "lists"],
)
def test_z1_wrong_kernel_groups_cost_no_error_each(groups: object) -> None:
    """20000 empty groups (60 KB of JSON) took 2 s and 200 MB: an exception for every field of every one."""
    entry = {"kv_cache_layout": {"cache_size_per_token": 1, "kernel_groups": groups}}
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(RemoteProtocolError, match="kernel_groups"):
            KVLayout.from_status(entry)
        spent, peak = time.thread_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert spent < 0.5


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def _version(body: bytes) -> None:
    p.parse_version(body, "lmc_version")


READERS: list[Callable[[bytes], object]] = [
    _version,
    p.parse_config,
    p.parse_status,
    lambda inner: p.parse_config(b'{"mp":' + inner + b"}"),
    lambda inner: p.parse_config(b'{"mp":{"chunk_size":' + inner + b"}}"),
    lambda inner: p.parse_status(b'{"chunk_size":' + inner + b"}"),
]


@pytest.mark.parametrize("reader", range(len(READERS)))
def test_z2_no_depth_of_nesting_has_another_error(reader: int) -> None:
    """One depth was shallow enough to be decoded and too deep to be shown."""
    for depth in range(1, 1100):
        with pytest.raises(RemoteProtocolError):
            READERS[reader](_nested(depth))
