"""This instance known to the server: who it is, and REGISTER / UNREGISTER.

Instance ids and private model names come from the operating system's entropy: a seeded generator or a process id
gives two workers the same one (USERS.md 12, 13). An instance id that is registered already keeps its old geometry, so
an id is never used for a second one. Clients register under a private name and put the real model's name into keys
only: the last registration of a (model, world size) replaces the layout that every engine's lookups use (LAYOUT.md
sections 1 and 6).
"""

from __future__ import annotations

import secrets
import uuid

import attrs

from lmcache_sdk.protocol import Register, Registered, Registration, Unregister
from lmcache_sdk.session.channel import Channel
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.values import PRIVATE_MODEL_PREFIX, InstanceId


@attrs.frozen
class RegisteredShape:
    """The numbers with which the server allocates what an instance stores; made by whoever knows the geometry."""

    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_name: str
    one_plane: bool
    num_physical_slots: int | None = None


def new_instance_id() -> InstanceId:
    """63 random bits, never 0: gRPC and JSON readers take int64."""
    return InstanceId(secrets.randbits(63) or 1)


def private_model_name() -> str:
    """A name that no engine has."""
    return f"{PRIVATE_MODEL_PREFIX}{uuid.uuid4().hex}"


def register(
    channel: Channel, instance_id: InstanceId, model_name: str, shape: RegisteredShape, deadline: Deadline, step: str
) -> Registered:
    """Makes the server know this instance; gives the pool that it names, or empty values for inline."""
    registration = Registration(
        instance_id=instance_id,
        model_name=model_name,
        world_size=1,
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        hidden_dim_size=shape.hidden_dim_size,
        dtype_str=shape.dtype_name,
        use_mla=shape.one_plane,
        num_physical_slots=shape.num_physical_slots,
    )
    return channel.call(Register(registration=registration), deadline, step)


def unregister(channel: Channel, instance_id: InstanceId, deadline: Deadline, step: str) -> None:
    """Makes the server forget this instance. Never while a reservation is open: the server would publish its slots."""
    channel.call(Unregister(instance_id=instance_id), deadline, step, interruptible=False)
