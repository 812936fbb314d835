"""Run inside the clean environment: the wheel brought its six packages and what they need, and nothing of lmcache.

Usage: check_install.py WHEEL. Needs no more than a fresh environment has: pip's copy of `packaging` reads requirements.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zipfile
from importlib import metadata

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

SIX = {"attrs", "cattrs", "msgspec", "pyzmq", "requests", "torch"}
TOOLS = {"pip", "setuptools", "wheel"}


def needs(name: str) -> set[str]:
    """The packages that a distribution requires here, without extras."""
    found = map(Requirement, metadata.requires(name) or ())
    return {canonicalize_name(r.name) for r in found if r.marker is None or r.marker.evaluate({"extra": ""})}


def closure(name: str) -> set[str]:
    """A distribution and everything that it needs, however indirectly."""
    reached: set[str] = set()
    todo = [name]
    while todo:
        one = todo.pop()
        if one not in reached:
            reached.add(one)
            todo.extend(needs(one))
    return reached


def main() -> int:
    """Checks; an assertion that fails says what."""
    names = zipfile.ZipFile(sys.argv[1]).namelist()
    assert "lmcache_sdk/py.typed" in names, names
    outside = [n for n in names if not n.startswith("lmcache_sdk/") and ".dist-info/" not in n]
    assert outside == [], outside
    assert any(n.endswith("licenses/LICENSE") for n in names), names

    assert needs("lmcache-sdk") == SIX, needs("lmcache-sdk")
    installed = {canonicalize_name(d.metadata["Name"]) for d in metadata.distributions()}
    extra = installed - closure("lmcache-sdk") - TOOLS
    assert extra == set(), f"not needed by the wheel: {extra}"
    assert importlib.util.find_spec("lmcache") is None

    module = importlib.import_module("lmcache_sdk.kvcache")
    assert module.__file__ is not None and "site-packages" in module.__file__, module.__file__
    loaded = [name for name in sys.modules if name == "lmcache" or name.startswith("lmcache.")]
    assert loaded == [], loaded
    print(f"{len(names)} files in the wheel; {len(installed - TOOLS)} packages installed: the six and what they need")
    return 0


if __name__ == "__main__":
    sys.exit(main())
