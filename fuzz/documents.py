"""Target 3: any body is a document whose numbers are in bounds, or one of the errors of this library.

The first byte of an input chooses the endpoint (`KINDS`), the rest is the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import LayoutError, RemoteProtocolError, UnsupportedError
from lmcache_sdk.layout import KVLayout

from .guard import Violation

MAX_LEN: Final = 1536
CONFIG, STATUS, VERSION, ENTRY, LAYOUT = KINDS = range(5)
_REFUSALS: Final = (RemoteProtocolError, UnsupportedError, LayoutError)
_MAX_SIZE: Final = 2**31 - 1


def check(data: bytes) -> None:
    """One execution."""
    if not data:
        return
    kind, body = data[0] % len(KINDS), data[1:]
    try:
        if kind == CONFIG:
            config = p.parse_config(body)
            _bounded("chunk_size", config.mp.chunk_size, p.MAX_CHUNK_SIZE)
        elif kind == STATUS:
            _check_status(p.parse_status(body))
        elif kind == VERSION:
            p.dialect_of_server(p.parse_version(body, "lmc_version"))
        else:
            _check_entry(kind, msgspec.json.decode(body))
    except (*_REFUSALS, msgspec.DecodeError, RecursionError) as error:
        if not isinstance(error, _REFUSALS) and kind < ENTRY:  # there the decoding is ours, not the library's
            raise
