"""Reading without copying: the chunks of a prefix where they are, for the time of a block.

On an shm server the tensors are the server's own memory. They hold still because the server keeps our read locks, and
no longer than that: so a view gives them back when its block is left, refuses to be used afterwards, and refuses when
half of the locks' time-to-live is over, because soon after that the memory may be somebody else's.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import overload

import attrs
import torch

from lmcache_sdk.errors import KVCacheSDKError, LeaseExpiredError, UsageError
from lmcache_sdk.facade.connecting import Connection
from lmcache_sdk.facade.link import Link, check_registered
from lmcache_sdk.facade.transfer import acquired, agreed_layout, ranges, received_runs
from lmcache_sdk.session import Deadline, ReadLease, deferred
from lmcache_sdk.values import TokenIds, override


@attrs.frozen(eq=False, repr=False)
class OpenView:
    """What a view reads while its block runs."""

    lease: ReadLease
    chunks: list[torch.Tensor]


def open_view(
    connection: Connection, tokens: TokenIds, cache_salt: str, deadline: Deadline, on_miss: Callable[[], None]
) -> tuple[OpenView, Callable[[], None]] | None:
    """Locks the cached prefix; gives its chunks and what gives the locks back, or None when nothing is cached, and
    then nothing is held.
    """
    endpoint = connection.endpoint
    with contextlib.ExitStack() as stack:
        operation = stack.enter_context(
            endpoint.session.operation("view", endpoint.identity, tokens, cache_salt, deadline, exclusive=True)
        )
        lease = acquired(endpoint, operation, on_miss)
        if not lease.num_chunks:
            return None
        layout = connection.model.layout
        chunks: list[torch.Tensor] = []
        for _, entry, count in ranges(endpoint, lease, layout):
            runs = received_runs(endpoint, lease.received(entry), count)
            layout = agreed_layout(runs, layout, endpoint.identity.chunk_size)
            chunks.extend(chunk for run in runs for chunk in run.unbind(0))
        return OpenView(lease, chunks), stack.pop_all().close


@attrs.frozen(eq=False, repr=False)
class ViewSource:
    """Where a view gets its chunks. It keeps the context alive, which must not be dropped under an open view."""

    context: object
    link: Link
    views: weakref.WeakSet[KVView]
    """The context's open views, which it ends when it is closed."""
    timeout: float

    def begin(self, view: KVView, tokens: TokenIds, cache_salt: str) -> OpenView | None:
        """Locks and reads; None on a miss."""
        deadline = Deadline.after(self.timeout)
        self.link.check_open()

        def body(connection: Connection) -> OpenView | None:
            confirm = partial(check_registered, connection, "view", deadline)
            found = open_view(connection, tokens, cache_salt, deadline, confirm)
            if found is None:
                return None
            opened, release = found
            self.link.hold(opened, release)
            self.views.add(view)
            return opened

        return self.link.call("view", deadline, body, idempotent=True) if len(tokens) else None

    def end(self, view: KVView, opened: OpenView) -> None:
        """Gives back what `begin` locked; twice does no harm."""
        self.views.discard(view)
        self.link.let_go(opened)


class KVView(Sequence[torch.Tensor]):
    """The cached chunks of a token sequence, in order, for the time of a `with` block; made by `ctx.view`.

    A sequence of CPU tensors `[kv, layer, chunk_size, hidden]` (K, V on axis 0; one plane for MLA and fused caches).
    Empty when nothing is cached. On an shm server they are the server's memory: read them, never write to them, since
    what is written is what every engine reads from then on. On an inline server they are copies of one's own.

    After the block, when half of the read locks' time-to-live is over, and when the context was closed meanwhile, using
    the view raises LeaseExpiredError. So does leaving its block when the locks had ended before: what the block read
    may not have been the cache. A tensor taken out of a view is not guarded: clone what is to be kept.
    """

    def __init__(self, source: ViewSource, tokens: TokenIds, cache_salt: str, chunk_size: int) -> None:
        """Not for users: call `ctx.view`."""
        self._source: ViewSource | None = source
        self._tokens = tokens
        self._cache_salt = cache_salt
        self._chunk_size = chunk_size
        self._opened: OpenView | None = None
        self._entered = False
        self._missed = False
        self._why = "it was not entered"

    @property
    def hit_tokens(self) -> int:
        """Tokens of the cached prefix."""
        return len(self) * self._chunk_size

    def check_alive(self) -> None:
        """Raises LeaseExpiredError when the chunks must not be read any more."""
        self._open()

    def _open(self) -> list[torch.Tensor]:
        if not self._entered:
            raise UsageError("view: enter it first: `with ctx.view(tokens) as chunks: ...`")
        source, opened = self._source, self._opened
        if source is not None:
            source.link.current.endpoint.session.check_process()
        if self._missed:
            return []
        return self._check_alive(opened)

    def _check_alive(self, opened: OpenView | None) -> list[torch.Tensor]:
        if opened is None:
            raise LeaseExpiredError(f"view: its locks were given back, because {self._why}")
        opened.lease.check_alive()
        return opened.chunks

    @override
    def __len__(self) -> int:
        return len(self._open())

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    @override
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        return self._open()[index]

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(len(self)):
            yield self[index]

    # ---- the block --------------------------------------------------------------------------------------------------

    def __enter__(self) -> KVView:
        source = self._source
        if self._entered or source is None:
            raise UsageError("view: a view is entered once; call ctx.view again")
        self._entered = True
        try:
            with deferred():
                self._opened = source.begin(self, self._tokens, self._cache_salt)
                self._missed = self._opened is None
        except BaseException:
            self.leave("entering it failed")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened = self._opened
        with deferred():
            try:
                # too old, or closed meanwhile: what the block has read may not have been the cache
                if error is None and not self._missed:
                    self._check_alive(opened)
            finally:
                self.leave("its block was left")

    def leave(self, why: str) -> None:
        """Gives the locks back; twice does no harm. For the context, which ends its views when it is closed."""
        source, opened = self._source, self._opened
        self._why, self._missed, self._source, self._opened = why, False, None, None
        if source is not None and opened is not None:
            source.end(self, opened)

    def __del__(self) -> None:
        source = getattr(self, "_source", None)
        if source is not None and self._opened is not None and source.link.in_own_process:
            warnings.warn(f"{self!r} was dropped inside its block", ResourceWarning, source=self, stacklevel=2)
            with contextlib.suppress(KVCacheSDKError):
                self.leave("it was dropped")

    @override
    def __repr__(self) -> str:
        opened = self._opened
        state = "miss" if self._missed else f"{len(opened.chunks)} chunks" if opened is not None else self._why
        return f"<KVView {state}>"
