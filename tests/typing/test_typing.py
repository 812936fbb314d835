"""Two files, one right and one wrong, as a stranger's strict type checker sees them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fix_typing import Mypy

_HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["users.py", "misuse.py"])
def test_file_checks(mypy: Mypy, name: str) -> None:
    """users.py is right; in misuse.py every wrong line is an error of the named kind (else its ignore is unused)."""
    checked = mypy(_HERE / name)
    assert checked.returncode == 0, checked.output


def test_every_misuse_is_an_error_of_its_own(mypy: Mypy, tmp_path: Path) -> None:
    """Without the ignores, exactly the marked lines are errors, and of exactly the named kinds."""
    source = (_HERE / "misuse.py").read_text()
    ignored = re.compile(r"  # type: ignore\[([a-z, -]+)\]")
    expected = {
        (number, code)
        for number, line in enumerate(source.splitlines(), start=1)
        for codes in ignored.findall(line)
        for code in codes.split(", ")
    }
    bare = tmp_path / "bare.py"
    bare.write_text(ignored.sub("", source))
    checked = mypy(bare)
    assert len(expected) > 30
    assert {(error.line, error.code) for error in checked.errors} == expected, checked.output
