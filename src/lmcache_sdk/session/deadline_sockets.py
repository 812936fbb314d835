"""Sockets whose every operation takes what remains of one deadline, plain and over TLS.

Over TLS, trusted are the system's authorities (OpenSSL's SSL_CERT_FILE and SSL_CERT_DIR name others) and those that
requests brings; the certificate must be of the host that was asked for. The only importer of requests, which it imports
with the first https:// address: that takes longer than everything else.
"""

from __future__ import annotations

import socket
import ssl
from functools import cache

from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.values import override


class Bound:
    """The deadline that a conversation's connection is bound to now."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline: Deadline = deadline

    def remaining(self) -> float:
        """Seconds that are left; TimeoutError when there are none."""
        remaining = self.deadline.remaining()
        if remaining <= 0:
            raise TimeoutError("the deadline passed")
        return remaining


class _Armed(socket.socket):
    """http.client reads through `recv_into`, whatever drips."""

    bound: Bound

    def _arm(self) -> None:
        self.settimeout(self.bound.remaining())

    @override
    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        self._arm()
        return super().recv_into(buffer, nbytes or len(buffer), flags)

    @override
    def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
        self._arm()
        super().sendall(data, flags)


class DeadlineSocket(_Armed):
    """A TCP connection."""


class _DeadlineTLSSocket(_Armed, ssl.SSLSocket):  # type: ignore[misc]  # http.client passes what _Armed takes
    """The same behind a TLS handshake."""


def connected(host: str, port: int, bound: Bound) -> DeadlineSocket:
    """A connection to the first of the host's addresses that takes one, with nothing sent. Looking the host up takes
    what the system's resolver takes.
    """
    bound.remaining()
    problem: OSError = ConnectionError(f"{host}: no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        made = DeadlineSocket(family, kind, protocol)
        try:
            made.bound = bound
            made.settimeout(bound.remaining())
            made.connect(address)
            return made
        except OSError as error:
            made.close()
            problem = error
        except BaseException:
            made.close()
            raise
    raise problem


def secured(made: DeadlineSocket, host: str, context: ssl.SSLContext) -> socket.socket:
    """The same connection after a TLS handshake; raises ssl.SSLError, a kind of OSError, when it fails."""
    made.settimeout(made.bound.remaining())  # bounds the whole handshake
    inner = context.wrap_socket(made, server_hostname=host)
    assert isinstance(inner, _DeadlineTLSSocket)
    inner.bound = made.bound
    return inner


@cache
def tls_context() -> ssl.SSLContext:
    """Checks certificates and host names; raises OSError where there are no certificates to be read."""
    from requests.utils import DEFAULT_CA_BUNDLE_PATH  # noqa: PLC0415  # see the module

    context = ssl.create_default_context()
    context.load_verify_locations(DEFAULT_CA_BUNDLE_PATH)
    context.set_alpn_protocols(["http/1.1"])
    context.sslsocket_class = _DeadlineTLSSocket
    return context
