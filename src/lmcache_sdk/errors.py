"""Every exception that lmcache_sdk raises on purpose. Classes are cut by who must act.

KVCacheSDKError (RuntimeError)    the base; has .fate
├── UsageError (ValueError)       the caller: the call could not be meant
│   ├── ArgumentTypeError (TypeError)
│   └── SessionClosedError
├── ProtocolError                 never raised itself
│   ├── LocalProtocolError        us: we were about to say something illegal
│   ├── RemoteProtocolError       the server said something illegal (.path)
│   └── UnsupportedError          this server or library has no words for it (.request, .dialect)
├── TransportError                the network: the message may not have travelled
│   ├── ConnectError              it did not
│   ├── ConnectionLostError       the peer went away while we waited
│   └── DeadlineExceededError (TimeoutError)   no answer in time (.step)
├── ServerError                   the server answered: no (.reply)
│   ├── NotRegisteredError        (.registered_models)
│   ├── LeaseExpiredError
│   ├── StoreRejectedError
│   ├── PoolFullError
│   ├── AlreadyCachedError        (.chunk_indices)
│   └── HTTPStatusError           (.status, .url)
└── LayoutError                   the model: the numbers do not fit
    ├── LayoutChangedError        the server is not what it was at connect (.before, .after)
    ├── UnknownLayoutError        an axis order or dtype that we do not know
    └── ShapeMismatchError        (.expected, .found)

Every class takes one positional message and keyword attributes with defaults, so that each pickles and keeps its
`args`: workers send errors to their parents. A miss is a result, never an exception.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Fate(enum.Enum):
    """What may have happened to the request on the server; what a retry needs to know."""

    NOT_SENT = "not sent"
    UNKNOWN = "unknown"
    ANSWERED = "answered"


class KVCacheSDKError(RuntimeError):
    """Base of every error of this library.

    Attributes:
        fate: whether the server can have acted on the request that failed.
    """

    fate: Fate = Fate.UNKNOWN

    def __init__(self, message: str = "", *, fate: Fate | None = None) -> None:
        super().__init__(message)
        if fate is not None:
            self.fate = fate


class UsageError(KVCacheSDKError, ValueError):
    """The call could not be meant; nothing was sent and the server is as it was."""

    fate = Fate.NOT_SENT


class ArgumentTypeError(UsageError, TypeError):
    """An argument has a type that this call does not take."""


class SessionClosedError(UsageError):
    """The context was closed, or belongs to another process."""


class ProtocolError(KVCacheSDKError):
    """Something illegal was said, or has no words; see the three subclasses."""


class LocalProtocolError(ProtocolError):
    """We were about to send something illegal: a bug of this library; nothing was sent."""

    fate = Fate.NOT_SENT


class RemoteProtocolError(ProtocolError):
    """The server said something illegal; nothing of it was used.

    Attributes:
        path: the field that is wrong, such as `status.cache_context_meta.7.world_size`; empty when unknown.
    """

    fate = Fate.ANSWERED

    def __init__(self, message: str = "", *, path: str = "", fate: Fate | None = None) -> None:
        super().__init__(message, fate=fate)
        self.path: str = path


class UnsupportedError(ProtocolError):
    """This server's release, mode or model is one that the request cannot be made for.

    Attributes:
        request: what was asked for; empty when the server as a whole is meant.
        dialect: the server release whose wire was spoken; empty when unknown.
    """

    fate = Fate.NOT_SENT

    def __init__(self, message: str = "", *, request: str = "", dialect: str = "", fate: Fate | None = None) -> None:
        super().__init__(message, fate=fate)
        self.request: str = request
        self.dialect: str = dialect


class TransportError(KVCacheSDKError):
    """The message may not have travelled."""


class ConnectError(TransportError):
    """No connection could be made, or the server's shared memory cannot be used from here.

    `fate` is NOT_SENT in the first case, ANSWERED in the second: the server had answered the registration, which was
    taken back.
    """

    fate = Fate.NOT_SENT


class ConnectionLostError(TransportError):
    """The connection ended while a reply was awaited; the server may have acted on the request."""


class DeadlineExceededError(TransportError, TimeoutError):
    """No answer within the caller's timeout. The outcome on the server is unknown; it is never a miss.

    Attributes:
        step: the step of the call that was waiting, such as `lookup: QUERY_PREFETCH_STATUS`.
    """

    def __init__(self, message: str = "", *, step: str = "", fate: Fate | None = None) -> None:
        super().__init__(message, fate=fate)
        self.step: str = step


class ServerError(KVCacheSDKError):
    """The server answered, and the answer is no.

    Attributes:
        reply: what it answered, as text; empty when the answer was in what it left out.
    """

    fate = Fate.ANSWERED

    def __init__(self, message: str = "", *, reply: str = "", fate: Fate | None = None) -> None:
        super().__init__(message, fate=fate)
        self.reply: str = reply


class NotRegisteredError(ServerError):
    """No engine holds this model on the server.

    Attributes:
        registered_models: the model names that the server does know.
    """

    def __init__(
        self,
        message: str = "",
        *,
        registered_models: Sequence[str] = (),
        reply: str = "",
        fate: Fate | None = None,
    ) -> None:
        super().__init__(message, reply=reply, fate=fate)
        self.registered_models: tuple[str, ...] = tuple(registered_models)


class LeaseExpiredError(ServerError):
    """A lock that the server held for us ran out, or may have; the bytes were discarded."""


class StoreRejectedError(ServerError):
    """The server refused to publish what was written."""


class PoolFullError(ServerError):
    """The server's memory has no room and nothing could be evicted in time."""


class AlreadyCachedError(ServerError):
    """`existing="error"` was asked for and some chunks are cached already; their data was kept.

    Attributes:
        chunk_indices: the chunks that were there, counted from the first token.
    """

    def __init__(
        self,
        message: str = "",
        *,
        chunk_indices: Sequence[int] = (),
        reply: str = "",
        fate: Fate | None = None,
    ) -> None:
        super().__init__(message, reply=reply, fate=fate)
        self.chunk_indices: tuple[int, ...] = tuple(chunk_indices)


class HTTPStatusError(ServerError):
    """An HTTP endpoint of the server answered with a status other than 200.

    Attributes:
        status: the HTTP status code.
        url: the address that was asked.
    """

    def __init__(
        self, message: str = "", *, status: int = 0, url: str = "", reply: str = "", fate: Fate | None = None
    ) -> None:
        super().__init__(message, reply=reply, fate=fate)
        self.status: int = status
        self.url: str = url


class LayoutError(KVCacheSDKError):
    """The numbers of a cache do not fit together; nothing was sent."""

    fate = Fate.NOT_SENT


class LayoutChangedError(LayoutError):
    """The server came back as another one: chunk size, layout or release changed since connect.

    Attributes:
        before: what it was, as text.
        after: what it is now, as text.
    """

    fate = Fate.UNKNOWN

    def __init__(self, message: str = "", *, before: str = "", after: str = "", fate: Fate | None = None) -> None:
        super().__init__(message, fate=fate)
        self.before: str = before
        self.after: str = after


class UnknownLayoutError(LayoutError):
    """An axis order or dtype that this library does not know, so nothing can be stored with it."""


class ShapeMismatchError(LayoutError, ValueError):
    """A tensor does not have the shape or dtype that the cache has.

    Attributes:
        expected: the shape and dtype that fit, as text.
        found: what came, as text.
    """

    def __init__(self, message: str = "", *, expected: str = "", found: str = "", fate: Fate | None = None) -> None:
        super().__init__(message, fate=fate)
        self.expected: str = expected
        self.found: str = found
