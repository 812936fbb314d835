"""LMCacheKVCacheContext: what `connect` gives and every call takes. Its docstrings are what users read."""

from __future__ import annotations

import os
import warnings
import weakref
from types import TracebackType
from typing import Literal

import attrs
import torch

from lmcache_sdk.errors import KVCacheSDKError, UnknownLayoutError
from lmcache_sdk.facade.arguments import TokenSequence, checked_choice, checked_salt, checked_tokens
from lmcache_sdk.facade.connecting import Connection, registered_shape
from lmcache_sdk.facade.results import LookupResult, StoreResult
from lmcache_sdk.facade.storing import StoreJob, store_chunks
from lmcache_sdk.facade.transfer import lookup_chunks, retrieve_prefix
from lmcache_sdk.layout import KVLayout, check_kv, layout_from_object, tail_tokens, whole_chunks
from lmcache_sdk.session import Deadline, private_model_name
from lmcache_sdk.values import TokenIds, override


class LMCacheKVCacheContext:
    """One model's KV cache on one LMCache server.

    Made by `lmcache_sdk.kvcache.connect`. Thread-safe: calls of several threads run side by side, calls on the same
    tokens one after the other. Belongs to the process that made it. Use it as a context manager, or call `close`.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        """Not for users: call `connect`."""
        self._endpoint = connection.endpoint
        self._facts = connection.facts
        self._model = connection.model
        self._layout = connection.model.layout
        self._timeout = timeout
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, connection.endpoint.session.abandon)

    # ---- what it is
    # ---------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The model whose cache this is."""
        return self._endpoint.identity.model_name

    @property
    def transport(self) -> Literal["shm", "inline"]:
        """How tensors travel, which the server decides: in shared memory or inside messages."""
        return "inline" if self._endpoint.session.pool is None else "shm"

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk, the unit in which the server caches."""
        return self._endpoint.identity.chunk_size

    @property
    def layout(self) -> KVLayout | None:
        """The geometry of the model's cache; None while neither an engine, the caller nor a retrieved object has told
        it.
        """
        return self._layout

    @property
    def dialect(self) -> str:
        """The server release whose wire is spoken, such as "0.5.6"."""
        return self._endpoint.session.dialect.release

    @property
    def server_version(self) -> str:
        """The version that the server reports; empty when it reports none."""
        return self._facts.version

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._endpoint.session.closed

    # ---- calls
    # --------------------------------------------------------------------------------------------------------

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
        hit = lookup_chunks(self._endpoint, whole, salt, deadline) if len(whole) else 0
        return LookupResult(hit * self.chunk_size, len(ids), tail_tokens(len(ids), self.chunk_size))

    def retrieve(self, tokens: TokenSequence, cache_salt: str = "") -> torch.Tensor | None:
        """Copies the cached prefix of a token sequence.

        Args:
            tokens: token ids from position 0, as in `lookup`.
            cache_salt: as in `lookup`.

        Returns:
            A contiguous CPU tensor `[2, layer, hit_tokens, hidden]` (axis 0 is K, V; hidden is head-major; K is
            stored after the rotary embedding), `[1, layer, hit_tokens, hidden]` for one-plane caches (MLA, fused), in
            the cache's dtype. None when nothing is cached, or the tokens fill no whole chunk.

        Raises:
            As `lookup`; RemoteProtocolError also when the cached objects do not have the layout of the model.
        """
        deadline, ids, salt = self._begin(tokens, cache_salt)
        whole = self._whole(ids)
        if not len(whole):
            return None
        kv = retrieve_prefix(self._endpoint, self._layout, whole, salt, deadline)
        if kv is not None and self._layout is None:
            self._learn(kv)
        return kv

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
            DeadlineExceededError: no answer within the timeout; what was written is not known.
        """
        deadline, ids, salt = self._begin(tokens, cache_salt)
        refuse = checked_choice(existing, "existing", ("skip", "error")) == "error"
        layout = self._known_layout()
        checked = check_kv(kv, layout, len(ids))
        whole = self._whole(ids)
        tail = tail_tokens(len(ids), self.chunk_size)
        if not len(whole):
            return StoreResult(0, 0, 0, tail, f"no whole chunk of {self.chunk_size} tokens: nothing was stored")
        return store_chunks(self._endpoint, StoreJob(layout, checked, whole, salt, tail, refuse), deadline)

    def close(self) -> None:
        """Unregisters and frees everything; calls in flight fail with SessionClosedError. Bounded; twice does no harm.

        Tensors that were retrieved stay valid.
        """
        self._finalizer.detach()
        self._endpoint.session.close()

    def __enter__(self) -> LMCacheKVCacheContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pid") and os.getpid() == self._pid and not self.closed:
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, source=self, stacklevel=2)

    @override
    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<LMCacheKVCacheContext {self.model_name!r} {self.transport} {self.dialect} {state}>"

    # ---- helpers
    # ------------------------------------------------------------------------------------------------------

    def _begin(self, tokens: TokenSequence, cache_salt: str) -> tuple[Deadline, TokenIds, str]:
        deadline = Deadline.after(self._timeout)
        self._endpoint.session.check_open()
        return deadline, checked_tokens(tokens), checked_salt(cache_salt)

    def _whole(self, ids: TokenIds) -> TokenIds:
        return ids.prefix(whole_chunks(len(ids), self.chunk_size) * self.chunk_size)

    def _known_layout(self) -> KVLayout:
        if self._layout is None:
            why = self._model.layout_problem or "the engine publishes no layout"
            raise UnknownLayoutError(
                f"store: the layout of {self.model_name!r} is not known ({why}); pass layout=KVLayout(...) to "
                "connect, or retrieve "
                "something of this model first"
            )
        return self._layout

    def _learn(self, kv: torch.Tensor) -> None:
        """Takes the layout of a retrieved object for stores; needs a registration of its own, since one never
        changes.
        """
        learned = layout_from_object(
            (kv.shape[0], kv.shape[1], self.chunk_size, kv.shape[3]), kv.dtype, self.chunk_size
        )
        session = self._endpoint.session
        try:
            shape = registered_shape(learned, self._facts)
            instance_id, _ = session.register(private_model_name(), shape, Deadline.after(self._timeout))
        except KVCacheSDKError:
            return  # the bytes are right; the next retrieve tries again
        identity = attrs.evolve(self._endpoint.identity, instance_id=instance_id)
        self._endpoint = attrs.evolve(self._endpoint, identity=identity)
        self._layout = learned
