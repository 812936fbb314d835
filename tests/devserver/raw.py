"""A raw client: a plain DEALER that sends what the codec encodes, and says what came back, silence included.

It knows nothing of leases or sessions and never cleans up, so that a test sees exactly what each message did.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

import torch
import zmq

from lmcache_sdk import protocol as p
from lmcache_sdk.values import CorrelationId, InstanceId, RequestId, TokenIds

R = TypeVar("R")

SILENCE_AFTER: Final = 0.3
"""Seconds after which a local server that is not busy will not answer any more."""


class Silent(Exception):  # noqa: N818  # an observation
    """No reply came."""


class RawClient:
    """One connection to a server of a given release."""

    def __init__(self, url: str, release: str, *, patience: float = 10.0, silence: float = SILENCE_AFTER) -> None:
        self.dialect = p.dialect_named(release)
        self.patience = patience
        self.silence = silence
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

    def call(self, request: p.Request[R], timeout: float | None = None) -> R:
        """Sends and waits; raises Silent when nothing comes."""
        uid = self.send(request)
        while (frames := self.receive(self.patience if timeout is None else timeout)) is not None:
            if p.decode_correlation_id(frames) == uid:
                return p.decode_reply(self.dialect, request, frames)
        raise Silent(type(request).__name__)

    def is_silent(self, request: p.Request[Any]) -> bool:
        """Whether this request is not answered, while one sent after it is."""
        uid = self.send(request)
        answered = set()
        if type(request) in _AFFINITY:
            # wait behind it in its own lane: an unregistered instance's UNREGISTER would not
            frames = self.receive(self.silence)
        else:
            frames = self.receive(self.silence)
        if frames is not None:
            answered.add(int(p.decode_correlation_id(frames)))
        return uid not in answered

    def raw(self, frames: Sequence[bytes], timeout: float | None = None) -> list[bytes] | None:
        """Sends frames as they are; the next message, or None."""
        self.socket.send_multipart(list(frames))
        return self.receive(self.silence if timeout is None else timeout)


_AFFINITY = (p.PrepareStore, p.CommitStore, p.PrepareRetrieve, p.CommitRetrieve)


def make_key(
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


def make_registration(
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


def random_chunks(count: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Chunks of random values."""
    return [torch.randn(tuple(shape)).to(dtype) for _ in range(count)]
