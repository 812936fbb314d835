"""Checks app.py (must pass) and misuse.py (must fail, line by line) against the wheel installed in another environment.

Usage: check_types.py PYTHON, the interpreter of the environment where the wheel is. mypy is this interpreter's, so that
nothing but the wheel and its dependencies needs to be in the other one; it sees no configuration and no stubs of ours.
Then runs app.py in that environment. Exit status 1 and a list when anything differs from what must be.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXPECTED = re.compile(r"# E: ([a-z-]+)$")
FOUND = re.compile(r"misuse\.py:(\d+): error: .*\[([a-z-]+)\]$")


def mypy(python: str, file: Path, folder: str) -> subprocess.CompletedProcess[str]:
    """Runs mypy --strict on one file as a stranger would, from an empty folder."""
    options = ["--strict", "--config-file=", "--python-executable", python, "--no-error-summary", "--no-pretty"]
    cache = ["--cache-dir", str(HERE.parent.parent / ".mypy_cache" / "downstream")]
    command = [sys.executable, "-m", "mypy", *options, *cache, "--warn-unreachable", str(file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MYPY")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def problems(python: str, folder: str) -> list[str]:
    """What is not as it must be, as lines for people."""
    app = mypy(python, HERE / "app.py", folder)
    found = [f"app.py must check:\n{app.stdout}{app.stderr}"] if app.returncode else []
    lines = (HERE / "misuse.py").read_text().splitlines()
    marks = ((number, EXPECTED.search(line)) for number, line in enumerate(lines, start=1))
    wanted = {(str(number), match[1]) for number, match in marks if match}
    misuse = mypy(python, HERE / "misuse.py", folder)
    seen = {match.groups() for line in misuse.stdout.splitlines() if (match := FOUND.search(line))}
    found += [f"misuse.py:{line}: no {code} error" for line, code in sorted(wanted - seen)]
    found += [f"misuse.py:{line}: unexpected {code} error" for line, code in sorted(seen - wanted)]
    if found:
        found.append(misuse.stdout + misuse.stderr)
    if not wanted or misuse.returncode != 1:
        found.append(f"misuse.py: {len(wanted)} marks, mypy ended with {misuse.returncode}\n{misuse.stderr}")
    # torch itself warns when there is no numpy, and there is none here: the library must not need one
    warnings = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
    command = [python, "-I", *warnings, str(HERE / "app.py")]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    print(ran.stdout, end="")
    return found if ran.returncode == 0 else [*found, f"app.py must run:\n{ran.stderr}"]


def main() -> int:
    """Returns the exit status."""
    python = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        found = problems(python, folder)
    print("\n".join(found) or "the sample project checks and runs, and every misuse is an error")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
