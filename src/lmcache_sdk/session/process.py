"""Which process made something: a forked child has a copy of it, and must not touch the sockets, threads and locks that
belong to its parent.
"""

from __future__ import annotations

import os


class OwnProcess:
    """The process in which this was made."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid: int = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process, and not a forked child of it."""
        return os.getpid() == self.pid
