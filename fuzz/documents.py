"""Target 3: any body is a document whose numbers are in bounds, or one of the errors of this library.

The first byte of an input chooses the reader (`KINDS`), the rest is the body.
"""

# ruff: noqa: SIM105  # contextlib.suppress is slower than try, and this runs millions of times

from __future__ import annotations

from typing import Final

import msgspec

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import LayoutError, RemoteProtocolError, UnsupportedError
from lmcache_sdk.layout import KVLayout
from lmcache_sdk.layout.dtypes import DTYPES

from .guard import MARKS, Violation

MAX_LEN: Final = 1536
CONFIG, STATUS, VERSION, ENTRY, LAYOUT = KINDS = range(5)
_MAX_CHUNK_SIZE: Final = 2**20
_MAX_SIZE: Final = 2**31 - 1
_DTYPES: Final = tuple(DTYPES.values())
_MODELS_READ: Final = 3


def check(data: bytes) -> None:
    """One execution."""
    if not data:
        return
    kind, body = data[0] % len(KINDS), data[1:]
    if kind < ENTRY:
        _check_body(kind, body)
        return
    try:
        value: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return
    _check_layouts(kind, value)


def _check_body(kind: int, body: bytes) -> None:
    try:
        if kind == CONFIG:
            _in_bounds("chunk_size", p.parse_config(body).mp.chunk_size, _MAX_CHUNK_SIZE)
        elif kind == VERSION:
            version = p.parse_version(body, "lmc_version")
            if p.dialect_of_server(version).release not in p.DIALECTS:
                raise Violation(version)
        else:
            status = p.parse_status(body)
            _in_bounds("chunk_size", status.chunk_size, _MAX_CHUNK_SIZE)
            _check_registries(status)
    except (RemoteProtocolError, UnsupportedError):
        pass


def _check_registries(status: p.StatusDocument) -> None:
    for model in p.registered_models(status)[:_MODELS_READ]:
        for read in (p.model_entries, p.engine_driven_entries):
            try:
                entries = read(status, model)
            except RemoteProtocolError:
                continue
            for entry in entries.values():
                _in_bounds("world_size", entry.world_size, 255)
                if entry.model_name != model:
                    raise Violation(f"an entry of {entry.model_name!r} for {model!r}")
                if isinstance(entry, p.CacheContextEntry):
                    _check_layouts(ENTRY, {"kv_cache_layout": entry.kv_cache_layout})


def _check_layouts(kind: int, value: object) -> None:
    """`parse_layout` on objects, `KVLayout.from_status` and `parse_entry` on anything."""
    try:
        if kind == LAYOUT and isinstance(value, dict):
            p.parse_layout(value, "layout")
            return
        layout = KVLayout.from_status(value)  # type: ignore[arg-type]  # anything is the point
    except (RemoteProtocolError, UnsupportedError, LayoutError):
        layout = None
    if layout is not None:
        for name in ("num_layers", "hidden_dim", "tokens_per_block", "slots_per_block"):
            _in_bounds(name, getattr(layout, name), _MAX_SIZE)
        MARKS.hit(layout.planes + 4 * (layout.is_mla + 2 * layout.is_fused) + 16 * _DTYPES.index(layout.dtype))
        if layout.planes not in (1, 2) or layout.describe() == "":
            raise Violation(repr(layout))
        return
    try:
        p.parse_entry(value, "entry")
    except RemoteProtocolError:
        pass


def _in_bounds(name: str, value: object, high: int) -> None:
    if type(value) is not int or not 1 <= value <= high:
        raise Violation(f"{name}: {value!r}")
