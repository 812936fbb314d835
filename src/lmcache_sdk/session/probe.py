"""What the server says over HTTP while its message port is silent, or says too little.

A handler that fails sends no reply, so silence has many causes; and LOOKUP answers 0 also when no engine holds the
model any more (PROTOCOL.md sections 1 and 5). `HttpProbe` asks /status. Questions that may share an answer do: a
caller gets a status that was asked for after it called, never an older one.
"""

from __future__ import annotations

import threading
from typing import Final

from lmcache_sdk.errors import ConnectError, KVCacheSDKError, TransportError
from lmcache_sdk.protocol import StatusDocument, parse_status, registered_models
from lmcache_sdk.session.addresses import Addresses
from lmcache_sdk.session.deadline import Deadline
from lmcache_sdk.session.http_transport import HttpConversation
from lmcache_sdk.values import InstanceId

_HINT_SECONDS: Final = 0.4


class HttpProbe:
    """Asks one server's /status; thread-safe."""

    def __init__(self, addresses: Addresses, api_key: str | None) -> None:
        self._http_url = addresses.http_url
        self._api_key = api_key
        self._http: HttpConversation | None = None
        """Kept open between questions; used by whoever asks."""
        self._closed = False
        self._changed = threading.Condition()
        self._asking = False
        self._started = 0
        """Number of the newest question that was sent."""
        self._answered = 0
        """Number of the newest question that was answered."""
        self._answer: StatusDocument | None = None

    def status(self, deadline: Deadline) -> StatusDocument:
        """A status that was asked for after this call began; concurrent callers share one request."""
        with self._changed:
            wanted = self._started + 1
            while self._asking or (self._answered >= wanted and self._answer is not None):
                if self._answered >= wanted and self._answer is not None:
                    return self._answer
                if not self._changed.wait(deadline.remaining()):
                    raise deadline.exceeded("GET /status, which another call is waiting for")
            self._asking = True
            self._started = number = self._started + 1
        answer = None
        try:
            answer = self._ask(deadline)
            return answer
        finally:
            with self._changed:
                self._asking = False
                closed = self._closed
                if answer is not None:
                    self._answered, self._answer = number, answer
                self._changed.notify_all()
            if closed:
                self._drop()

    def _ask(self, deadline: Deadline) -> StatusDocument:
        reused = self._http is not None
        try:
            return self._get(deadline)
        except ConnectError:
            # a server hangs up on connections that were idle for seconds, and the question may have crossed that
            self._drop()
            if not reused:
                raise
            return self._get(deadline)
        except BaseException:
            self._drop()
            raise

    def _get(self, deadline: Deadline) -> StatusDocument:
        if self._http is None:
            self._http = HttpConversation(self._http_url, self._api_key, deadline)
        self._http.rebind(deadline)
        return parse_status(self._http.get("/status"))

    def _drop(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            http.close()

    def close(self) -> None:
        """Frees the connection; a question that is out frees it itself."""
        with self._changed:
            self._closed = True
            idle = not self._asking
        if idle:
            self._drop()

    def instance_has_left(self, instance_id: InstanceId, deadline: Deadline) -> bool:
        """Whether the server answers and does not know this instance any more."""
        try:
            return instance_id not in (self.status(deadline).registered_non_cuda_instance_ids or ())
        except KVCacheSDKError:
            return False

    def model_has_left(self, model_name: str, deadline: Deadline) -> bool:
        """Whether the server answers and no instance holds this model any more."""
        try:
            return model_name not in registered_models(self.status(deadline))
        except KVCacheSDKError:
            return False

    def why_silent(self, instance_id: InstanceId | None) -> str:
        """The likely cause of a request that was not answered, for the message of an error."""
        try:
            status = self.status(Deadline.after(_HINT_SECONDS))
        except TransportError:
            return "its HTTP port does not answer either: the server is frozen, overloaded or gone"
        except KVCacheSDKError as error:
            return f"its HTTP port answers, but not with a status ({error})"
        known = status.registered_non_cuda_instance_ids
        if known is None:
            return "it does not serve clients that move tensors themselves any more: was it restarted in another mode?"
        if instance_id is not None and instance_id not in known:
            return "it no longer knows this instance: it was restarted, or the instance was idle for too long"
        return "its HTTP port answers: its message thread may be busy, or dead while the server still looks healthy"
