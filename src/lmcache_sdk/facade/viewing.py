"""Reading without copying: the chunks of a prefix where they are, for the time of a block.

On an shm server the tensors are the server's own memory. They hold still because the server keeps our read locks, and
no longer than that: so a view gives them back when its block is left, refuses to be used afterwards, and refuses when
half of the locks' time-to-live is over, because soon after that the memory may be somebody else's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import overload

import attrs
import torch

from lmcache_sdk.errors import KVCacheSDKError, LeaseExpiredError, UsageError
from lmcache_sdk.facade.connecting import Connection
from lmcache_sdk.facade.transfer import acquired, agreed_layout, ranges, received_runs
from lmcache_sdk.session import Deadline, ReadLease, deferred
from lmcache_sdk.values import TokenIds, override


@attrs.frozen(eq=False)
class OpenView:
    """What a view holds while its block runs."""

    lease: ReadLease
    chunks: list[torch.Tensor]
    release: Callable[[], None]


def open_view(
    connection: Connection, tokens: TokenIds, cache_salt: str, deadline: Deadline, on_miss: Callable[[], None]
) -> OpenView | None:
    """Locks the cached prefix and gives its chunks; None when nothing is cached, and then nothing is held."""
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
        return OpenView(lease, chunks, stack.pop_all().close)


class KVView(Sequence[torch.Tensor]):
    """The cached chunks of a token sequence, in order, for the time of a `with` block; made by `ctx.view`.

    A sequence of CPU tensors `[kv, layer, chunk_size, hidden]` (K, V on axis 0; one plane for MLA and fused caches).
    Empty when nothing is cached. On an shm server they are the server's memory: read them, never write to them, since
    what is written is what every engine reads from then on. On an inline server they are copies of one's own.

    After the block, and when half of the read locks' time-to-live is over, using the view raises LeaseExpiredError. A
    tensor taken out of it is not guarded: the server may put other bytes there. Clone what is to be kept.
    """

    def __init__(self, begin: Callable[[], OpenView | None], end: Callable[[KVView], None], chunk_size: int) -> None:
        """Not for users: call `ctx.view`."""
        self._begin: Callable[[], OpenView | None] | None = begin
        self._end = end
        self._chunk_size = chunk_size
        self._held: list[OpenView] = []
        """At most one; taken out, by whoever is first, to be given back."""
        self._missed = False
        self._why = "not entered"

    @property
    def hit_tokens(self) -> int:
        """Tokens of the cached prefix."""
        return len(self) * self._chunk_size

    def check_alive(self) -> None:
        """Raises LeaseExpiredError when the chunks must not be read any more."""
        self._open()

    def _open(self) -> list[torch.Tensor]:
        if self._missed:
            return []
        try:
            held = self._held[0]
        except IndexError:
            if self._begin is not None:
                raise UsageError("view: enter it first: `with ctx.view(tokens) as chunks: ...`") from None
            raise LeaseExpiredError(f"view: its locks were given back, because {self._why}") from None
        held.lease.check_alive()
        return held.chunks

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
        begin, self._begin = self._begin, None
        if begin is None:
            raise UsageError("view: a view is entered once; call ctx.view again")
        try:
            with deferred():
                opened = begin()
                if opened is None:
                    self._missed = True
                else:
                    self._held.append(opened)
        except BaseException:
            self.leave("entering it failed")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with deferred():
            try:
                if error is None and self._held:
                    self._held[0].lease.check_alive()  # too old: what the block has read may not have been the cache
            finally:
                self.leave("its block was left")

    def leave(self, why: str) -> None:
        """Gives the locks back; twice does no harm. For the context, which ends its views when it is closed."""
        self._why, self._missed = why, False
        try:
            held = self._held.pop()
        except IndexError:
            return
        try:
            held.release()
        finally:
            self._end(self)

    def __del__(self) -> None:
        if getattr(self, "_held", None):
            warnings.warn(f"{self!r} was dropped inside its block", ResourceWarning, source=self, stacklevel=2)
            with contextlib.suppress(KVCacheSDKError):
                self.leave("it was dropped")

    @override
    def __repr__(self) -> str:
        state = "miss" if self._missed else f"{len(self._held[0].chunks)} chunks" if self._held else self._why
        return f"<KVView {state}>"
