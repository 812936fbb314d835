"""A process that leaves in one of several ways.

    python -m tests.faults.scripts.leaving URL HTTP_URL MODEL HOW

HOW: close, forget (exit without close), two (two contexts, one closed), error (an exception inside `with`), raise (an
exception that ends the process with the context open), dead (says "ready", waits for a line, then a call that must
fail, then exit without close), dead-close (the same with close), interrupt (says "ready" before a retrieve that
Ctrl-C ends, then leaves `with`), interrupt-store (the same in a store). The last line says what came, as JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import time

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import KVCacheSDKError, LMCacheKVCacheContext
from tests.faults.worlds import values_of
from tests.integration.cases import CHUNK

TOKENS = [123_456_789, *range(1, 2 * CHUNK)]


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def interrupted(ctx: LMCacheKVCacheContext, kind: str) -> None:
    """A call that Ctrl-C ends, and how long that took from the signal on (the tests take the time)."""
    kv = values_of(ctx.server_version, ctx.model_name, len(TOKENS), 1)
    say(ready=True)
    sys.stdin.readline()
    say(calling=True)
    try:
        if kind == "store":
            ctx.store(kv, [1, *TOKENS[1:]])
        else:
            ctx.retrieve(TOKENS)
        say(ended="no error")
    except KeyboardInterrupt:
        say(ended="KeyboardInterrupt")


def failing(ctx: LMCacheKVCacheContext) -> None:
    say(ready=True)
    sys.stdin.readline()
    began = time.monotonic()
    try:
        ctx.retrieve(TOKENS)
        say(ended="no error")
    except KVCacheSDKError as error:
        say(ended=type(error).__name__, seconds=time.monotonic() - began)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell's children ignore it
    url, http_url, model, how = sys.argv[1:5]
    ctx = lmc_sdk.connect(url, http_url, model, 60.0 if how.startswith("interrupt") else 5.0)
    ctx.store(values_of(ctx.server_version, model, len(TOKENS), 1), TOKENS)
    if how == "close":
        ctx.close()
    elif how == "two":
        other = lmc_sdk.connect(url, http_url, model, 5.0)
        ctx.close()
        say(found=other.lookup(TOKENS).hit_tokens)
        other.close()
    elif how == "error":
        with ctx:
            raise ValueError("inside with")
    elif how == "raise":
        raise ValueError("with an open context")
    elif how.startswith("interrupt"):
        with ctx:
            interrupted(ctx, "store" if how.endswith("store") else "retrieve")
        say(closed=True)
    elif how.startswith("dead"):
        failing(ctx)
        if how == "dead-close":
            ctx.close()


if __name__ == "__main__":
    main()
