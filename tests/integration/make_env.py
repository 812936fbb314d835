"""Build the environment of the real-server tests: one virtual environment and every supported release of the server.

Contract: `python3.11 tests/integration/make_env.py` leaves `.venvs/interop/` in the project root with

* `venv/`: torch, the server's requirements and the newest stable release of the server;
* `releases/<version>/`: each supported release on its own, to be put first on PYTHONPATH.

It needs nothing but the standard library and pip. Each part has a marker file with a hash of what was asked of it,
written last: a part whose marker agrees is left alone, a part that was interrupted or whose list changed is built
from nothing. Two runs at the same time wait for each other. `--check` builds nothing and tells by its exit status
whether all is there.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]
ENV_ROOT = PROJECT_ROOT / ".venvs" / "interop"

RELEASES = ("0.5.0", "0.5.1", "0.5.2", "0.5.3", "0.5.4", "0.5.5", "0.5.6", "0.5.7rc2")
STABLE = "0.5.6"
# First and alone: another package that asks for torch would otherwise pull a build for a GPU.
TORCH = "torch==2.13.0"
REQUIREMENTS = (
    "aiofile",
    "aiofiles",
    "blake3",
    "aiohttp",
    "cryptography",
    "fastapi",
    "httpx",
    "msgspec",
    "numpy<=2.2.6",
    "numba",
    "nvtx",
    "opentelemetry-api<=1.40.0",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp",
    "opentelemetry-exporter-prometheus<=0.61b0",
    "prometheus_client<=0.24.1",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "pyzmq",
    "grpcio>=1.78.0",
    "protobuf<7,>=6.31.1",
    "redis",
    "safetensors",
    "setuptools<81",
    "sortedcontainers",
    "transformers>=5.4",
    "uvicorn",
    "httptools",
    "cachetools",
    "google-api-core",
    "requests",
)
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")
INSTALL_TIMEOUT = 1800.0


def venv_python(env_root: Path = ENV_ROOT) -> Path:
    """The interpreter of the built environment."""
    return env_root / "venv" / "bin" / "python"


def release_dir(release: str, env_root: Path = ENV_ROOT) -> Path:
    """The folder that goes first on PYTHONPATH to run `release`."""
    return env_root / "releases" / release


def _digest(*wanted: object) -> str:
    return hashlib.sha256(json.dumps(wanted).encode()).hexdigest()


def _parts() -> dict[str, str]:
    """Every part of the environment, relative to its root, and the hash of what it is made from."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    parts = {"venv": _digest(version, TORCH, REQUIREMENTS, STABLE)}
    parts.update({f"releases/{release}": _digest(version, release) for release in RELEASES})
    return parts


def _marker(env_root: Path, part: str) -> Path:
    return env_root / f"{part.replace('/', '-')}.built"


def _is_built(env_root: Path, part: str, digest: str) -> bool:
    marker = _marker(env_root, part)
    return (env_root / part).is_dir() and marker.is_file() and marker.read_text().strip() == digest


def missing_parts(env_root: Path = ENV_ROOT) -> list[str]:
    """The parts that a run would build."""
    return [part for part, digest in _parts().items() if not _is_built(env_root, part, digest)]


def is_present(env_root: Path = ENV_ROOT) -> bool:
    """Whether every part is there. The hash is not compared: the tests run under another interpreter."""
    return all(_marker(env_root, part).is_file() for part in _parts())


def _run(*command: object) -> None:
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    # PYTHONPATH would let packages of the caller count as installed.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    subprocess.run(words, check=True, timeout=INSTALL_TIMEOUT, env=env)


def _build_venv(target: Path) -> None:
    _run(sys.executable, "-m", "venv", target)
    python = target / "bin" / "python"
    _run(python, *PIP, TORCH)
    _run(python, *PIP, TORCH, *REQUIREMENTS)
    _run(python, *PIP, "--no-deps", f"lmcache=={STABLE}")


def _build_release(env_root: Path, release: str) -> None:
    pre = ("--pre",) if "rc" in release else ()
    target = release_dir(release, env_root)
    _run(venv_python(env_root), *PIP, *pre, "--no-deps", "--target", target, f"lmcache=={release}")


def _build_part(env_root: Path, part: str, digest: str, build: Callable[[], None]) -> None:
    if _is_built(env_root, part, digest):
        return
    marker = _marker(env_root, part)
    marker.unlink(missing_ok=True)
    shutil.rmtree(env_root / part, ignore_errors=True)
    began = time.monotonic()
    build()
    marker.write_text(digest + "\n")
    print(f"built {part} in {time.monotonic() - began:.0f} s", flush=True)


@contextmanager
def _one_builder(env_root: Path) -> Iterator[None]:
    env_root.mkdir(parents=True, exist_ok=True)
    with (env_root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(env_root: Path = ENV_ROOT) -> None:
    """Build whatever is missing."""
    parts = _parts()
    with _one_builder(env_root):
        _build_part(env_root, "venv", parts["venv"], lambda: _build_venv(env_root / "venv"))
        for release in RELEASES:
            part = f"releases/{release}"
            _build_part(env_root, part, parts[part], partial(_build_release, env_root, release))


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the environment of the real-server tests.")
    parser.add_argument("--env-root", type=Path, default=ENV_ROOT)
    parser.add_argument("--check", action="store_true", help="build nothing; exit 1 when something is missing")
    options = parser.parse_args()
    if options.check:
        missing = missing_parts(options.env_root)
        print("\n".join(f"missing: {part}" for part in missing) or "complete")
        return 1 if missing else 0
    build(options.env_root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
