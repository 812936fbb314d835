"""The handshake of connect, in its order, under one deadline.

Addresses, release, configuration, status, geometry, registration, pool, proof: each step refuses what the next one
could be hurt by, and whatever was taken is given back when a later step fails. No ZMQ frame leaves before the release
is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import attrs

from lmcache_sdk.errors import (
    ArgumentTypeError,
    DeadlineExceededError,
    Fate,
    KVCacheSDKError,
    LayoutError,
    NotRegisteredError,
    UnsupportedError,
)
from lmcache_sdk.facade.canary import CANARY_LAYOUT, prove
from lmcache_sdk.facade.transfer import Endpoint
from lmcache_sdk.layout import KVLayout, check_uncompressed, dtype_name, layout_from_document
from lmcache_sdk.protocol import (
    CacheContextEntry,
    engine_driven_entries,
    model_entries,
    parse_layout,
    registered_models,
)
from lmcache_sdk.session import (
    HANDSHAKE_STEP,
    Addresses,
    BufferPool,
    Deadline,
    HttpProbe,
    Identity,
    RegisteredShape,
    ServerFacts,
    Session,
    check_resolvable,
    deferred,
    discover,
    private_model_name,
)
from lmcache_sdk.values import InstanceId

TRANSPORTS: Final = ("shm", "inline")


@attrs.frozen(eq=False, repr=False)
class ConnectArguments:
    """The checked arguments of connect."""

    addresses: Addresses
    model_name: str
    layout: KVLayout | None
    dialect: str | None
    api_key: str | None
    transport: str | None
    buffers: BufferPool
    """The context's memory for results, which outlives its connections."""


@attrs.frozen(eq=False, repr=False)
class ModelFacts:
    """What is known of the model's cache."""

    layout: KVLayout | None
    """The geometry for stores; None when nobody has told it."""
    published: KVLayout | None
    """The geometry that the server told at connect."""
    layout_problem: str
    """Why `layout` is None although the server publishes one; empty otherwise."""
    prewarm: bool
    """No engine holds the model: the real name is registered, with the caller's layout."""


@attrs.frozen(eq=False, repr=False)
class Connection:
    """What connect made."""

    endpoint: Endpoint
    facts: ServerFacts
    model: ModelFacts
    probe: HttpProbe


def open_connection(
    arguments: ConnectArguments, deadline: Deadline, opening: Callable[[Session], None] | None = None
) -> Connection:
    """Does the handshake; raises one of the errors of `kvcache.connect`. `opening` is told the session that is made."""
    facts = discover(arguments.addresses, arguments.api_key, arguments.dialect, deadline)
    model = _model_facts(facts, arguments)
    check_resolvable(arguments.addresses)
    session = Session(arguments.addresses, facts.dialect)
    probe = HttpProbe(arguments.addresses, arguments.api_key)
    session.grace = facts.config.mp.worker_registration_grace_seconds
    session.in_order = facts.config.mp.max_cpu_workers == 1
    with deferred(), contextlib.ExitStack() as stack:
        stack.callback(probe.close)
        stack.callback(session.close)
        if opening is not None:
            opening(session)
        try:
            endpoint = _open_session(session, facts, model, arguments, deadline)
        except DeadlineExceededError as error:
            raise _named_dialect(explained(error, probe, None), facts) from error
        session.probe = probe
        stack.pop_all()
    return Connection(endpoint, facts, model, probe)


def _open_session(
    session: Session, facts: ServerFacts, model: ModelFacts, arguments: ConnectArguments, deadline: Deadline
) -> Endpoint:
    shape = registered_shape(model.layout or CANARY_LAYOUT, facts)
    name = arguments.model_name if model.prewarm else private_model_name()
    instance_id, registered = session.register(name, shape, deadline)
    _check_transport(arguments.transport, "shm" if registered.shm_name else "inline", facts)
    session.map_pool(registered)
    session.opened()
    l1 = facts.status.storage_manager.l1_manager
    identity = Identity(arguments.model_name, 1, instance_id, facts.chunk_size)
    ttls = (l1.read_ttl_seconds, l1.write_ttl_seconds)
    endpoint = Endpoint(session, identity, *ttls, l1.memory_total_bytes, arguments.buffers)
    if session.pool is not None or facts.dialect_was_named:
        canary_name = private_model_name()
        canary_id, _ = session.register(canary_name, registered_shape(CANARY_LAYOUT, facts), deadline)
        prove(attrs.evolve(endpoint, identity=Identity(canary_name, 1, canary_id, facts.chunk_size)), deadline)
        session.unregister(canary_id, deadline)
    return endpoint


def _named_dialect(error: DeadlineExceededError, facts: ServerFacts) -> DeadlineExceededError:
    """A server does not answer what it cannot read: when the caller chose the wire, that is the likely cause."""
    if not facts.dialect_was_named or facts.version == facts.dialect.release:
        return error
    reported = f"reports version {facts.version!r}" if facts.version else "reports no version"
    text = f"{error}. The server {reported}: it may not speak the wire of dialect={facts.dialect.release!r}"
    return DeadlineExceededError(text, step=error.step, fate=error.fate)


def explained(error: DeadlineExceededError, probe: HttpProbe, instance_id: InstanceId | None) -> DeadlineExceededError:
    """A timeout with its likely cause, unless it was a wait for another call of ours."""
    if error.fate is Fate.NOT_SENT and HANDSHAKE_STEP not in error.step:
        return error
    return DeadlineExceededError(f"{error} ({probe.why_silent(instance_id)})", step=error.step, fate=error.fate)


def with_layout(connection: Connection, layout: KVLayout, deadline: Deadline) -> Connection:
    """The same connection with another layout for stores, registered under an instance id of its own."""
    session = connection.endpoint.session
    shape = registered_shape(layout, connection.facts)
    instance_id, _ = session.register(private_model_name(), shape, deadline)
    identity = attrs.evolve(connection.endpoint.identity, instance_id=instance_id)
    endpoint = attrs.evolve(connection.endpoint, identity=identity)
    return attrs.evolve(connection, endpoint=endpoint, model=attrs.evolve(connection.model, layout=layout))


def registered_shape(layout: KVLayout, facts: ServerFacts) -> RegisteredShape:
    """The numbers of a registration with this geometry."""
    return RegisteredShape(
        block_size=layout.tokens_per_block,
        num_layers=layout.num_layers,
        hidden_dim_size=layout.hidden_dim,
        dtype_name=dtype_name(layout.dtype),
        one_plane=layout.one_plane,
        num_physical_slots=layout.slots_per_chunk(facts.chunk_size),
    )


def _check_transport(asked: str | None, found: str, facts: ServerFacts) -> None:
    if asked is None or asked == found:
        return
    if asked == "shm":
        wanted = facts.config.mp.shm_name
        detail = (
            f"it was started with --shm-name {wanted!r} and announces no pool all the same: /dev/shm may be too "
            "small, or its memory lazily allocated (--no-l1-use-lazy)"
            if wanted
            else "start it with --shm-name NAME"
        )
    else:
        detail = "start it with --shm-name ''"
    raise UnsupportedError(
        f"connect: transport={asked!r} was asked for, but the server decides and moves tensors {found}; {detail}",
        request="connect",
        dialect=facts.dialect.release,
    )


# ---- the model ------------------------------------------------------------------------------------------------------


def _model_facts(facts: ServerFacts, arguments: ConnectArguments) -> ModelFacts:
    entries = model_entries(facts.status, arguments.model_name)
    if entries:
        _check_world_size(entries, facts)
        return _published(entries, arguments)
    driven = engine_driven_entries(facts.status, arguments.model_name)
    if any(entry.world_size > 1 for entry in driven.values()):
        raise _tensor_parallel(arguments.model_name, max(entry.world_size for entry in driven.values()), facts)
    if not driven and arguments.layout is None:
        raise _not_registered(arguments.model_name, facts)
    if arguments.layout is not None:
        check_uncompressed(arguments.layout)
    return ModelFacts(arguments.layout, None, "", prewarm=not driven)


def _check_world_size(entries: dict[str, CacheContextEntry], facts: ServerFacts) -> None:
    largest = max(entries.values(), key=lambda entry: entry.world_size)
    if largest.world_size > 1:
        raise _tensor_parallel(largest.model_name, largest.world_size, facts)


def _published(entries: dict[str, CacheContextEntry], arguments: ConnectArguments) -> ModelFacts:
    """The layout that the engine's entries name; they must agree with each other and with the caller's."""
    layouts: dict[str, KVLayout] = {}
    problem = ""
    for path, entry in entries.items():
        where = f"{path}.kv_cache_layout"
        try:
            document = parse_layout(entry.kv_cache_layout, where)
            layouts[path] = layout_from_document(document, where)
        except UnsupportedError:
            raise
        except KVCacheSDKError as error:
            problem = str(
                error
            )  # an object describes itself: what cannot be decoded prevents storing, never retrieving
    if len(set(layouts.values())) > 1:
        shown = "; ".join(f"{path}: {layout.describe()}" for path, layout in layouts.items())
        raise LayoutError(f"connect: engines registered {arguments.model_name!r} with different layouts: {shown}")
    found = None if problem else next(iter(layouts.values()), None)
    if found is not None:
        check_uncompressed(found)
    if arguments.layout is None:
        return ModelFacts(found, found, problem, prewarm=False)
    if found is not None and not same_objects(found, arguments.layout):
        raise LayoutError(
            f"connect: layout={arguments.layout.describe()} was given, but the engine's layout of "
            f"{arguments.model_name!r} is {found.describe()}; leave layout out to use the engine's"
        )
    check_uncompressed(arguments.layout)
    return ModelFacts(found or arguments.layout, found, "", prewarm=False)


def same_objects(one: KVLayout, other: KVLayout) -> bool:
    """Whether two layouts store the same bytes: heads and blocks may be unknown in one of them."""
    return (one.num_layers, one.planes, one.hidden_dim, one.dtype) == (
        other.num_layers,
        other.planes,
        other.hidden_dim,
        other.dtype,
    )


def _tensor_parallel(model_name: str, world_size: int, facts: ServerFacts) -> UnsupportedError:
    return UnsupportedError(
        f"connect: {model_name!r} is registered with world_size {world_size}: its cache is cut into one shard per "
        "rank, which this version does not put together; it would return a part of it",
        request="connect",
        dialect=facts.dialect.release,
    )


def _not_registered(model_name: str, facts: ServerFacts) -> NotRegisteredError:
    known = registered_models(facts.status)
    listed = ", ".join(map(repr, known)) if known else "none"
    return NotRegisteredError(
        f"connect: no engine has registered {model_name!r} (registered: {listed}). Check the name, start the engine "
        "first, or pass layout=KVLayout(...) to store before an engine comes",
        registered_models=known,
    )


def checked_layout(layout: object) -> KVLayout | None:
    """The caller's layout argument, checked."""
    if layout is None or isinstance(layout, KVLayout):
        return layout
    raise ArgumentTypeError(f"layout: expected a KVLayout, got {type(layout).__name__}; see KVLayout.from_status")
