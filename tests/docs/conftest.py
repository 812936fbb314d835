"""The first large frame that a process sends without a copy makes pyzmq start a thread that frees such frames.

It stays for as long as the process does, so whichever test came first would seem to leak: it is sent here, before any.
"""

from __future__ import annotations

import pytest
import zmq


@pytest.fixture(scope="session", autouse=True)
def _pyzmq_frees_frames() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://frees-frames")
        other.connect("inproc://frees-frames")
        one.send(bytes(2**20), copy=False)
        assert len(other.recv(copy=False)) == 2**20
