"""examples/demo.py: it works as `make demo` runs it, on every release and both transports, and it can fail."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from lmcache_sdk import LMCacheKVCacheContext, StoreResult
from lmcache_sdk.devserver import DevServer, PlayedEngine
from lmcache_sdk.protocol import DIALECTS
from tests.docs.pages import ROOT

DEMO = ROOT / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """The demo as a module."""
    spec = importlib.util.spec_from_file_location("examples_demo", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # attrs looks its classes' module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
def test_as_make_demo_runs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(DEMO)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert 15 <= len(lines) <= 25
    assert all(len(line) <= 120 for line in lines)
    assert ": NO" not in done.stdout
    assert "LMCache 0.5.6, shm" in done.stdout
    assert lines[-2].startswith(
        "held       0 read locked objects, 0 write locked objects, 0 sessions, 0 prefetch jobs, 0 reg"
    )
    assert lines[-1].endswith("every check held")


@pytest.mark.parametrize("transport", ["shm", "inline"])
@pytest.mark.parametrize(
    "release",
    [pytest.param(release, marks=pytest.mark.slow) if release != "0.5.6" else release for release in DIALECTS],
)
def test_on_every_release(demo: ModuleType, release: str, transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--speak", release, "--transport", transport]) == 0
    said = capsys.readouterr()
    assert f"LMCache {release}, {transport}," in said.out
    assert ": NO" not in said.out
    assert said.err == ""


def test_on_a_server_that_it_did_not_start(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a real server, twice: the second run does not meet what the first one left in the cache."""
    engine = PlayedEngine(model_name="someone's", num_layers=3, head_dim=24, form="MLA")
    with DevServer(models=[engine], chunk_size=32) as server:
        told = ["--url", server.url, "--http-url", server.http_url, "--model", "someone's"]
        assert demo.main(told) == 0
        assert demo.main([*told, "--transport", "inline"]) == 0
        assert "[1, 3, 137, 24]" in capsys.readouterr().out
        assert demo.main([*told[:-1], "nobody's"]) == 2
        assert "NotRegisteredError" in capsys.readouterr().err


def test_one_wrong_bit_is_found(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = LMCacheKVCacheContext.retrieve

    def wrong(
        ctx: LMCacheKVCacheContext, tokens: list[int], cache_salt: str = "", *, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        kv = right(ctx, tokens, cache_salt, out=out)
        if kv is not None:
            kv.view(torch.uint8).view(-1)[-1] ^= 1
        return kv

    monkeypatch.setattr(LMCacheKVCacheContext, "retrieve", wrong)
    assert demo.main(["--transport", "inline"]) == 1
    assert "equal bit for bit: NO" in capsys.readouterr().out


def test_a_store_that_stores_nothing_is_found(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LMCacheKVCacheContext, "store", lambda *_: StoreResult(4, 0, 0, 76))
    assert demo.main(["--transport", "inline"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_what_is_left_behind_is_found(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = iter([demo.Held(0, 0, 0, 0, 0), demo.Held(4, 0, 0, 0, 0)])
    monkeypatch.setattr(demo.Held, "ask", lambda _: next(held))
    assert demo.main(["--transport", "inline"]) == 1
    assert "4 read locked objects" in capsys.readouterr().out


def test_a_server_that_is_not_there(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--url", "tcp://127.0.0.1:1", "--http-url", "http://127.0.0.1:2", "--model", "m"]) == 2
    assert capsys.readouterr().err.startswith("demo: ")


def test_half_an_address_is_refused(demo: ModuleType) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(["--url", "tcp://127.0.0.1:1"])
    assert ended.value.code == 2
