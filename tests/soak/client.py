"""One client process of the soak: a context, threads that share it, and a journal.

Contract: `run` works until SIGTERM, then closes the context, measures what is left, and returns the exit status: 0,
or 3 when a thread did not come back in time. Every byte that comes back is checked, once more later, and whatever is
handed to a store is destroyed as soon as the store returns. An exception that is no documented class of the library
is an event; the documented ones are counted by type.
"""

from __future__ import annotations

import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final, TypeVar

import torch

import lmcache_sdk
import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import KVCacheSDKError, LMCacheKVCacheContext, LookupResult, SessionClosedError
from tests.soak.content import Key, change, contents, find_wrong, random_key
from tests.soak.plan import CHUNK, MIX, MODEL, THREADS, VIEWS, Orders
from tests.soak.tally import Journal, Sample, Tally, give_back_unused

R = TypeVar("R")

DOCUMENTED: Final = frozenset(
    value
    for name in lmcache_sdk.__all__
    if isinstance(value := getattr(lmcache_sdk, name), type) and issubclass(value, KVCacheSDKError)
)
_TELL_SECONDS: Final = 0.5
_JOIN_SECONDS: Final = 6.0
_REFUSED_PAUSE: Final = (0.05, 0.3)
_RECONNECT_PAUSE: Final = (1.0, 4.0)


class Client:
    """See the module."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._stop = threading.Event()
        self._tally = Tally()
        self._journal = Journal(orders.report, self._tally)
        self._context: LMCacheKVCacheContext | None = None

    # ---- the process ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Works until it is told to stop."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        rng = random.Random(self._orders.seed)
        self._journal.totals(phase="before")
        before = Sample.now()
        self._context = self._connect(rng)
        if self._context is None:
            return 0
        threads = [
            threading.Thread(target=self._work, args=(random.Random(rng.random()),), name=f"worker-{number}")
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        self._watch(rng)
        stuck = self._join(threads)
        self._close(self._context)
        self._context = None
        self._journal.totals(phase="after", before={"fds": before.fds, "threads": before.threads}, stuck=stuck)
        return 3 if stuck else 0

    def _watch(self, rng: random.Random) -> None:
        """Tells the totals; closes the context and connects again, when this process is one that does."""
        next_reconnect = time.monotonic() + rng.uniform(*_RECONNECT_PAUSE)
        while not self._stop.wait(_TELL_SECONDS):
            if self._orders.measures:
                give_back_unused()
            self._journal.totals(phase="work")
            if self._orders.reconnects and time.monotonic() > next_reconnect:
                old, fresh = self._context, self._connect(rng)
                if fresh is not None and old is not None:
                    self._context = fresh
                    self._close(old)
                    self._tally.add("reconnects")
                next_reconnect = time.monotonic() + rng.uniform(*_RECONNECT_PAUSE)

    def _connect(self, rng: random.Random) -> LMCacheKVCacheContext | None:
        """A context, as soon as the server is there; None when this process has to stop before."""
        orders = self._orders
        while not self._stop.is_set():
            context = self._try(
                "connect",
                lambda: lmc_sdk.connect(orders.url, orders.http_url, MODEL, orders.timeout),
            )
            if context is not None:
                if context.transport != orders.transport:
                    self._journal.event("unexpected", f"{orders.transport} was meant, {context.transport} came")
                return context
            self._journal.totals(phase="connecting")
            self._stop.wait(rng.uniform(*_REFUSED_PAUSE))
        return None

    def _close(self, context: LMCacheKVCacheContext) -> None:
        self._try("close", context.close)

    def _join(self, threads: list[threading.Thread]) -> list[str]:
        end = time.monotonic() + self._orders.timeout + _JOIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    # ---- the calls --------------------------------------------------------------------------------------------------

    def _try(self, kind: str, call: Callable[[], R]) -> R | None:
        """Makes one call of the library, counts how it ended; None after an error."""
        began = time.monotonic()
        try:
            answer = call()
        except BaseException as error:  # noqa: BLE001 - the soak is here to see what comes out
            self._count_error(kind, error)
            return None
        finally:
            self._tally.note_overrun(time.monotonic() - began - self._orders.timeout)
        self._tally.add(f"done.{kind}")
        return answer

    def _count_error(self, kind: str, error: BaseException) -> None:
        name = type(error).__name__
        if type(error) not in DOCUMENTED:
            self._tally.add("undocumented")
            self._journal.event("undocumented", f"{kind}: " + "".join(traceback.format_exception(error)))
            return
        if self._tally.add(f"error.{name}") <= 2:
            self._journal.event("error", f"{kind}: {name}: {error}")
        if isinstance(error, SessionClosedError) and not self._orders.reconnects:
            self._journal.event("unexpected", f"{kind}: {error}, but nobody here has closed it")

    def _work(self, rng: random.Random) -> None:
        kinds, weights = list(MIX), list(MIX.values())
        kept: tuple[torch.Tensor, Key] | None = None
        while not self._stop.is_set():
            kind = rng.choices(kinds, weights)[0]
            key = random_key(rng)
            if kind == "store":
                fine = self._store(contents(key), key)
            elif kind == "lookup":
                fine = self._lookup(key)
            else:
                kv = self._retrieve(key, rng)
                fine = kv is not None
                if kept is not None:
                    self._check(*kept, "kept for a while")
                kept = (kv, key) if kv is not None and len(kv) else None
                if kind == "edit" and kept is not None:
                    fine = self._edit(*kept, random_key(rng))
                    kept = None
            if not fine:
                self._stop.wait(rng.uniform(*_REFUSED_PAUSE))

    def _now(self) -> LMCacheKVCacheContext:
        assert self._context is not None  # threads run only while there is one
        return self._context

    def _store(self, kv: torch.Tensor, key: Key) -> bool:
        result = self._try("store", lambda: self._now().store(kv, _as_user(key), key.salt))
        kv.zero_()  # the library must not look at it any more
        if result is None:
            return False
        self._tally.add("store.complete" if result else "store.incomplete")
        return True

    def _lookup(self, key: Key) -> bool:
        result = self._try("lookup", lambda: self._now().lookup(_as_user(key), key.salt))
        if result is None:
            return False
        if result != LookupResult(result.hit_tokens, key.num_chunks * CHUNK + key.tail, key.tail) or (
            result.hit_tokens % CHUNK or not 0 <= result.hit_tokens <= key.num_chunks * CHUNK
        ):
            self._journal.event("unexpected", f"lookup of {key}: {result}")
        self._count_hit("lookup", result.hit_tokens)
        return True

    def _count_hit(self, kind: str, num_tokens: int) -> None:
        self._tally.add(f"{kind}.hits" if num_tokens else f"{kind}.misses")

    def _retrieve(self, key: Key, rng: random.Random) -> torch.Tensor | None:
        """The checked KV; an empty tensor for a miss and for wrong bytes, None after an error."""
        read = self._read_through_a_view if rng.random() < VIEWS else self._read
        found = self._try("retrieve", lambda: [read(key)])
        if found is None:
            return None
        kv = found[0]
        self._count_hit("retrieve", 0 if kv is None else kv.shape[2])
        if kv is None or not self._check(kv, key, "as it came"):
            return torch.empty(0)
        return kv

    def _read(self, key: Key) -> torch.Tensor | None:
        return self._now().retrieve(_as_user(key), key.salt)

    def _read_through_a_view(self, key: Key) -> torch.Tensor | None:
        with self._now().view(_as_user(key), key.salt) as chunks:
            kv = torch.cat(list(chunks), dim=2) if chunks else None
        self._tally.add("retrieve.views")
        return kv

    def _check(self, kv: torch.Tensor, key: Key, when: str) -> bool:
        wrong = find_wrong(kv, key)
        self._tally.add("checked_bytes", kv.numel() * kv.element_size())
        if wrong is None:
            return True
        self._tally.add("wrong_bytes", wrong.num_bytes)
        self._journal.event("wrong", f"{when}: {key} salt {key.salt!r}: {wrong}")
        return False

    def _edit(self, kv: torch.Tensor, before: Key, after: Key) -> bool:
        """What an editor does: what was retrieved, changed, under other tokens."""
        num_chunks = min(kv.shape[2] // CHUNK, after.num_chunks)
        before, after = before.whole(num_chunks), after.whole(num_chunks)
        edited = kv[:, :, : num_chunks * CHUNK].clone()
        change(edited, before, after)
        fine = self._store(edited, after)
        if fine:
            self._tally.add("done.edit")
        return fine


def _as_user(key: Key) -> torch.Tensor | list[int]:
    """The tokens in one of the forms that users have."""
    return key.tokens if key.family % 2 else key.tokens.tolist()
