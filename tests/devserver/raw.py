"""A raw client: a plain DEALER that sends what the codec encodes, and says what came back, silence included.

It knows nothing of leases or sessions and never cleans up, so that a test sees exactly what each message did.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, TypeVar

import torch
import zmq

from lmcache_sdk import protocol as p
from lmcache_sdk.devserver import DevServer
from lmcache_sdk.layout import payload_of_tensors
from lmcache_sdk.values import CorrelationId, InstanceId, RequestId, TokenIds

R = TypeVar("R")

RELEASES: Final = tuple(p.DIALECTS)
CHUNK: Final = 16
"""The chunk size of most servers here."""
SHAPE: Final = (2, 2, CHUNK, 8)
"""What `registration()` has the server allocate."""


class Silent(Exception):  # noqa: N818  # an observation
    """No reply came."""


class RawClient:
    """One connection to a server of a given release."""

    def __init__(self, url: str, release: str, *, patience: float = 20.0) -> None:
        self.dialect = p.dialect_named(release)
        self.patience = patience
        self.refusals: Callable[[], int] = lambda: 0
        """How many requests the server has met with silence, if it can be asked."""
        self._ids = itertools.count()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(url)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close(linger=0)
        self._context.term()

    def send(self, request: p.Request[Any]) -> int:
        """Sends one request and does not wait."""
        uid = next(self._ids)
        self.socket.send_multipart(p.encode_request(self.dialect, CorrelationId(uid), request))
        return uid

    def receive(self, timeout: float) -> list[bytes] | None:
        """The next message, whosever it is."""
        if not self.socket.poll(round(timeout * 1000)):
            return None
        return self.socket.recv_multipart()

    def call(self, request: p.Request[R]) -> R:
        """Sends and waits; raises Silent when nothing comes, which a server in this process tells at once."""
        before = self.refusals()
        uid = self.send(request)
        until = time.monotonic() + self.patience
        while time.monotonic() < until:
            refused = self.refusals() > before
            frames = self.receive(0.0 if refused else 0.005)
            if frames is not None and p.decode_correlation_id(frames) == uid:
                return p.decode_reply(self.dialect, request, frames)
            if frames is None and refused:
                break
        raise Silent(type(request).__name__)

    def is_silent(self, request: p.Request[Any]) -> bool:
        """Whether the server has nothing to say to this request."""
        try:
            self.call(request)
        except Silent:
            return True
        return False

    def raw(self, frames: Sequence[bytes], timeout: float = 5.0) -> list[bytes] | None:
        """Sends frames as they are; the next message, or None."""
        self.socket.send_multipart(list(frames))
        return self.receive(timeout)


@contextmanager
def running(release: str = "0.5.6", **settings: Any) -> Iterator[tuple[DevServer, RawClient]]:
    """A server with small chunks and a client of its release."""
    settings = {"chunk_size": CHUNK, "l1_size_bytes": 2**20, **settings}
    with DevServer(speak=release, **settings) as server, RawClient(server.url, release) as client:
        client.refusals = lambda: server.counters["refused"]
        yield server, client
        assert server.counters["crashed"] == 0, server.counters


def key(
    tokens: Sequence[int],
    *,
    model: str = "m",
    start: int = 0,
    end: int | None = None,
    request_id: str | None = None,
    salt: str = "",
    worker_id: int | None = 0,
    world_size: int = 1,
    readers: int = 1,
) -> p.IPCCacheServerKey:
    """A key for `tokens`, by default all of them, under a fresh request id."""
    return p.IPCCacheServerKey(
        model_name=model,
        world_size=world_size,
        worker_id=worker_id,
        token_ids=TokenIds(tokens),
        start=start,
        end=len(tokens) if end is None else end,
        request_id=RequestId(request_id or uuid.uuid4().hex),
        cache_salt=salt,
        num_kv_readers=readers,
    )


def registration(
    instance_id: int,
    *,
    model: str = "m",
    layers: int = 2,
    hidden: int = 8,
    dtype: str = "float32",
    mla: bool = False,
    world_size: int = 1,
    slots: int | None = None,
    groups: Sequence[p.GroupLayout] = (),
) -> p.Register:
    """A registration of a small layout."""
    return p.Register(
        registration=p.Registration(
            instance_id=InstanceId(instance_id),
            model_name=model,
            world_size=world_size,
            block_size=16,
            num_layers=layers,
            hidden_dim_size=hidden,
            dtype_str=dtype,
            use_mla=mla,
            num_physical_slots=slots,
            group_layouts=tuple(groups),
        )
    )


def chunks(
    count: int, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.Tensor]:
    """Chunks of random values, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator).to(dtype) for _ in range(count)]


def payload(release: str, tensors: Sequence[torch.Tensor]) -> bytes:
    """What a client of this release sends inline."""
    return bytes(payload_of_tensors(tensors, p.dialect_named(release).payload_form))


def tokens_of(first: int, count: int = 2 * CHUNK) -> list[int]:
    """Some tokens; other ones for every `first` that is a multiple of 100."""
    return list(range(first, first + count))


# ---- short forms of the requests -------------------------------------------------------------------------------------


def lookup(tokens: Sequence[int], request_id: str, *, tp_size: int = 1, **parts: Any) -> p.Lookup:
    """LOOKUP on all ranks."""
    return p.Lookup(key=key(tokens, request_id=request_id, **{"worker_id": None, **parts}), tp_size=tp_size)


def query(request_id: str) -> p.QueryPrefetchStatus:
    """QUERY_PREFETCH_STATUS."""
    return p.QueryPrefetchStatus(request_id=RequestId(request_id))


def free(tokens: Sequence[int], request_id: str, *, tp_size: int = 1, **parts: Any) -> p.FreeLookupLocks:
    """FREE_LOOKUP_LOCKS on all ranks."""
    return p.FreeLookupLocks(key=key(tokens, request_id=request_id, **{"worker_id": None, **parts}), tp_size=tp_size)


def end(request_id: str) -> p.EndSession:
    """END_SESSION."""
    return p.EndSession(request_id=RequestId(request_id))


def unregister(instance_id: int) -> p.Unregister:
    """UNREGISTER."""
    return p.Unregister(instance_id=InstanceId(instance_id))


def prepare_store(instance_id: int, key: p.IPCCacheServerKey) -> p.PrepareStore:
    """PREPARE_STORE."""
    return p.PrepareStore(key=key, instance_id=InstanceId(instance_id))


def commit_store(instance_id: int, key: p.IPCCacheServerKey, data: bytes = b"") -> p.CommitStore:
    """COMMIT_STORE."""
    return p.CommitStore(key=key, instance_id=InstanceId(instance_id), data=data)


def prepare_retrieve(instance_id: int, key: p.IPCCacheServerKey) -> p.PrepareRetrieve:
    """PREPARE_RETRIEVE."""
    return p.PrepareRetrieve(key=key, instance_id=InstanceId(instance_id))


def commit_retrieve(instance_id: int, key: p.IPCCacheServerKey) -> p.CommitRetrieve:
    """COMMIT_RETRIEVE."""
    return p.CommitRetrieve(key=key, instance_id=InstanceId(instance_id))
