"""A user call lives here."""

from lmcache_sdk.facade.arguments import (
    TokenSequence,
    checked_api_key,
    checked_choice,
    checked_model_name,
)
from lmcache_sdk.facade.connecting import TRANSPORTS, ConnectArguments, checked_layout, open_connection
from lmcache_sdk.facade.context import LMCacheKVCacheContext
from lmcache_sdk.facade.link import Link
from lmcache_sdk.facade.results import LookupResult, StoreResult

__all__ = [
    "TRANSPORTS",
    "ConnectArguments",
    "LMCacheKVCacheContext",
    "Link",
    "LookupResult",
    "StoreResult",
    "TokenSequence",
    "checked_api_key",
    "checked_choice",
    "checked_layout",
    "checked_model_name",
    "open_connection",
]
