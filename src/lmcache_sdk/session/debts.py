"""What calls could not give back in time: operations that still owe something, each with the channel its answers come
on.

An operation stays in the book until it has finished, also while somebody works on it: a store of the same tokens must
not begin while an earlier one of them is unresolved (PROTOCOL.md section 6). There is no thread; whoever uses the
session next, or closes it, goes on with the debts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import attrs

from lmcache_sdk.errors import Fate, StoreRejectedError
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.session.interrupts import window
from lmcache_sdk.session.operation import Operation

_AT_A_TIME = 0.5
"""Seconds that one attempt may take while somebody waits for a debt."""


@attrs.define(eq=False, repr=False)
class _Debt:
    key: Hashable
    operation: Operation
    claimed: bool = False


class DebtBook:
    """The debts of one session. `settled` takes back an operation that owes nothing any more."""

    def __init__(self, changed: threading.Condition, settled: Callable[[Operation], None]) -> None:
        self._changed = changed
        self._settled = settled
        self._debts: list[_Debt] = []

    def add(self, key: Hashable, operation: Operation) -> None:
        """Enters an operation; its channel must not be used by another one from here on."""
        with self._changed:
            self._debts.append(_Debt(key, operation))

    def settle(self, deadline: Deadline) -> bool:
        """Goes on with every debt that nobody works on; whether the book is empty now."""
        with self._changed:
            mine = [debt for debt in self._debts if not debt.claimed]
            for debt in mine:
                debt.claimed = True
        for debt in mine:
            finished = False
            try:
                finished = debt.operation.finish(deadline)
            finally:
                with self._changed:
                    debt.claimed = False
                    if finished:
                        self._debts.remove(debt)
                    self._changed.notify_all()
            if finished:
                self._settled(debt.operation)
        with self._changed:
            return not self._debts

    def settle_key(self, key: Hashable, deadline: Deadline, step: str) -> None:
        """Returns once no debt has an open transfer of this key; raises DeadlineExceededError if that takes long."""
        while True:
            with self._changed:
                # an unanswered LOOKUP forbids nothing: a new call has a request id of its own
                owed = [debt for debt in self._debts if debt.key == key and debt.operation.transfer_open]
                if not owed:
                    return
                if all(debt.claimed for debt in owed):
                    self._changed.wait(deadline.capped(_AT_A_TIME).remaining())
            self.settle(deadline.capped(_AT_A_TIME))
            with window():
                pass  # an interruption may come between two attempts
            stuck = next((debt.operation.stuck for debt in owed if debt in self._debts and debt.operation.stuck), "")
            if stuck:
                raise StoreRejectedError(
                    f"{step}: an earlier store of the same tokens holds slots until the server's write TTL: {stuck}",
                    fate=Fate.NOT_SENT,
                )
            deadline.check(
                f"{step}: an earlier call on the same tokens, which the server has not answered", Fate.NOT_SENT
            )

    def give_up(self) -> list[Operation]:
        """Empties the book for good and gives what was in it."""
        with self._changed:
            given_up, self._debts = [debt.operation for debt in self._debts], []
        return given_up

    def __len__(self) -> int:
        return len(self._debts)
