"""GET over TLS; the only importer of requests, which it imports on first use: that takes longer than everything else.

requests brings the certificates, and its timeouts bound each received piece, not the whole conversation. Redirects,
proxies and the environment are off, and bodies are limited, as for plain HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException, InvalidURL
from typing import Final

_PIECE: Final = 65_536


class SecureWay:
    """One requests session, as a way for `HttpConversation`; `join` puts the pieces of a body together."""

    def __init__(
        self, base_url: str, headers: Mapping[str, str], join: Callable[[Iterator[bytes], str], bytes]
    ) -> None:
        import requests  # noqa: PLC0415  # see the module

        self._base_url = base_url
        self._join = join
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers.update(headers)

    def get(self, path: str, seconds: float, /) -> tuple[int, bytes]:
        """Status and body."""
        from requests.exceptions import InvalidSchema  # noqa: PLC0415
        from requests.exceptions import InvalidURL as BadURL  # noqa: PLC0415
        from urllib3.exceptions import HTTPError  # noqa: PLC0415  # of requests' own; leaks out of a body

        url = self._base_url + path
        try:
            with self._session.get(url, stream=True, timeout=seconds, allow_redirects=False) as response:
                return response.status_code, self._join(response.iter_content(_PIECE), url)
        except (BadURL, InvalidSchema) as error:
            raise InvalidURL(str(error)) from error
        except HTTPError as error:
            raise HTTPException(str(error)) from error

    def close(self) -> None:
        """Frees the connections."""
        self._session.close()
