"""The two addresses of a server, normalised and checked: nothing here talks to anyone but the resolver.

Takes what users write (`host:port`, `tcp://host:port`, `ipc:///path`; `host:port`, `http://host:port/`), gives
canonical forms, and refuses what cannot work, naming the argument.
"""

from __future__ import annotations

import re
import socket
from typing import Final
from urllib.parse import SplitResult, urlsplit

import attrs

from lmcache_sdk.errors import ArgumentTypeError, ConnectError, UsageError

_SCHEME: Final = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*)://")
_DEFAULT_HTTP_PORTS: Final = {"http": 80, "https": 443}


@attrs.frozen
class Addresses:
    """Where the message port and the HTTP port of one server are."""

    url: str
    http_url: str


def checked_addresses(url: object, http_url: object) -> Addresses:
    """Normalises both and refuses an `http_url` that leads to the host and port of `url`."""
    canonical, message = _zmq_url(url)
    http = _http_url(http_url)
    if message is not None and _same_endpoint(message, http):
        raise UsageError(
            f"http_url: {http_url!r} has the host and port of url={url!r}. They are two ports of the server: the ZMQ "
            "port (5555 by default) and the HTTP port (8080 by default). An HTTP request on the ZMQ port ends the "
            "server's message thread for every client, so nothing was sent"
        )
    return Addresses(canonical, f"{http.scheme}://{http.netloc}{http.path.rstrip('/')}")


def check_resolvable(addresses: Addresses) -> None:
    """Raises ConnectError when the host of `url` has no address: zmq says nothing of that, and waits."""
    parts = urlsplit(addresses.url)
    if parts.scheme == "tcp":
        _resolve(parts)


def _zmq_url(url: object) -> tuple[str, SplitResult | None]:
    """The canonical text, and its parts when it has a host and a port."""
    text = _text(url, "url")
    if not _SCHEME.match(text):
        text = f"tcp://{text}"
    if text.lower().startswith("ipc://"):
        if not text[len("ipc://") :].strip("/"):
            raise UsageError(f"url: {url!r} names no path; expected ipc:///path/of/the/socket")
        return f"ipc://{text[len('ipc://') :]}", None
    parts = _split(text, "url")
    if parts.scheme in ("grpc", "grpc+unix"):
        raise UsageError(f"url: {url!r}: the gRPC transport is not spoken; start the server with --transport zmq")
    if parts.scheme != "tcp":
        raise UsageError(f"url: {url!r} has the scheme {parts.scheme!r}; expected tcp://host:port or ipc:///path")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise UsageError(f"url: {url!r} has more than host and port; expected tcp://host:port")
    host, port = _host_port(parts, "url", url, None)
    return f"tcp://{host}:{port}", urlsplit(f"tcp://{host}:{port}")


def _split(text: str, name: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError as error:
        raise UsageError(f"{name}: {text!r} is not an address: {error}") from error


def _http_url(http_url: object) -> SplitResult:
    text = _text(http_url, "http_url")
    if not _SCHEME.match(text):
        text = f"http://{text}"
    parts = _split(text, "http_url")
    if parts.scheme not in _DEFAULT_HTTP_PORTS:
        raise UsageError(f"http_url: {http_url!r} has the scheme {parts.scheme!r}; expected http://host:port")
    if parts.query or parts.fragment or parts.username is not None:
        raise UsageError(f"http_url: {http_url!r} has more than host, port and path; expected http://host:port")
    host, port = _host_port(parts, "http_url", http_url, _DEFAULT_HTTP_PORTS[parts.scheme])
    return urlsplit(f"{parts.scheme}://{host}:{port}{parts.path}")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name}: expected a str, got {type(value).__name__}")
    stripped = value.strip()
    if not stripped or any(c.isspace() or c == "\0" for c in stripped):
        raise UsageError(f"{name}: {value!r} is not an address")
    return stripped


def _host_port(parts: SplitResult, name: str, came: object, default_port: int | None) -> tuple[str, int]:
    try:
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{name}: {came!r}: the port is not a number from 1 to 65535") from error
    port = default_port if port is None else port
    if not parts.hostname:
        raise UsageError(f"{name}: {came!r} names no host")
    if port is None or not 1 <= port <= 65535:
        raise UsageError(f"{name}: {came!r} names no port; expected for example tcp://localhost:5555")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return host, port


def _same_endpoint(one: SplitResult, other: SplitResult) -> bool:
    if one.port != other.port:
        return False
    return one.hostname == other.hostname or bool(_resolve(one) & _resolve(other))


def _resolve(parts: SplitResult) -> set[str]:
    """The addresses a host name has, with loopback and wildcard seen as one: they lead to the same port."""
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectError(f"the host {parts.hostname!r} cannot be resolved: {error}") from error
    hosts = {str(entry[4][0]) for entry in found}
    return {"localhost" if h.startswith("127.") or h in ("::1", "0.0.0.0", "::") else h for h in hosts}
