"""Who is registered: instances, and the layouts by model and world size that they and engines stand for.

A registration that is there already is only refreshed: its new layout is ignored. A layout is counted, the last one to
register wins, and it goes with the last that leaves. An instance that is silent for too long is reaped: for `reap`
seconds once it has pinged, for `grace` seconds as long as it never did.
"""

from __future__ import annotations

import attrs

from lmcache_sdk.devserver.clocks import Clock
from lmcache_sdk.devserver.objects import StoredShape
from lmcache_sdk.values import InstanceId

LayoutName = tuple[str, int]
"""Model name and world size."""


class LayoutTable:
    """The layouts that LOOKUP knows."""

    def __init__(self) -> None:
        self._layouts: dict[LayoutName, tuple[StoredShape, int]] = {}

    def add(self, name: LayoutName, layout: StoredShape) -> None:
        """Counts one more, and lets its layout win."""
        self._layouts[name] = (layout, self._count(name) + 1)

    def remove(self, name: LayoutName) -> None:
        """Counts one less; an earlier layout does not come back."""
        if self._count(name) <= 1:
            self._layouts.pop(name, None)
        else:
            self._layouts[name] = (self._layouts[name][0], self._count(name) - 1)

    def _count(self, name: LayoutName) -> int:
        return self._layouts[name][1] if name in self._layouts else 0

    def find(self, name: LayoutName) -> StoredShape | None:
        """The layout that was registered last."""
        return self._layouts[name][0] if name in self._layouts else None


@attrs.define(eq=False, kw_only=True)
class Instance:
    """One registration over ZMQ."""

    model_name: str
    world_size: int
    block_size: int
    use_mla: bool
    layout: StoredShape
    num_groups: int = 1
    last_seen: float
    has_pinged: bool = False

    @property
    def layout_name(self) -> LayoutName:
        """What its layout is counted under."""
        return self.model_name, self.world_size


class InstanceTable:
    """The registrations over ZMQ."""

    def __init__(self, clock: Clock, *, reap: float, grace: float) -> None:
        self.reap = reap
        self.grace = grace
        self._clock = clock
        self._instances: dict[InstanceId, Instance] = {}

    def find(self, instance_id: InstanceId) -> Instance | None:
        """The instance; asking for it is a sign of its life."""
        found = self._instances.get(instance_id)
        if found is not None:
            found.last_seen = self._clock()
        return found

    def add(self, instance_id: InstanceId, instance: Instance) -> None:
        """Enters a new one."""
        self._instances[instance_id] = instance

    def remove(self, instance_id: InstanceId) -> Instance | None:
        """Takes one out."""
        return self._instances.pop(instance_id, None)

    def ping(self, instance_id: InstanceId) -> None:
        """Notes a ping; from the first one on, the shorter patience applies."""
        found = self.find(instance_id)
        if found is not None:
            found.has_pinged = True

    def silent(self) -> list[InstanceId]:
        """Those whose time is up."""
        now = self._clock()
        return [
            instance_id
            for instance_id, found in self._instances.items()
            if now - found.last_seen > (self.reap if found.has_pinged else self.grace)
        ]

    def items(self) -> list[tuple[InstanceId, Instance]]:
        """All of them, in the order they came."""
        return list(self._instances.items())

    def __len__(self) -> int:
        return len(self._instances)
