"""LMCacheKVCacheContext: what `connect` gives and every call takes. Its docstrings are what users read."""

from __future__ import annotations

import logging
import warnings
import weakref
from functools import partial
from types import TracebackType
from typing import Literal

import torch

from lmcache_sdk.errors import KVCacheSDKError, UnknownLayoutError
from lmcache_sdk.facade.arguments import TokenSequence, checked_choice, checked_salt, checked_tokens
from lmcache_sdk.facade.connecting import Connection, with_layout
from lmcache_sdk.facade.link import Link, check_registered
from lmcache_sdk.facade.results import LookupResult, StoreResult
from lmcache_sdk.facade.storing import StoreJob, store_chunks
from lmcache_sdk.facade.transfer import lookup_chunks, retrieve_prefix
from lmcache_sdk.facade.viewing import KVView, ViewSource
from lmcache_sdk.layout import KVLayout, check_kv, check_out, layout_from_object, tail_tokens, whole_chunks
from lmcache_sdk.session import Deadline
from lmcache_sdk.values import TokenIds, override

_log = logging.getLogger("lmcache_sdk.facade")


class LMCacheKVCacheContext:
    """One model's KV cache on one LMCache server.

    Made by `lmcache_sdk.kvcache.connect`. Thread-safe: calls of several threads run side by side, calls on the same
    tokens one after the other. Belongs to the process that made it. Use it as a context manager, or call `close`.
    """

    def __init__(self, link: Link, timeout: float) -> None:
        """Not for users: call `connect`."""
        self._link = link
        self._timeout = timeout
        self._views: weakref.WeakSet[KVView] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _abandon, link)

    # ---- what it is -------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The model whose cache this is."""
        return self._now.endpoint.identity.model_name

    @property
    def transport(self) -> Literal["shm", "inline"]:
        """How tensors travel, which the server decides: in shared memory or inside messages."""
        return "inline" if self._now.endpoint.session.pool is None else "shm"

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk, the unit in which the server caches."""
        return self._now.endpoint.identity.chunk_size

    @property
    def layout(self) -> KVLayout | None:
        """The geometry of the model's cache; None while neither an engine, the caller nor a retrieved object has told
        it.
        """
        return self._now.model.layout

    @property
    def dialect(self) -> str:
        """The server release whose wire is spoken, such as "0.5.6"."""
        return self._now.endpoint.session.dialect.release

    @property
    def server_version(self) -> str:
        """The version that the server reports; empty when it reports none."""
        return self._now.facts.version

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._link.closed

    # ---- calls ------------------------------------------------------------------------------------------------------

    def lookup(self, tokens: TokenSequence, cache_salt: str = "") -> LookupResult:
        r"""Says how much of a token sequence is cached, and leaves no lock behind.

        Args:
            tokens: token ids 0 … 2**32-1 from position 0: a sequence of ints, or a 1-D integer torch tensor or numpy
                array.
            cache_salt: the salt that the cache was stored under; at most 128 characters, none of @ / \ NUL.

        Returns:
            The tokens of the cached prefix, all tokens, and those behind the last whole chunk.

        Raises:
            UsageError: tokens or salt could not be meant; nothing was sent.
            DeadlineExceededError: no answer within the timeout of `connect`; never reported as a miss.
            TransportError, ProtocolError, ServerError: see docs/errors.md.
        """
        deadline, ids, salt = self._begin(tokens, cache_salt)
        whole = self._whole(ids)
        hit = 0
        if len(whole):

            def body(connection: Connection) -> int:
                confirm = partial(check_registered, connection, "lookup", deadline)
                return lookup_chunks(connection.endpoint, whole, salt, deadline, on_miss=confirm)

            hit = self._link.call("lookup", deadline, body, idempotent=True)
        return LookupResult(hit * self.chunk_size, len(ids), tail_tokens(len(ids), self.chunk_size))

    def retrieve(
        self, tokens: TokenSequence, cache_salt: str = "", *, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Copies the cached prefix of a token sequence.

        A large result lies in memory of an earlier one that was dropped, if there is such (see `recycle_bytes` of
        `connect`); it is the caller's alone all the same.

        Args:
            tokens: token ids from position 0, as in `lookup`.
            cache_salt: as in `lookup`.
            out: a tensor to copy into, `[planes, layer, token, hidden]` with one row for each of `tokens`, in the
                cache's dtype, on any device. Its content is undefined when the call fails.

        Returns:
            A contiguous CPU tensor `[2, layer, hit_tokens, hidden]` (axis 0 is K, V; hidden is head-major; K is
            stored after the rotary embedding), `[1, layer, hit_tokens, hidden]` for one-plane caches (MLA, fused), in
            the cache's dtype; with `out`, the view of its first `hit_tokens` rows. None when nothing is cached, or the
            tokens fill no whole chunk.

        Raises:
            As `lookup`; RemoteProtocolError also when the cached objects do not have the layout of the model.
            ShapeMismatchError, UnknownLayoutError: `out` does not fit, or no geometry is known that it could fit.
        """
        deadline, ids, salt = self._begin(tokens, cache_salt)
        target = None if out is None else check_out(out, self._known_layout("retrieve"), len(ids))
        whole = self._whole(ids)
        if not len(whole):
            return None

        def body(connection: Connection) -> torch.Tensor | None:
            confirm = partial(check_registered, connection, "retrieve", deadline)
            layout = connection.model.layout
            kv = retrieve_prefix(connection.endpoint, layout, whole, salt, deadline, out=target, on_miss=confirm)
            if kv is not None and layout is None:
                self._learn(connection, kv, deadline)
            return kv

        return self._link.call("retrieve", deadline, body, idempotent=True)

    def view(self, tokens: TokenSequence, cache_salt: str = "") -> KVView:
        """The cached prefix of a token sequence without a copy: `with ctx.view(tokens) as chunks: ...`.

        The chunks are read-only by contract, and locked on the server while the block runs; see `KVView`. Inside the
        block, other calls of this thread on the same tokens are refused, those of other threads wait.

        Args:
            tokens: token ids from position 0, as in `lookup`.
            cache_salt: as in `lookup`.

        Returns:
            A view, to be entered once; nothing is sent before that. What it raises when it is entered: as `retrieve`.

        Raises:
            UsageError: tokens or salt could not be meant.
        """
        _, ids, salt = self._begin(tokens, cache_salt)
        return KVView(ViewSource(self, self._link, self._views, self._timeout), self._whole(ids), salt, self.chunk_size)

    def store(
        self,
        kv: torch.Tensor,
        tokens: TokenSequence,
        cache_salt: str = "",
        *,
        existing: Literal["skip", "error"] = "skip",
    ) -> StoreResult:
        """Stores KV under token ids, so that an engine or another client finds it.

        Chunks that are cached already keep their data: the first writer wins. To replace KV, store it under other
        tokens or another salt, or clear the cache first.

        Args:
            kv: a tensor `[2, layer, token, hidden]` as `retrieve` gives it (`[1, …]` for one-plane caches), in the
                cache's dtype, on any device; its token axis has one entry per token. Need not be contiguous.
            tokens: the token ids, from position 0. Those behind the last whole chunk are not stored.
            cache_salt: as in `lookup`.
            existing: "error" raises when a chunk is cached already instead of keeping its data silently.

        Returns:
            How many chunks were written, were there, or are missing; true when all of them can be found in the cache
            now.

        Raises:
            UsageError, ShapeMismatchError: the arguments do not fit; nothing was sent.
            UnknownLayoutError: no geometry is known: pass layout= to connect, or retrieve once.
            AlreadyCachedError: `existing="error"` and some chunks are cached.
            DeadlineExceededError, ConnectionLostError: no answer; what was written is not known.
            NotRegisteredError: nothing can be found because no engine holds the model any more.
            LeaseExpiredError, StoreRejectedError: reserved slots ran out of time, or wait for the server's TTL.
            ProtocolError, ServerError: see docs/errors.md.
        """
        deadline, ids, salt = self._begin(tokens, cache_salt)
        refuse = checked_choice(existing, "existing", ("skip", "error")) == "error"
        layout = self._known_layout("store")
        checked = check_kv(kv, layout, len(ids))
        whole = self._whole(ids)
        tail = tail_tokens(len(ids), self.chunk_size)
        if not len(whole):
            return StoreResult(0, 0, 0, tail, f"no whole chunk of {self.chunk_size} tokens: nothing was stored")
        job = StoreJob(layout, checked, whole, salt, tail, refuse)

        def body(connection: Connection) -> StoreResult:
            result = store_chunks(connection.endpoint, job, deadline)
            if result.missing_chunks == result.total_chunks:
                check_registered(connection, "store", deadline)
            return result

        return self._link.call("store", deadline, body, idempotent=False)

    def close(self) -> None:
        """Unregisters and frees everything; calls in flight fail with SessionClosedError. Bounded; twice does no harm.

        Tensors that were retrieved stay valid.
        """
        self._finalizer.detach()
        for view in list(self._views):
            view.leave("the context was closed")
        self._link.close()

    def __enter__(self) -> LMCacheKVCacheContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_link") and self._link.in_own_process and not self.closed:
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, source=self, stacklevel=2)

    @override
    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<LMCacheKVCacheContext {self.model_name!r} {self.transport} {self.dialect} {state}>"

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _begin(self, tokens: TokenSequence, cache_salt: str) -> tuple[Deadline, TokenIds, str]:
        deadline = Deadline.after(self._timeout)
        self._link.check_open()
        return deadline, checked_tokens(tokens), checked_salt(cache_salt)

    def _whole(self, ids: TokenIds) -> TokenIds:
        return ids.prefix(whole_chunks(len(ids), self.chunk_size) * self.chunk_size)

    @property
    def _now(self) -> Connection:
        return self._link.current

    def _known_layout(self, step: str) -> KVLayout:
        model = self._now.model
        if model.layout is None:
            why = model.layout_problem or "the engine publishes no layout"
            raise UnknownLayoutError(
                f"{step}: the layout of {self.model_name!r} is not known ({why}); pass layout=KVLayout(...) to "
                "connect, or retrieve something of this model first"
            )
        return model.layout

    def _learn(self, connection: Connection, kv: torch.Tensor, deadline: Deadline) -> None:
        """Takes the layout of a retrieved object for stores; needs a registration of its own, since one never
        changes.
        """
        shape = (kv.shape[0], kv.shape[1], self.chunk_size, kv.shape[3])
        learned = layout_from_object(shape, kv.dtype, self.chunk_size)
        try:
            self._link.replace(connection, with_layout(connection, learned, deadline), deadline)
        except KVCacheSDKError as error:
            _log.info(
                "the layout of a retrieved object could not be registered, the next retrieve tries again: %s", error
            )


def _abandon(link: Link) -> None:
    link.abandon()
