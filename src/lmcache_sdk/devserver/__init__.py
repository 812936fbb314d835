"""An imitation of the LMCache multiprocess server: `python -m lmcache_sdk.devserver`, or `DevServer` in a test.

It speaks the wire of every dialect, silence on errors included, and never deserialises code.
"""

from lmcache_sdk.devserver.clocks import Clock, ManualClock
from lmcache_sdk.devserver.core import Held
from lmcache_sdk.devserver.engines import PlayedEngine
from lmcache_sdk.devserver.server import DevServer
from lmcache_sdk.devserver.settings import Settings, unique_shm_name
from lmcache_sdk.devserver.wire import Intercept, Verdict

__all__ = [
    "Clock",
    "DevServer",
    "Held",
    "Intercept",
    "ManualClock",
    "PlayedEngine",
    "Settings",
    "Verdict",
    "unique_shm_name",
]
