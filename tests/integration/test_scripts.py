"""Programs written for the contract run on every real server as they stand.

That is the README's snippet, and a script of the official SDK's users of which only the import was changed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from lmcache_sdk import LMCacheKVCacheContext

from .cases import CHUNK, CONTRACT, KV_BF16, client_values, fresh_tokens
from .conftest import Pair
from .make_env import PROJECT_ROOT
from .patterns import same_bytes
from .test_engine_truth import wait_until_readable

SCRIPTS = Path(__file__).resolve().parent / "scripts"
# What the snippet says, and what a test server makes of it; the dots of the lists stand for whole chunks of ids.
README_LISTS = {"[1, 2, 3, ...]": "list(range(1, 513))", "[4, 5, 6, ...]": "list(range(4, 516))"}


def run(*command: object) -> str:
    """Run a program to its end; its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, command)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def prepare(pair: Pair, ctx: LMCacheKVCacheContext) -> None:
    """Cache the snippet's tokens as its engine would have, and forget what an earlier run stored."""
    pair.server.clear()
    tokens = list(range(1, 513))
    pair.engine.store(CONTRACT, tokens, seed=15)
    wait_until_readable(ctx, tokens, len(tokens))


def test_contract_script(pair: Pair) -> None:
    shape = pair.models[CONTRACT]
    with pair.connect(CONTRACT) as ctx:
        prepare(pair, ctx)
        assert run(SCRIPTS / "contract.py", pair.server.url, pair.server.http_url) == "[2, 2, 512, 64] True"
        expected = client_values(pair.release, shape, 2 * CHUNK, seed=15)
        expected[0] = -expected[0]
        edited = ctx.retrieve(list(range(4, 516)))
        assert edited is not None and same_bytes(edited, expected)


def test_readme_snippet_as_it_stands(pair: Pair, tmp_path: Path) -> None:
    snippet = readme_snippet()
    for said, meant in README_LISTS.items():
        assert said in snippet
        snippet = snippet.replace(said, meant)
    for pattern, address in (
        (r'"tcp://localhost:\d+"', pair.server.url),
        (r'"http://localhost:\d+"', pair.server.http_url),
    ):
        snippet, replaced = re.subn(pattern, repr(address), snippet)
        assert replaced == 1
    program = tmp_path / "snippet.py"
    program.write_text(snippet + "\nassert ok is True\n")
    with pair.connect(CONTRACT) as ctx:
        prepare(pair, ctx)
        run(program)
        assert ctx.lookup(list(range(4, 516))).hit_tokens == 512


def readme_snippet() -> str:
    """The README's first Python block that connects."""
    readme = (PROJECT_ROOT / "README.md").read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if "import lmcache_sdk.kvcache as lmc_sdk" in block and "connect(" in block)


def test_official_script_with_its_import_changed(pair: Pair) -> None:
    first = fresh_tokens(1)[0] + 5_000_000
    source = list(range(first, first + 600))
    kv = client_values(pair.release, pair.models[KV_BF16], len(source), seed=16)
    with pair.connect(KV_BF16) as ctx:
        assert ctx.store(kv, source)
        said = run(SCRIPTS / "official.py", pair.server.url, pair.server.http_url, KV_BF16, first)
        assert said == "4 512 64 True True None"
        moved = ctx.retrieve([token + 100_000 for token in source], "moved")
        assert moved is not None and same_bytes(moved, kv[:, :, : 2 * CHUNK].flip(0).contiguous())
