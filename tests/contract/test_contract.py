"""The contract that every real server is held to (tests/integration/test_interop.py), held by the embedded server.

The functions are the same objects; only the `pair` fixture differs (conftest.py here).
"""

from __future__ import annotations

from tests.integration import test_interop

globals().update({name: test for name, test in vars(test_interop).items() if name.startswith("test_")})


def test_the_suite_is_here() -> None:
    assert sum(name.startswith("test_") for name in globals()) > 15
