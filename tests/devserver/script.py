"""Runs requests on any server and writes down what each did: the reply, and how the numbers of /status changed.

Contract: the same script on an imitation and on the real server of that release gives the same lines, or the imitation
is wrong. A line is `what: reply | change change …`; contents that were read are a hash. Nothing in a line depends on
addresses, ids that are made up, or time.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from lmcache_sdk import protocol as p
from lmcache_sdk.layout import read_payload, slot_runs
from tests.devserver.raw import (
    CHUNK,
    RawClient,
    Silent,
    chunks,
    commit_retrieve,
    commit_store,
    end,
    free,
    key,
    lookup,
    payload,
    prepare_retrieve,
    prepare_store,
    query,
)

R = TypeVar("R")
Caller = Callable[[p.Request[Any]], Any]

NAMES = {
    "total_object_count": "objects",
    "write_locked_count": "writing",
    "read_locked_count": "reading",
    "memory_used_bytes": "bytes",
    "staging_object_count": "staged",
}


def http_json(url: str) -> Any:
    """GET a JSON document."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.loads(response.read())


def numbers(status: Any) -> dict[str, int]:
    """The numbers of /status that requests change."""
    manager = status["storage_manager"]["l1_manager"]
    found = {shown: manager[name] for name, shown in NAMES.items() if name in manager}
    found["sessions"] = status["active_sessions"]
    found["jobs"] = status["active_prefetch_jobs"]
    found["instances"] = len(status.get("registered_non_cuda_instance_ids", ()))
    return found


def digest(tensor: torch.Tensor) -> str:
    """A short text that stands for dtype, shape and every byte."""
    raw = tensor.contiguous().view(torch.uint8).flatten().numpy().tobytes()
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}".encode()
    return hashlib.sha256(text + raw).hexdigest()[:8]


def spell(reply: object) -> str:
    """A reply without what differs from run to run."""
    match reply:
        case p.Void():
            return "void"
        case p.PreparedStore(slots=None):
            return "inline"
        case p.PreparedStore():
            return f"{spell_slots(reply.slots or ())} for {list(reply.chunk_indices)}"
        case p.PreparedRetrieve(success=False):
            return "miss"
        case p.PreparedRetrieve(slots=None):
            return "data"
        case p.PreparedRetrieve():
            return spell_slots(reply.slots or ())
        case p.Registered():
            return f"{'pool' if reply.shm_name else 'no pool'} of {reply.pool_size}"
        case p.PrefetchStatus():
            return f"{reply.ready_chunks} chunks"
        case p.Committed():
            return "true" if reply.success else "false"
        case _:
            return repr(reply)


def spell_slots(slots: Sequence[p.Slot]) -> str:
    """Slots, told by what is read in them."""
    kinds = {f"{slot.dtype} {list(slot.shape)} in {slot.length}" for slot in slots}
    return f"{len(slots)} slots" + "".join(f" of {kind}" for kind in sorted(kinds))


class Script:
    """One run: a client, where /status is, where the pool is, and the lines so far."""

    def __init__(self, client: RawClient, http_url: str, shm_name: str, wait: Callable[[float], None]) -> None:
        self.client = client
        self.release = client.dialect.release
        self.shared = bool(shm_name)
        self.lines: list[str] = []
        self.wait = wait
        """Lets that many seconds pass for the server."""
        self._http_url = http_url
        self._pool = self._map(shm_name) if shm_name else None
        self._numbers = self._look()
        self._watching = True

    def _map(self, shm_name: str) -> mmap.mmap:
        descriptor = os.open(Path("/dev/shm", shm_name), os.O_RDWR)
        try:
            return mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Unmaps the pool."""
        if self._pool is not None:
            self._pool.close()

    def _look(self) -> dict[str, int]:
        return numbers(http_json(f"{self._http_url}/status"))

    def __call__(self, what: str, request: p.Request[R]) -> R | None:
        """Sends one request; its reply, or None when none came."""
        reply: R | None
        try:
            reply = self.client.call(request)
            said = spell(reply)
        except Silent:
            reply, said = None, "no reply"
        now = self._look() if self._watching else self._numbers
        changes = [f"{name}{now[name] - before:+}" for name, before in self._numbers.items() if now[name] != before]
        self._numbers = now
        self.lines.append(" ".join([f"{what}: {said}", *(["|", *changes] if changes else [])]))
        return reply

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """The numbers are not looked at: something in the background changes them when it likes."""
        self._watching = False
        yield
        self._watching = True

    # ---- what clients do, step by step -------------------------------------------------------------------------------

    def store(
        self,
        tokens: Sequence[int],
        *,
        instance_id: int = 1,
        tensors: Sequence[torch.Tensor] | None = None,
        request_id: str | None = None,
        **parts: Any,
    ) -> None:
        """Stores by the way the server offers."""
        named = key(tokens, request_id=request_id, **parts)
        given = chunks((named.end - named.start) // CHUNK) if tensors is None else list(tensors)
        if not self.shared:
            self("commit", commit_store(instance_id, named, payload(self.release, given)))
            return
        prepared = self("prepare", prepare_store(instance_id, named))
        if prepared is not None and prepared.slots:
            for slot, index in zip(prepared.slots, prepared.chunk_indices, strict=True):
                self._view(slot).copy_(given[index])
        self("commit", commit_store(instance_id, named))

    def store_inline(self, tokens: Sequence[int], tensors: Sequence[torch.Tensor], instance_id: int = 1) -> None:
        """Stores by bytes in the message, which every server takes."""
        self("inline commit", commit_store(instance_id, key(tokens), payload(self.release, tensors)))

    def retrieve(
        self,
        tokens: Sequence[int],
        *,
        instance_id: int = 1,
        request_id: str | None = None,
        upto: int | None = None,
        **parts: Any,
    ) -> None:
        """Looks up, reads at most `upto` chunks, frees the rest, ends the session."""
        name = request_id or f"read {len(self.lines)}"
        self("lookup", lookup(tokens, name, **parts))
        status = self("query", query(name))
        hit = (status.ready_chunks or 0) if status is not None else 0
        taken = hit if upto is None else min(hit, upto)
        if taken:
            self.read(key(tokens, end=taken * CHUNK, request_id=name, **parts), instance_id)
        if hit > taken:
            self("free", free(tokens, name, start=taken * CHUNK, end=hit * CHUNK, **parts))
        self("end", end(name))

    def look(self, tokens: Sequence[int], name: str) -> None:
        """Looks up and frees what was found."""
        self("lookup", lookup(tokens, name))
        self("query", query(name))
        self("free", free(tokens, name))

    def read(self, named: p.IPCCacheServerKey, instance_id: int = 1) -> None:
        """PREPARE_RETRIEVE, a look at the contents, COMMIT_RETRIEVE."""
        self.prepare_read(named, instance_id)
        self("commit retrieve", commit_retrieve(instance_id, named))

    def prepare_read(self, named: p.IPCCacheServerKey, instance_id: int = 1) -> None:
        """PREPARE_RETRIEVE and a look at the contents."""
        prepared = self("prepare retrieve", prepare_retrieve(instance_id, named))
        if prepared is not None and prepared.success:
            self.lines[-1] += " = " + " ".join(digest(chunk) for chunk in self._contents(named, prepared))

    def _contents(self, named: p.IPCCacheServerKey, prepared: p.PreparedRetrieve) -> Sequence[torch.Tensor]:
        if prepared.slots is not None:
            return [self._view(slot).clone() for slot in prepared.slots]
        count = (named.end - named.start) // CHUNK
        form = self.client.dialect.payload_form
        return read_payload(memoryview(prepared.data), form, num_tensors=count, max_nbytes=2**24)

    def _view(self, slot: p.Slot) -> torch.Tensor:
        assert self._pool is not None
        tokens = slot.shape[-2]  # another engine may have registered chunks of another length
        [run] = slot_runs(memoryview(self._pool), [slot], tokens)
        return run.view(slot.shape)
