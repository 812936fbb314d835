"""An open view whose context is dropped, that falls in a cycle, or that a forked child has too: the locks go back."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Final

import pytest
import torch

from lmcache_sdk import KVView, SessionClosedError
from tests.facade.rig import CHUNK, TOKENS, Rig
from tests.fix_fake_server import NOTHING
from tests.fix_forks import held_by_another_thread, in_child

pytestmark = pytest.mark.usefixtures("hasty")


def entered(rig: Rig, timeout: float = 20.0) -> list[KVView]:
    """One open view, in a list so that a test can drop it."""
    return [rig.connect(timeout).view(TOKENS).__enter__()]


# ---- dropped ---------------------------------------------------------------------------------------------------------


def test_a_view_dropped_in_a_cycle_gives_back(rig: Rig) -> None:
    rig.cache(2)
    ctx = rig.connect()
    cycle: list[object] = [ctx.view(TOKENS).__enter__()]
    with pytest.warns(ResourceWarning, match="dropped inside its block"):  # noqa: PT031  # the collector may be early
        cycle.append(cycle)
        del cycle
        gc.collect()
    assert rig.server.held() == NOTHING
    assert ctx.retrieve(TOKENS) is not None
    assert rig.server.held() == NOTHING


@pytest.mark.parametrize("context_first", [True, False])
def test_a_view_dropped_together_with_its_context_gives_back(rig: Rig, context_first: bool) -> None:
    rig.cache(2)
    ctx = rig.connect()
    rig.contexts.clear()
    view = ctx.view(TOKENS).__enter__()
    cycle: list[object] = [ctx, view] if context_first else [view, ctx]
    del ctx, view
    with pytest.warns(ResourceWarning, match="dropped"):  # noqa: PT031  # the collector may be early
        cycle.append(cycle)
        del cycle
        gc.collect()
    rig.server.wait_until(lambda: rig.server.instances == {})
    assert rig.server.held() == NOTHING


def test_an_open_view_keeps_its_context(rig: Rig) -> None:
    cached = rig.cache(2)
    ctx = rig.connect()
    rig.contexts.clear()
    view = ctx.view(TOKENS).__enter__()
    del ctx
    gc.collect()
    assert len(rig.server.instances) == 1
    assert torch.equal(torch.cat(list(view), dim=2), cached)
    view.check_alive()
    with pytest.warns(ResourceWarning, match="dropped without close"):  # noqa: PT031  # as above
        view.__exit__(None, None, None)
        gc.collect()
    rig.server.wait_until(lambda: rig.server.instances == {})
    assert rig.server.held() == NOTHING


# ---- forked ----------------------------------------------------------------------------------------------------------


def leave(views: list[KVView]) -> None:
    views[0].__exit__(None, None, None)


def leave_by_an_error(views: list[KVView]) -> None:
    try:
        raise ValueError
    except ValueError as error:
        views[0].__exit__(ValueError, error, error.__traceback__)


def drop_it(views: list[KVView]) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        views.clear()
        gc.collect()
    assert said == []  # the block is the parent's


def read(views: list[KVView]) -> None:
    for use in (lambda: views[0][0], lambda: len(views[0]), lambda: list(views[0]), views[0].check_alive):
        with pytest.raises(SessionClosedError, match="fork"):
            use()


def read_and_leave(views: list[KVView]) -> None:
    read(views)
    leave(views)


WAYS: Final = (leave, leave_by_an_error, drop_it, read, read_and_leave)


@pytest.mark.parametrize("way", WAYS)
def test_a_forked_child_leaves_the_view_to_its_parent(rig: Rig, way: Callable[[list[KVView]], None]) -> None:
    cached = rig.cache(2)
    views = entered(rig)
    said = rig.said()
    assert in_child(lambda: way(views)) == 0
    assert rig.said() == said
    assert rig.server.held().read_locks == (2 if rig.shm else 0)
    assert torch.equal(torch.cat(list(views[0]), dim=2), cached)
    leave(views)
    assert rig.server.held() == NOTHING
    [ctx] = rig.contexts
    assert ctx.lookup(TOKENS).hit_tokens == 2 * CHUNK


def test_a_forked_child_waits_for_no_lock_of_the_parent(rig: Rig) -> None:
    """Whoever holds a lock at the time of the fork is not there in the child to give it back."""
    rig.cache(2)
    views = entered(rig)
    [ctx] = rig.contexts
    endpoint = ctx._now.endpoint

    def work() -> None:
        leave(views)
        ctx.close()

    for lock in (endpoint.buffers._lock, endpoint.session._changed, endpoint.session._channels._lock):
        with held_by_another_thread(lock):
            assert in_child(work) == 0
    leave(views)
    assert rig.server.held() == NOTHING


def test_what_the_link_holds_is_given_back_once_and_in_its_process(inline_rig: Rig) -> None:
    link = inline_rig.connect()._link
    released: list[str] = []
    link.hold("x", lambda: released.append("x"))

    def work() -> None:
        link.let_go("x")
        link.close()
        assert released == []

    assert in_child(work) == 0
    link.let_go("x")
    link.let_go("x")
    assert released == ["x"]
