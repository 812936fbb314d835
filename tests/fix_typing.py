"""The `mypy` fixture: a type checker as a stranger has it, strict, with no configuration and no stubs of ours.

The file is checked from an empty folder, so neither pyproject.toml nor typings/ can help. `lmcache_sdk` is found where
it is installed, through its py.typed. A test that asks for the fixture is marked slow by that.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import attrs
import pytest

_ROOT: Final = Path(__file__).parent.parent
_LINE: Final = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+)(?::\d+)?: (?P<level>error|note): (?P<text>.*)$")
_CODE: Final = re.compile(r"\[(?P<code>[a-z0-9-]+)\]$")


@attrs.frozen
class Complaint:
    """One error that mypy reports: where, which kind, in which words."""

    line: int
    code: str
    text: str


@attrs.frozen
class Checked:
    """What mypy made of a file. `output` is for people; `errors` are the file's own, in its order."""

    errors: Sequence[Complaint]
    output: str
    returncode: int


Mypy = Callable[[Path], Checked]


@pytest.fixture
def mypy(tmp_path: Path) -> Mypy:
    """Gives a function that runs `mypy --strict` on one file."""

    def check(file: Path) -> Checked:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MYPY")}
        run = subprocess.run(
            [
                *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", "--no-pretty"),
                *("--no-color-output", "--show-error-codes", "--cache-dir", str(_ROOT / ".mypy_cache" / "stranger")),
                str(file),
            ],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return Checked(
            errors=[c for c in map(_complaint, run.stdout.splitlines()) if c is not None],
            output=run.stdout + run.stderr,
            returncode=run.returncode,
        )

    return check


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what runs mypy as slow, and lets the first such test fill mypy's cache."""
    for item in items:
        if "mypy" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
            item.add_marker(pytest.mark.timeout(600))


def _complaint(line: str) -> Complaint | None:
    match = _LINE.match(line)
    if match is None or match["level"] == "note":
        return None
    code = _CODE.search(match["text"])
    return Complaint(line=int(match["line"]), code=code["code"] if code else "", text=match["text"])
