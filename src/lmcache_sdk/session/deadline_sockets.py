"""Sockets whose every operation takes what remains of one deadline, plain and over TLS.

Over TLS, trusted are the system's authorities (OpenSSL's SSL_CERT_FILE and SSL_CERT_DIR name others) and those that
requests brings; the certificate must be of the host that was asked for. The only importer of requests, which it imports
with the first https:// address: that takes longer than everything else.
"""

from __future__ import annotations

import socket
import ssl

from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.values import override


class Bound:
    """The deadline that a conversation's connection is bound to now."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline


class _Armed(socket.socket):
    """http.client reads through `recv_into`, whatever drips."""

    bound: Bound

    def _arm(self) -> None:
        remaining = self.bound.deadline.remaining()
        if remaining <= 0:
            raise TimeoutError("the deadline passed")
        self.settimeout(remaining)

    @override
    def recv_into(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # arguments pass through as it came
        self._arm()
        return super().recv_into(*args, **kwargs)

    @override
    def sendall(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # arguments pass through as it came
        self._arm()
        return super().sendall(*args, **kwargs)


class DeadlineSocket(_Armed):
    """A TCP connection."""


class _DeadlineTLSSocket(_Armed, ssl.SSLSocket):
    """The same behind a TLS handshake."""


def connected(host: str, port: int, bound: Bound) -> DeadlineSocket:
    """A connection, with nothing sent."""
    remaining = bound.deadline.remaining()
    if remaining <= 0:
        raise TimeoutError("the deadline passed")
    made = DeadlineSocket(fileno=socket.create_connection((host, port), remaining).detach())
    made.bound = bound
    return made


def secured(made: DeadlineSocket, host: str, context: ssl.SSLContext) -> socket.socket:
    """The same connection after a TLS handshake; raises ssl.SSLError, a kind of OSError, when it fails."""
    made.settimeout(max(made.bound.deadline.remaining(), 0.001))  # bounds the whole handshake
    inner = context.wrap_socket(made, server_hostname=host)
    assert isinstance(inner, _DeadlineTLSSocket)
    inner.bound = made.bound
    return inner


def tls_context() -> ssl.SSLContext:
    """Checks certificates and host names."""
    from requests.utils import DEFAULT_CA_BUNDLE_PATH  # noqa: PLC0415  # see the module

    context = ssl.create_default_context()
    context.load_verify_locations(DEFAULT_CA_BUNDLE_PATH)
    context.sslsocket_class = _DeadlineTLSSocket
    return context
