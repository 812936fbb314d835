"""A lock lives here: sockets, threads, deadlines, and everything that must be given back. No tensors."""

from lmcache_sdk.session.addresses import Addresses, check_resolvable, checked_addresses
from lmcache_sdk.session.buffers import BufferPool
from lmcache_sdk.session.deadline import Deadline, checked_timeout
from lmcache_sdk.session.discovery import ServerFacts, discover
from lmcache_sdk.session.interrupts import deferred
from lmcache_sdk.session.leases import ReadLease
from lmcache_sdk.session.operation import Identity, Operation, Probe
from lmcache_sdk.session.probe import HttpProbe
from lmcache_sdk.session.process import OwnProcess
from lmcache_sdk.session.registration import RegisteredShape, new_instance_id, private_model_name
from lmcache_sdk.session.renewal import Renewable
from lmcache_sdk.session.reservations import Reservation, SlotWriter
from lmcache_sdk.session.session import Session
from lmcache_sdk.session.shared_memory import SharedPool, unproven
from lmcache_sdk.session.zmq_transport import HANDSHAKE_STEP, message_buffer

__all__ = [
    "HANDSHAKE_STEP",
    "Addresses",
    "BufferPool",
    "Deadline",
    "HttpProbe",
    "Identity",
    "Operation",
    "OwnProcess",
    "Probe",
    "ReadLease",
    "RegisteredShape",
    "Renewable",
    "Reservation",
    "ServerFacts",
    "Session",
    "SharedPool",
    "SlotWriter",
    "check_resolvable",
    "checked_addresses",
    "checked_timeout",
    "deferred",
    "discover",
    "message_buffer",
    "new_instance_id",
    "private_model_name",
    "unproven",
]
