"""The store call: write what is not there, then say truthfully what is.

`True` means that every whole chunk is in the cache after the call. The server's own answers do not prove that: empty
slots mean "cached", "being written by somebody else" or "no memory" alike, and an inline COMMIT answers true when
there was no memory at all (PROTOCOL.md sections 3.3 and 6). So whenever slots were fewer than chunks, or tensors
travelled inline, a LOOKUP has the last word. A full pool is given a short time to evict, because eviction runs behind
the store that needs it.
"""

from __future__ import annotations

from typing import Final

import attrs
import torch

from lmcache_sdk.errors import AlreadyCachedError
from lmcache_sdk.facade.results import StoreResult
from lmcache_sdk.facade.transfer import Endpoint, lookup_chunks, write_range
from lmcache_sdk.layout import KVLayout
from lmcache_sdk.session import Deadline
from lmcache_sdk.values import TokenIds

_EVICTION_SECONDS: Final = 1.5
"""A full pool answers empty slots until eviction has run, under about a second (PROTOCOL.md section 13)."""
_EVICTION_PAUSE: Final = 0.1


@attrs.define(eq=False, repr=False)
class _Progress:
    """What one store has done so far, by chunk index."""

    total: int
    written: set[int] = attrs.field(factory=set)
    """Chunks that a commit of ours published."""
    found_first: int = 0
    """Leading chunks that a lookup found before anything was written."""
    found: int | None = None
    """Leading chunks that the last lookup found; None while none was needed."""

    @property
    def complete(self) -> bool:
        return self.found == self.total if self.found is not None else len(self.written) == self.total


@attrs.frozen(eq=False, repr=False)
class StoreJob:
    """The checked arguments of one store."""

    layout: KVLayout
    kv: torch.Tensor
    tokens: TokenIds
    cache_salt: str
    tail_tokens: int
    refuse_cached: bool


def store_chunks(endpoint: Endpoint, job: StoreJob, deadline: Deadline) -> StoreResult:
    """Stores whole chunks. Raises AlreadyCachedError when the job refuses cached ones and there are some."""
    inline = endpoint.pool is None
    progress = _Progress(len(job.tokens) // endpoint.identity.chunk_size)
    if inline or job.refuse_cached:
        # exclusive: what an earlier store of these tokens still owes must be in the cache before it is counted
        progress.found_first = _lookup(endpoint, job, deadline, exclusive=True)
        if job.refuse_cached and progress.found_first:
            raise _already_cached(range(progress.found_first), "nothing was written")
    nbytes = progress.total * job.layout.chunk_nbytes(endpoint.identity.chunk_size)
    # a store that fills much of the pool can evict its own beginning, every slot given notwithstanding
    crowded = 2 * nbytes > endpoint.pool_nbytes > 0
    fits = not 0 < endpoint.pool_nbytes < nbytes
    patience = deadline.capped(_EVICTION_SECONDS if fits else 0.0)
    if progress.found_first == progress.total:
        progress.found = progress.total  # nothing to write, and nothing to look for behind it
        return _verdict(endpoint, job, progress, nbytes)
    _write(endpoint, job, progress.found_first, deadline, progress)
    while inline or crowded or len(progress.written) < progress.total or progress.found is not None:
        progress.found = _lookup(endpoint, job, deadline)
        if progress.complete or patience.passed:
            break
        endpoint.session.pause(_EVICTION_PAUSE)
        _write(endpoint, job, progress.found, deadline, progress)
    return _verdict(endpoint, job, progress, nbytes)


def _lookup(endpoint: Endpoint, job: StoreJob, deadline: Deadline, *, exclusive: bool = False) -> int:
    return lookup_chunks(endpoint, job.tokens, job.cache_salt, deadline, step="store", exclusive=exclusive)


def _write(endpoint: Endpoint, job: StoreJob, first: int, deadline: Deadline, progress: _Progress) -> None:
    """Stores the chunks from `first` on; the server skips what it has."""
    if first == progress.total:
        return
    with endpoint.session.operation(
        "store", endpoint.identity, job.tokens, job.cache_salt, deadline, exclusive=True
    ) as operation:
        for written in write_range(endpoint, operation, job.layout, job.kv, first, progress.total - first):
            progress.written.update(written)


def _verdict(endpoint: Endpoint, job: StoreJob, progress: _Progress, nbytes: int) -> StoreResult:
    """Counts only what a lookup finds as stored, once a lookup was needed."""
    found = progress.total if progress.found is None else progress.found
    # an inline commit says true for chunks that were there as well: those that the first lookup found are not ours
    written = {i for i in progress.written if progress.found_first <= i < found}
    already = [i for i in range(found) if i not in written]
    missing = progress.total - found
    if job.refuse_cached and already:
        raise _already_cached(already, f"the other {len(written)} chunks were written")
    reason = ""
    if missing:
        reason = (
            f"{missing} of {progress.total} chunks cannot be found after the store: the server's pool "
            f"({endpoint.pool_nbytes} bytes; this store {nbytes}) is full and nothing could be evicted in time, or "
            "another client is writing them"
        )
    elif not progress.total:
        reason = "no whole chunk of tokens: nothing was stored"
    return StoreResult(
        written_chunks=len(written),
        already_cached_chunks=len(already),
        missing_chunks=missing,
        tail_tokens=job.tail_tokens,
        reason=reason,
    )


def _already_cached(indices: range | list[int], what: str) -> AlreadyCachedError:
    shown = ", ".join(map(str, list(indices)[:8])) + (", …" if len(indices) > 8 else "")
    return AlreadyCachedError(
        f'existing="error": chunks {shown} ({len(indices)}) are cached already and keep their data; {what}',
        chunk_indices=tuple(indices),
    )
