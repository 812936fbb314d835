"""The life of a context: closed, dropped, forked, used by many threads, and reconnected when its server went away."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Final

import pytest
import torch

import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import (
    ArgumentTypeError,
    ConnectionLostError,
    Fate,
    LayoutChangedError,
    LMCacheKVCacheContext,
    NotRegisteredError,
    SessionClosedError,
)
from lmcache_sdk import protocol as p
from tests.facade.rig import CHUNK, TOKENS, Rig, kv, raw, status_entry
from tests.fix_fake_server import NOTHING, FakeServer
from tests.fix_faults import ignored, late, silence
from tests.fix_forks import in_child
from tests.session.pages import status_page
from tests.session.ports import page

pytestmark = pytest.mark.usefixtures("hasty")

MANY: Final = 8


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def in_threads(*calls: Callable[[], object]) -> list[object]:
    """Runs calls side by side; what each gave, or raised."""
    answers: list[object] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            answers[number] = calls[number]()
        except BaseException as error:  # noqa: BLE001  # handed to the test
            answers[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return answers


# ---- closed ----------------------------------------------------------------------------------------------------------


def test_close_is_idempotent_in_every_form(rig: Rig) -> None:
    ctx = rig.connect()
    ctx.close()
    ctx.close()
    lmc_sdk.close(ctx)
    with ctx:
        pass
    assert rig.server.instances == {} and ctx.closed


def test_after_close_calls_say_so_and_facts_stay(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect()
    facts = (ctx.model_name, ctx.chunk_size, ctx.layout, ctx.dialect, ctx.server_version, ctx.transport)
    ctx.close()
    said = rig.said()
    calls: list[Callable[[], object]] = [
        lambda: ctx.lookup(TOKENS),
        lambda: ctx.retrieve(TOKENS),
        lambda: ctx.retrieve([]),
        lambda: ctx.store(kv(), TOKENS),
        lambda: lmc_sdk.store(ctx, kv(), TOKENS),
    ]
    for call in calls:
        with pytest.raises(SessionClosedError, match=r"connect\(\)") as caught:
            call()
        assert caught.value.fate is Fate.NOT_SENT
    assert rig.said() == said
    assert facts == (ctx.model_name, ctx.chunk_size, ctx.layout, ctx.dialect, ctx.server_version, ctx.transport)


def test_calls_in_flight_at_a_close_fail_at_once_and_leave_nothing(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect(30)
    rig.server.always(p.QueryPrefetchStatus, late(0.3))

    def close() -> None:
        rig.server.wait_until(lambda: len(rig.server.asked(p.QueryPrefetchStatus)) >= 4 + (2 if rig.shm else 0))
        ctx.close()

    with within(6):
        *answers, _ = in_threads(*[lambda n=n: ctx.lookup([n, *TOKENS]) for n in range(4)], close)
    assert all(isinstance(answer, SessionClosedError) for answer in answers), answers
    assert rig.server.held() == NOTHING and rig.server.instances == {}


def test_another_context_lives_on(rig: Rig) -> None:
    cached = rig.cache(2)
    one, other = rig.connect(), rig.connect()
    one.close()
    found = other.retrieve(TOKENS)
    assert found is not None and torch.equal(found, cached)


def test_what_is_no_context_is_refused_by_name() -> None:
    for wrong in (None, "ctx", object()):
        for call in (lmc_sdk.close, lambda c: lmc_sdk.retrieve(c, [1]), lambda c: lmc_sdk.store(c, kv(), TOKENS)):
            with pytest.raises(ArgumentTypeError, match=r"^ctx: "):
                call(wrong)  # type: ignore[arg-type]  # that is the point


# ---- dropped ---------------------------------------------------------------------------------------------------------


def test_a_dropped_context_warns_unregisters_and_frees_everything(rig: Rig) -> None:
    """That no descriptor and no mapping is left is what `no_leaks` looks at."""
    rig.cache(2)
    ctx = rig.connect()
    ctx.retrieve(TOKENS)
    gone = weakref.ref(ctx)
    rig.contexts.clear()
    dropped = [ctx]
    del ctx
    with pytest.warns(ResourceWarning, match="dropped without close"):
        dropped.clear()
    gc.collect()
    assert gone() is None
    rig.server.wait_until(lambda: rig.server.instances == {})
    assert rig.server.held() == NOTHING


def test_many_dropped_contexts(inline_rig: Rig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(5):
            inline_rig.connect()
            inline_rig.contexts.clear()
        gc.collect()
    inline_rig.server.wait_until(lambda: inline_rig.server.instances == {})


def test_a_closed_context_is_dropped_in_silence(rig: Rig) -> None:
    ctx = rig.connect()
    ctx.close()
    rig.contexts.clear()
    del ctx
    gc.collect()


def test_many_cycles_leave_nothing(rig: Rig) -> None:
    rig.cache(1)
    before = set(rig.server.objects)
    for _ in range(5):
        with rig.connect() as ctx:
            assert ctx.lookup(TOKENS).hit_tokens == CHUNK
    assert rig.server.instances == {} and rig.server.held() == NOTHING
    assert len(set(rig.server.objects) - before) == (5 if rig.shm else 0)  # one object of each proof


# ---- forked ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_is_told_so_at_once_and_harms_nobody(rig: Rig) -> None:
    cached = rig.cache(2)
    ctx = rig.connect(10)

    def work() -> None:
        began = time.monotonic()
        for call in (lambda: ctx.retrieve(TOKENS), lambda: ctx.lookup(TOKENS), lambda: ctx.store(kv(), TOKENS)):
            with pytest.raises(SessionClosedError, match="fork"):
                call()
        ctx.close()
        assert time.monotonic() - began < 5

    assert in_child(work) == 0
    found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, cached)
    ctx.close()
    assert rig.server.held() == NOTHING and rig.server.instances == {}


def test_a_forked_child_connects_for_itself(rig: Rig) -> None:
    cached = rig.cache(2)
    ctx = rig.connect()
    assert ctx.retrieve(TOKENS) is not None

    def work() -> None:
        with rig.connect(10) as own:
            found = own.retrieve(TOKENS)
            assert found is not None and torch.equal(found, cached)

    assert in_child(work) == 0
    assert ctx.retrieve(TOKENS) is not None
    assert rig.server.held() == NOTHING


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_threads_read_the_same_and_other_tokens(rig: Rig) -> None:
    cached = rig.cache(3)
    ctx = rig.connect(30)
    lengths = [CHUNK * (1 + n % 3) for n in range(MANY)]
    answers = in_threads(*[lambda n=n: ctx.retrieve(TOKENS[:n]) for n in lengths])
    for length, found in zip(lengths, answers, strict=True):
        assert isinstance(found, torch.Tensor) and torch.equal(found, cached[:, :, :length])
    assert rig.server.held() == NOTHING


def test_threads_store_the_same_tokens_and_one_of_them_wins_whole(rig: Rig) -> None:
    """Of two stores in flight the second's COMMIT would publish the first's half-written slots."""
    ctx = rig.connect(30)
    rig.server.always(p.PrepareStore, late(0.02))
    answers = in_threads(*[lambda n=n: ctx.store(kv(seed=n), TOKENS) for n in range(MANY)])
    assert all(answers), answers
    winner = [raw(kv(seed=n)[:, :, :CHUNK]) for n in range(MANY)].index(rig.cached(0) or b"")
    chunks = [raw(kv(seed=winner)[:, :, i * CHUNK : (i + 1) * CHUNK]) for i in range(3)]
    assert [rig.cached(index) for index in range(3)] == chunks
    assert sorted(answer.written_chunks for answer in answers) == [0] * (MANY - 1) + [3]  # type: ignore[attr-defined]  # results
    assert rig.server.held() == NOTHING


# ---- a server that went away -----------------------------------------------------------------------------------------


def test_a_restarted_server_is_connected_to_again(rig: Rig) -> None:
    ctx = rig.connect()
    assert ctx.store(kv(), TOKENS)
    first = {request.registration.instance_id for request in rig.server.asked(p.Register)}
    rig.restart()
    assert ctx.retrieve(TOKENS) is None
    assert not first & {request.registration.instance_id for request in rig.server.asked(p.Register)}
    assert ctx.store(kv(seed=1), TOKENS)
    found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, kv(seed=1))
    ctx.close()
    assert rig.server.held() == NOTHING and rig.server.instances == {}


def test_a_server_that_stays_away_is_a_loss_and_no_miss(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect()
    ctx.retrieve(TOKENS)
    rig.port.close()
    for call in (lambda: ctx.retrieve(TOKENS), lambda: ctx.store(kv(), TOKENS), lambda: ctx.lookup(TOKENS)):
        with within(6), pytest.raises(ConnectionLostError, match="connecting again failed"):
            call()
    with within(4):
        ctx.close()


@pytest.mark.parametrize("change", ["chunk size", "layout", "release", "model"])
def test_a_server_that_came_back_as_another_one(rig: Rig, change: str) -> None:
    ctx = rig.connect()
    ctx.retrieve(TOKENS)
    rig.restart(chunk_size=8 if change == "chunk size" else CHUNK)
    kind: type[Exception] = LayoutChangedError
    if change == "chunk size":
        rig.http.pages["/status"] = lambda: status_page(chunk_size=8, cache_context_meta=rig.engines)
    elif change == "layout":
        rig.engines["7"] = status_entry(engine_kv_concrete_shape="2 x [8, 2, 1, 4, 8]")
        rig.engines["7"]["kv_cache_layout"]["cache_size_per_token"] = 128
    elif change == "release":
        rig.http.pages["/lmc_version"] = page("0.5.5")
    else:
        rig.engines.clear()
        kind = NotRegisteredError
    with pytest.raises(kind) as caught:
        ctx.retrieve(TOKENS)
    if isinstance(caught.value, LayoutChangedError):
        assert caught.value.before != caught.value.after and change in str(caught.value)


def test_a_store_whose_fate_is_unknown_is_not_tried_again_on_the_same_server(shm_rig: Rig) -> None:
    """The first PREPARE may only be late: a second one of the same tokens must not be sent."""
    ctx = shm_rig.connect()
    server = shm_rig.server
    server.on(p.PrepareStore, silence)
    lost = in_threads(lambda: ctx.store(kv(), TOKENS), lambda: _cut(shm_rig, server))[0]
    assert isinstance(lost, ConnectionLostError) and lost.fate is Fate.UNKNOWN
    assert len(server.asked(p.PrepareStore)) == 1
    ctx.close()
    assert server.held().unwritten == 0


def _cut(rig: Rig, server: FakeServer) -> None:
    """The connection ends while PREPARE_STORE is out, and the same server is there again."""
    server.wait_until(lambda: bool(server.asked(p.PrepareStore)))
    rig.restart(server)


def test_a_retrieve_is_tried_again_on_the_same_server(rig: Rig) -> None:
    cached = rig.cache(2)
    ctx = rig.connect()
    server = rig.server
    server.on(p.Lookup, ignored)
    before = len(server.asked(p.Lookup))

    def cut() -> None:
        server.wait_until(lambda: len(server.asked(p.Lookup)) > before)
        rig.restart(server)

    found = in_threads(lambda: ctx.retrieve(TOKENS), cut)[0]
    assert isinstance(found, torch.Tensor) and torch.equal(found, cached)


def test_an_instance_that_the_server_has_forgotten_is_registered_anew(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transfers of an unregistered instance are never answered; HTTP tells."""
    monkeypatch.setattr("lmcache_sdk.session.operation._SILENCE_SECONDS", 0.2)
    cached = rig.cache(2)
    ctx = rig.connect(30)
    rig.server.instances.clear()
    with within(10):
        found = ctx.retrieve(TOKENS)
    assert found is not None and torch.equal(found, cached)
    assert len(rig.server.instances) == 1


def test_a_type_of_its_own() -> None:
    names = {name for name in vars(LMCacheKVCacheContext) if not name.startswith("_")}
    assert names == {
        *("model_name", "transport", "chunk_size", "layout", "dialect", "server_version", "closed"),
        *("lookup", "retrieve", "view", "store", "close"),
    }
    attributes = vars(LMCacheKVCacheContext)
    for name in ("model_name", "transport", "chunk_size", "layout", "dialect", "server_version", "closed"):
        assert isinstance(attributes[name], property) and attributes[name].fset is None
