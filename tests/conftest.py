"""Loads every fix_*.py of this folder, one concern each, and keeps real servers out of a run that did not name them.

Warnings are errors (pyproject.toml). Helpers are imported by their full name: `from tests.fix_leaks import ...`.
"""

from __future__ import annotations

import platform
import signal
from pathlib import Path

import pytest
import torch
import zmq

_HERE = Path(__file__).parent
_INTEGRATION = _HERE / "integration"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell lets its background jobs ignore it, and the tests of Ctrl-C need what every other process has
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = sorted(f"tests.{path.stem}" for path in _HERE.glob("fix_*.py"))


def pytest_report_header() -> list[str]:
    """What a failure depends on; pytest-randomly adds the seed."""
    return [f"python {platform.python_version()}, torch {torch.__version__}, pyzmq {zmq.__version__}"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collects tests/integration only for a run that names it."""
    if not _is_within(collection_path, _INTEGRATION):
        return None
    named = (Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args)
    return None if any(_is_within(path.resolve(), _INTEGRATION) for path in named) else True


def _is_within(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents
