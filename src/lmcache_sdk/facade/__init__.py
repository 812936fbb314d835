"""A user call lives here."""

from lmcache_sdk.facade.arguments import (
    TokenSequence,
    checked_api_key,
    checked_choice,
    checked_model_name,
    checked_nbytes,
)
from lmcache_sdk.facade.connecting import TRANSPORTS, ConnectArguments, checked_layout, open_connection
from lmcache_sdk.facade.context import LMCacheKVCacheContext
from lmcache_sdk.facade.link import Link
from lmcache_sdk.facade.results import LookupResult, StoreResult
from lmcache_sdk.facade.viewing import KVView

__all__ = [
    "TRANSPORTS",
    "ConnectArguments",
    "KVView",
    "LMCacheKVCacheContext",
    "Link",
    "LookupResult",
    "StoreResult",
    "TokenSequence",
    "checked_api_key",
    "checked_choice",
    "checked_layout",
    "checked_model_name",
    "checked_nbytes",
    "open_connection",
]
