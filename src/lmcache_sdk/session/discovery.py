"""What a server says of itself over HTTP, before the first ZMQ frame: release, configuration, status.

No frame may be sent before the release is known: an opcode that a release does not define ends its message thread,
and between two releases the same opcode means different things (PROTOCOL.md sections 0 and 12). Refuses releases that
are not in the table, servers without the engine-driven mode, and servers that speak gRPC, each with what to do about
it.
"""

from __future__ import annotations

from typing import Final

import attrs

from lmcache_sdk.errors import HTTPStatusError, RemoteProtocolError, UnsupportedError
from lmcache_sdk.protocol import (
    ConfigDocument,
    Dialect,
    StatusDocument,
    dialect_named,
    dialect_of_server,
    parse_config,
    parse_status,
    parse_version,
)
from lmcache_sdk.session.addresses import Addresses
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.session.http_transport import HttpConversation, converse

_CONFIG_PATHS: Final = ("/config", "/conf")
_NOT_FOUND: Final = 404
_RIGHT_PORT: Final = "Is http_url the HTTP port of the LMCache server, not that of the engine?"


@attrs.frozen(eq=False, repr=False)
class ServerFacts:
    """What a server said of itself at one moment."""

    version: str
    """As the server reports it, such as "0.5.6"; empty when it does not say and the caller named the dialect."""
    dialect: Dialect
    dialect_was_named: bool
    """The caller chose the dialect: what the server does must be proven before real data is touched."""
    config: ConfigDocument
    status: StatusDocument

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk, the effective number: 0.5.7's can differ from the configured one."""
        return self.status.chunk_size


def discover(addresses: Addresses, api_key: str | None, dialect_name: str | None, deadline: Deadline) -> ServerFacts:
    """Asks the server for its release, configuration and status; raises when it cannot be spoken to."""
    named = None if dialect_name is None else dialect_named(dialect_name)
    with converse(addresses.http_url, api_key, deadline) as http:
        version = _version(http, required=named is None)
        dialect = dialect_of_server(version) if named is None else named
        config = _config(http, dialect)
        _check_mode(config, dialect)
        status = parse_status(http.get("/status"))
    if status.registered_non_cuda_instance_ids is None:
        raise _no_engine_driven_mode("/status names no engine-driven registry", dialect)
    return ServerFacts(version, dialect, named is not None, config, status)


def _version(http: HttpConversation, *, required: bool) -> str:
    """The release from /lmc_version, or from /version whose string is `<release>-<commit>`."""
    for path in ("/lmc_version", "/version"):
        try:
            version = parse_version(http.get(path), path.lstrip("/"))
        except (HTTPStatusError, RemoteProtocolError) as error:
            if required and isinstance(error, RemoteProtocolError):
                raise RemoteProtocolError(
                    f"{error} (from {http.base_url}{path}). {_RIGHT_PORT}", path=error.path
                ) from error
            if required and not (isinstance(error, HTTPStatusError) and error.status == _NOT_FOUND):
                raise
            continue
        release = version.rpartition("-")[0] if path == "/version" else version
        if release and release != "NA":
            return release
    if required:
        raise UnsupportedError(
            f"{http.base_url} reports no LMCache version (/lmc_version and /version are missing, empty or NA), so its "
            f"wire cannot be chosen. {_RIGHT_PORT} If it is and you know the release, pass dialect=..., for example "
            'dialect="0.5.6"',
            request="connect",
        )
    return ""


def _config(http: HttpConversation, dialect: Dialect) -> ConfigDocument:
    """The configuration, at this release's path first."""
    paths = (dialect.config_path, *(path for path in _CONFIG_PATHS if path != dialect.config_path))
    for path in paths:
        try:
            return parse_config(http.get(path))
        except HTTPStatusError as error:
            if error.status != _NOT_FOUND or path == paths[-1]:
                raise
    raise RemoteProtocolError("config: not found", path="config")


def _check_mode(config: ConfigDocument, dialect: Dialect) -> None:
    mode = config.mp.supported_transfer_mode
    if mode == "lmcache_driven":
        raise _no_engine_driven_mode(f"its supported_transfer_mode is {mode!r}", dialect)
    if config.mp.transport != "zmq":
        raise UnsupportedError(
            f"the server speaks {config.mp.transport!r} on its message port; this library speaks ZMQ: start it with "
            "--transport zmq",
            request="connect",
            dialect=dialect.release,
        )


def _no_engine_driven_mode(why: str, dialect: Dialect) -> UnsupportedError:
    return UnsupportedError(
        f"the server does not serve clients that move tensors themselves ({why}); start it with "
        "--supported-transfer-mode auto",
        request="connect",
        dialect=dialect.release,
    )
