"""GET over TLS; the only importer of requests, and imported on first use.

requests brings the certificates, and its timeouts bound each received piece, not the whole conversation. Redirects,
proxies and the environment are off, and bodies are limited, as for plain HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from http.client import HTTPException, InvalidURL
from typing import Final

import requests
from urllib3.exceptions import HTTPError  # of requests' own; it leaks out while a body is read

from lmcache_sdk.session.http_transport import limited

_PIECE: Final = 65_536


class SecureWay:
    """One requests session, as a way for `HttpConversation`."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        self._base_url = base_url
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers.update(headers)

    def get(self, path: str, seconds: float, /) -> tuple[int, bytes]:
        """Status and body."""
        url = self._base_url + path
        try:
            with self._session.get(url, stream=True, timeout=seconds, allow_redirects=False) as response:
                return response.status_code, limited(response.iter_content(_PIECE), url)
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
            raise InvalidURL(str(error)) from error
        except HTTPError as error:
            raise HTTPException(str(error)) from error

    def close(self) -> None:
        """Frees the connections."""
        self._session.close()
