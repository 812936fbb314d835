"""One call: its keys, its obligations in order, END_SESSION after everything, and the question why nobody answers."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import ConnectionLostError, DeadlineExceededError, KVCacheSDKError
from lmcache_sdk.session import Deadline, Operation
from lmcache_sdk.values import InstanceId
from tests.fix_faults import ignored, late, silence, then
from tests.session.desk import INSTANCE, Desk


@attrs.define(eq=False)
class Debt:
    """An obligation of which a test says what happens."""

    answers: list[bool]
    stuck: str = ""
    forbids_unregister: bool = False
    transfer_open: bool = False
    asked: int = 0
    last_words: int = 0
    raises: KVCacheSDKError | None = None
    work: Callable[[Deadline], bool] | None = None
    """What it takes to fulfil it, instead of the next answer."""

    def fulfil(self, deadline: Deadline) -> bool:
        self.asked += 1
        return self.answers.pop(0) if self.work is None else self.work(deadline)

    def last_resort(self) -> None:
        self.last_words += 1
        if self.raises is not None:
            raise self.raises


@attrs.define(eq=False)
class Oracle:
    """A probe that knows which instances and models the server has forgotten."""

    left: set[object] = attrs.field(factory=set)
    asked: list[object] = attrs.field(factory=list)

    def instance_has_left(self, instance_id: InstanceId, deadline: Deadline) -> bool:
        self.asked.append(instance_id)
        return instance_id in self.left

    def model_has_left(self, model_name: str, deadline: Deadline) -> bool:
        self.asked.append(model_name)
        return model_name in self.left

    def close(self) -> None:
        pass


def probed(desk: Desk, oracle: Oracle, seconds: float = 60) -> Operation:
    old = desk.operation
    return Operation("retrieve", desk.channel, old.identity, old.tokens, "", desk.within(seconds), oracle)


def test_keys_start_at_the_first_token_and_carry_the_call() -> None:
    operation = Desk().operation
    key = operation.key(1, 2)
    assert (key.start, key.end, key.worker_id, key.model_name, key.world_size) == (4, 12, 0, "m", 1)
    assert key.token_ids is operation.tokens and key.request_id == operation.request_id
    assert operation.num_chunks == 3


def test_every_call_has_a_request_id_of_its_own() -> None:
    ids = {Desk(name="store").operation.request_id for _ in range(50)}
    assert len(ids) == 50 and all(request_id.startswith("store-") for request_id in ids)


def test_a_call_that_said_nothing_ends_nothing() -> None:
    desk = Desk()
    assert desk.finish() and desk.server.requests == []


def test_what_was_said_is_ended_once() -> None:
    desk = Desk()
    desk.operation.call(p.Noop())
    assert desk.finish() and desk.finish()
    assert desk.server.names() == ["Noop", "EndSession"]
    assert desk.server.asked(p.EndSession)[0].request_id == desk.operation.request_id


@pytest.mark.parametrize("action", [silence, ignored, late(99.0)])
def test_an_end_that_is_not_answered_is_no_error_of_the_call(action: object) -> None:
    """No engine holds the model any more: the session is gone all the same."""
    assert callable(action)
    desk = Desk()
    desk.server.on(p.EndSession, action)
    desk.operation.call(p.Noop())
    assert desk.finish(0.5)
    assert desk.clock.now == 1000  # nobody waits for it
    assert desk.finish(0.5) and desk.server.names().count("EndSession") == 1


def test_obligations_come_in_order_and_before_the_end() -> None:
    desk = Desk()
    first, second = Debt([False, True]), Debt([True])
    desk.operation.owe(first)
    desk.operation.owe(second)
    desk.operation.call(p.Noop())
    assert not desk.finish()
    assert (first.asked, second.asked) == (1, 0) and desk.operation.owing
    assert "EndSession" not in desk.server.names()
    assert desk.finish()
    assert (first.asked, second.asked) == (2, 1) and not desk.operation.owing
    assert desk.ended_last_and_once()


def test_an_obligation_that_is_done_early_is_not_asked() -> None:
    desk = Desk()
    debt = Debt([])
    desk.operation.owe(debt)
    desk.operation.fulfilled(debt)
    assert desk.finish() and debt.asked == 0


def test_nothing_is_owed_over_a_lost_connection() -> None:
    desk = Desk()
    debt = Debt([False])
    desk.operation.owe(debt)
    desk.channel.broken = True
    assert desk.finish() and debt.asked == 0 and not desk.operation.owing


def test_the_last_words_of_all_are_said_whatever_one_raises() -> None:
    desk = Desk()
    debts = [Debt([], raises=ConnectionLostError("gone")), Debt([])]
    for debt in debts:
        desk.operation.owe(debt)
    desk.operation.give_up()
    assert [debt.last_words for debt in debts] == [1, 1]


def test_it_tells_what_is_stuck_and_what_forbids_to_leave() -> None:
    desk = Desk()
    assert (desk.operation.stuck, desk.operation.forbids_unregister) == ("", False)
    desk.operation.owe(Debt([]))
    desk.operation.owe(Debt([], stuck="slots", forbids_unregister=True))
    assert (desk.operation.stuck, desk.operation.forbids_unregister) == ("slots", True)


def test_repr() -> None:
    desk = Desk()
    desk.operation.owe(Debt([]))
    assert repr(desk.operation) == "<Operation retrieve 3 chunks 1 owed>"


# ---- silence ---------------------------------------------------------------------------------------------------------


def test_a_server_that_has_forgotten_us_is_found_out_long_before_the_deadline() -> None:
    desk = Desk()
    operation = probed(desk, Oracle(left={INSTANCE}))
    desk.server.on(p.PrepareRetrieve, ignored)
    request = p.PrepareRetrieve(key=operation.key(0, 1), instance_id=INSTANCE)
    with pytest.raises(ConnectionLostError, match="no longer knows this instance") as caught:
        operation.call(request)
    assert "PREPARE_RETRIEVE" in str(caught.value)
    assert desk.clock.now < 1005


def test_a_server_that_is_only_slow_is_waited_for() -> None:
    desk = Desk()
    oracle = Oracle()
    operation = probed(desk, oracle)
    desk.server.on(p.Noop, late(40.0))
    assert operation.call(p.Noop()) == p.NoopAnswer("OK")
    assert desk.clock.now == pytest.approx(1040.0)
    assert 1 <= len(oracle.asked) <= 6


def test_a_silent_server_that_knows_us_ends_at_the_deadline() -> None:
    desk = Desk()
    operation = probed(desk, Oracle(), 10.0)
    desk.server.on(p.Noop, ignored)
    with pytest.raises(DeadlineExceededError) as caught:
        operation.call(p.Noop())
    assert caught.value.step == "retrieve: NOOP" and desk.clock.now == pytest.approx(1010.0)


def test_an_answer_at_once_asks_nobody() -> None:
    desk = Desk()
    oracle = Oracle(left={INSTANCE})
    assert probed(desk, oracle).call(p.Noop()) == p.NoopAnswer("OK")
    assert oracle.asked == []


def test_a_short_deadline_leaves_no_time_for_questions() -> None:
    desk = Desk()
    oracle = Oracle(left={INSTANCE})
    operation = probed(desk, oracle, 1.0)
    desk.server.on(p.Noop, ignored)
    with pytest.raises(DeadlineExceededError):
        operation.call(p.Noop())
    assert desk.clock.now == pytest.approx(1001.0)


def test_a_model_that_has_left_is_known_by_the_probe_only() -> None:
    desk = Desk()
    assert not desk.operation.model_has_left(desk.within(1))
    assert probed(desk, Oracle(left={"m"})).model_has_left(desk.within(1))
    assert not probed(desk, Oracle()).model_has_left(desk.within(1))


def test_locks_of_a_model_that_has_left_are_given_back_by_reading() -> None:
    """FREE is never answered then and releases nothing; a read needs no registration of the model (section 13)."""
    for release in ("0.5.1", "0.5.5", "0.5.6"):
        desk = Desk(release, cached=2)
        desk.operation = probed(desk, Oracle(left={"m"}))
        desk.server.on(p.FreeLookupLocks, ignored)
        desk.lease().acquire()
        assert desk.finish(2.0)
        assert len(desk.freed()) == 1
        assert [desk.range_of(request.key) for request in desk.server.asked(p.PrepareRetrieve)] == [(0, 2)]
        assert desk.server.held().read_locks == 0 and desk.server.held().stolen == 0
        assert desk.ended_last_and_once()


def test_a_loss_while_something_is_owed_is_no_error_of_the_clean_up() -> None:
    desk = Desk(cached=2)
    desk.lease().acquire()
    desk.server.on(p.FreeLookupLocks, then(silence, lambda: setattr(desk.memory, "lost", True)))
    desk.finish()
    assert not desk.operation.owing and desk.finish()


def test_a_loss_before_something_can_be_given_back_is_no_error_of_the_clean_up() -> None:
    desk = Desk(cached=2)
    desk.lease().acquire()
    desk.memory.lost = True
    desk.finish()
    assert not desk.operation.owing and desk.finish()
