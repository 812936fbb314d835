"""The pages say what is so: generated parts are fresh, links lead somewhere, names exist, blocks run.

Run `python docs/generate.py` when a generated part is stale.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import io
import re
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
import torch

import lmcache_sdk
import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import KVCacheSDKError, KVLayout, LMCacheKVCacheContext
from lmcache_sdk.devserver import DevServer, PlayedEngine, cli, unique_shm_name
from lmcache_sdk.facade import storing, transfer
from lmcache_sdk.protocol import DIALECTS
from lmcache_sdk.session import http_transport, leases
from tests.docs.pages import (
    DOCS,
    README,
    ROOT,
    RUNNABLE,
    Block,
    anchor,
    blocks,
    headings,
    links,
    pages,
    runnable_blocks,
    spans,
    text_of,
)
from tests.fix_typing import Mypy

SRC: Final = Path(lmcache_sdk.__file__).parent
MODEL: Final = "Qwen/Qwen3-8B"
GENERATE: Final = DOCS / "generate.py"
_ADDRESSES: Final = re.compile(r"(?P<scheme>tcp://|http://)?localhost:(?P<port>5555|9000)")


def _page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _block_id(block: Block) -> str:
    return block.name


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate", GENERATE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- generated parts -------------------------------------------------------------------------------------------------


def test_generated_parts_are_fresh(generate: ModuleType) -> None:
    fresh: dict[Path, str] = generate.fresh_pages()
    stale = [page.name for page, text in fresh.items() if page.read_text(encoding="utf-8") != text]
    assert stale == [], "run: python docs/generate.py"


def test_every_section_is_on_a_page(generate: ModuleType) -> None:
    """A maker that no page uses makes a table that nobody sees; a mark without its end would swallow the page."""
    named = [
        name for page in sorted(DOCS.glob("*.md")) for name in re.findall(r"generated: start ([a-z-]+),", text_of(page))
    ]
    assert sorted(named) == sorted(generate.SECTIONS)
    for page in sorted(DOCS.glob("*.md")):
        assert text_of(page).count("<!-- generated: start") == text_of(page).count("<!-- generated: end -->")


def test_a_stale_part_is_noticed(generate: ModuleType) -> None:
    text = text_of(DOCS / "dialects.md")
    assert generate.fresh_text(text) == text
    wrong = text.replace("| `Clear` | `clear` | 17 |", "| `Clear` | `clear` | 18 |")
    assert wrong != text
    assert generate.fresh_text(wrong) == text


def test_what_stands_outside_the_marks_is_kept(generate: ModuleType) -> None:
    assert generate.fresh_text("by hand\n\n| a | b |\n") == "by hand\n\n| a | b |\n"


# ---- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages(), ids=_page_id)
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in links(page):
        if re.match(r"[a-z]+://", target):
            continue
        name, _, fragment = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        if not linked.exists() or (fragment and fragment not in {anchor(text) for text in headings(linked)}):
            broken.append(target)
    assert broken == []


def test_the_link_check_sees_links() -> None:
    assert "docs/errors.md" in links(README)
    assert "#knobs" not in {f"#{anchor(text)}" for text in headings(README)}
    assert anchor("ctx.lookup") == "ctxlookup"


# ---- names -----------------------------------------------------------------------------------------------------------


def test_every_public_name_is_documented() -> None:
    api = DOCS / "api.md"
    told = {*headings(api), *spans(api)}
    assert [name for name in lmcache_sdk.__all__ if name not in told] == []
    assert [name for name in lmc_sdk.__all__ if name not in headings(api)] == []


def test_every_public_member_of_the_context_is_documented() -> None:
    api = DOCS / "api.md"
    told = {*headings(api), *spans(api)}
    public = [name for name in vars(LMCacheKVCacheContext) if not name.startswith("_")]
    assert len(public) >= 11
    assert [name for name in public if f"ctx.{name}" not in told] == []


def test_every_error_class_has_a_paragraph_and_no_other_has() -> None:
    page = DOCS / "errors.md"
    classes = {name for name in lmcache_sdk.__all__ if _is_error(getattr(lmcache_sdk, name))}
    written = {text for text in headings(page) if text.endswith("Error")}
    assert written == classes
    for name in classes:
        paragraph = text_of(page).split(f"\n### {name}\n")[1].split("\n## ")[0].split("\n### ")[0]
        is_base = "Not raised itself" in paragraph or name == "KVCacheSDKError"
        assert is_base or ("*When:*" in paragraph and "*Retry:*" in paragraph), name


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, KVCacheSDKError)


def test_devserver_names_are_documented() -> None:
    module = importlib.import_module("lmcache_sdk.devserver")
    told = set(re.findall(r"\w+", " ".join(spans(DOCS / "devserver.md"))))
    assert [name for name in module.__all__ if name not in told] == []


def test_devserver_flags_are_documented() -> None:
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit) as ended:
        cli.parse(["--help"])
    assert ended.value.code == 0
    flags = set(re.findall(r"--[a-z0-9-]+", said.getvalue())) - {"--help"}
    table = {flag for span in spans(DOCS / "devserver.md") for flag in re.findall(r"^--[a-z0-9-]+", span)}
    assert len(flags) > 15
    assert table == flags


@pytest.mark.parametrize("page", pages(), ids=_page_id)
def test_names_in_prose_exist(page: Path) -> None:
    """Dotted names of ours, `ctx.x`, files, classes that end like an error: what prose shows as code must be there."""
    missing = [
        span for span in spans(page) if not all(check(span) for check in (_is_name, _is_member, _is_file, _is_class))
    ]
    assert missing == []


def _is_name(span: str) -> bool:
    if re.fullmatch(r"lmcache_sdk(\.\w+)*", span) is None:
        return True
    parts = span.split(".")
    try:
        importlib.import_module(span)
    except ImportError:
        return hasattr(importlib.import_module(".".join(parts[:-1])), parts[-1])
    return True


def _is_member(span: str) -> bool:
    match = re.fullmatch(
        r"(?P<of>ctx|lmc_sdk|kvcache|server|LMCacheKVCacheContext|KVLayout)\.(?P<name>\w+)(\(.*)?", span
    )
    owners: dict[str, object] = {
        "ctx": LMCacheKVCacheContext,
        "LMCacheKVCacheContext": LMCacheKVCacheContext,
        "lmc_sdk": lmc_sdk,
        "kvcache": lmc_sdk,
        "server": DevServer,
        "KVLayout": KVLayout,
    }
    is_file = span.endswith(".py")
    return match is None or is_file or hasattr(owners[match["of"]], match["name"])


def _is_file(span: str) -> bool:
    if re.fullmatch(r"[\w./-]+(\.(py|md|json|toml)|/)", span) is None or span.startswith("/"):
        return True
    if span in _ELSEWHERE:
        return True
    return any((base / span).exists() for base in (ROOT, SRC, *_FOLDERS, *SRC.iterdir()))


_FOLDERS: Final = (DOCS, DOCS / "reference", ROOT / "examples", ROOT / "tests", ROOT / "tests" / "typing")
_ELSEWHERE: Final = {"changelog.d/<n>.<kind>.md", "testing/"}
"""Named, and not in this repository, or not yet."""


def _is_class(span: str) -> bool:
    return re.fullmatch(r"[A-Z]\w+Error", span) is None or span in {*lmcache_sdk.__all__, *vars(builtins)}


def test_the_name_checks_can_fail() -> None:
    assert not _is_name("lmcache_sdk.nothing")
    assert not _is_member("ctx.peek(kv)")
    assert not _is_file("session/lease.py")
    assert not _is_class("CacheMissError")
    assert all(check("lmcache_sdk.kvcache") for check in (_is_name, _is_member, _is_file, _is_class))


# ---- claims of the README --------------------------------------------------------------------------------------------


def test_readme_lists_the_releases_of_the_table() -> None:
    rows = re.findall(r"^\| (0\.5\.\S+) \| yes \| yes \| (D\d) \|$", text_of(README), re.MULTILINE)
    assert rows == [(dialect.release, dialect.family) for dialect in DIALECTS.values()]


def test_commands_of_the_pages_are_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {target for page in pages() for target in re.findall(r"(?:^|`)make ([a-z]+)", text_of(page), re.MULTILINE)}
    assert {"demo", "test", "interop", "check"} <= named
    assert named <= targets


def test_readme_names_the_six_packages() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    packages = re.findall(r'"([a-z]+)', listed[1])
    assert len(packages) == 6
    assert [name for name in packages if f"`{name}`" not in text_of(README)] == []


@pytest.mark.slow
def test_readme_server_command_works_and_serves_the_first_block() -> None:
    """The command as it stands, but for the ports and the pool's name."""
    command = next(line for line in text_of(README).splitlines() if line.startswith("python -m lmcache_sdk.devserver"))
    told = [sys.executable, *command.split()[1:], "--port", "0", "--http-port", "0", "--shm-name", unique_shm_name()]
    with subprocess.Popen(told, stdout=subprocess.PIPE, text=True) as process:
        killer = threading.Timer(60, process.kill)
        killer.start()
        try:
            assert process.stdout is not None
            ready = re.fullmatch(r"ready url=(\S+) http_url=(\S+)\n", process.stdout.readline())
            assert ready is not None
            block = next(block for block in blocks(README) if block.info == RUNNABLE)
            _run(block, ready[1], ready[2])
        finally:
            process.terminate()
            assert process.wait(30) == 0
            killer.cancel()
            killer.join()


MIB: Final = 2**20
NUMBERS: Final = (
    ("transports.md", r"store: a (\d+)nd of the pool", transfer._POOL_SHARE),
    ("transports.md", r"of the pool \(at least (\d+) MiB", transfer._STORE_BATCH_NBYTES[0] / MIB),
    ("transports.md", r"MiB, at most (\d+) MiB\), at least one chunk", transfer._STORE_BATCH_NBYTES[1] / MIB),
    ("transports.md", r"up to (\d+) MiB, at least one chunk", transfer._INLINE_BATCH_NBYTES / MIB),
    ("reliability.md", r"two batches, each a (\d+)nd of the pool", transfer._POOL_SHARE),
    ("reliability.md", r"of the pool but (\d+) MiB at least", transfer._STORE_BATCH_NBYTES[0] / MIB),
    ("reliability.md", r"at least and (\d+) MiB at most", transfer._STORE_BATCH_NBYTES[1] / MIB),
    ("architecture.md", r"to (\d+) MiB, two of them asked for ahead", transfer._INLINE_BATCH_NBYTES / MIB),
    ("architecture.md", r"Shared memory, in batches of a (\d+)nd of the pool", transfer._POOL_SHARE),
    ("architecture.md", r"of the pool \((\d+) to 256 MiB", transfer._STORE_BATCH_NBYTES[0] / MIB),
    ("architecture.md", r"of the pool \(32 to (\d+) MiB", transfer._STORE_BATCH_NBYTES[1] / MIB),
    ("architecture.md", r"the chunks themselves, in batches of up to (\d+) MiB", transfer._INLINE_BATCH_NBYTES / MIB),
    ("architecture.md", r"Inline, in batches of up to (\d+) MiB", transfer._INLINE_BATCH_NBYTES / MIB),
    ("architecture.md", r"pauses of ([\d.]+) to \d+ ms", leases._FIRST_PAUSE * 1e3),
    ("architecture.md", r"pauses of [\d.]+ to (\d+) ms", leases._LONGEST_PAUSE * 1e3),
    ("architecture.md", r"gets ([\d.]+) s to evict", storing._EVICTION_SECONDS),
    ("storing.md", r"is given ([\d.]+) s:", storing._EVICTION_SECONDS),
    ("storing.md", r"when they are not within ([\d.]+) s", storing._EVICTION_SECONDS),
    ("wire.md", r"A body is read up to (\d+) MiB", http_transport.MAX_BODY / MIB),
)


@pytest.mark.parametrize(("page", "said", "value"), NUMBERS, ids=lambda item: item if isinstance(item, str) else None)
def test_numbers_are_those_of_the_code(page: str, said: str, value: float) -> None:
    prose = " ".join(text_of(DOCS / page).split())
    found = re.findall(said, prose)
    assert [float(number) for number in found] == [pytest.approx(value)]


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _run(block: Block, url: str, http_url: str) -> None:
    """Runs a block with the two addresses of the pages replaced by those of a server."""
    addresses = {"5555": url, "9000": http_url}

    def put(match: re.Match[str]) -> str:
        address = addresses[match["port"]]
        return address if match["scheme"] else address.partition("://")[2]

    code = "\n" * (block.line - 1) + _ADDRESSES.sub(put, block.code)
    exec(compile(code, str(block.page), "exec"), {"__name__": "block"})


def _engine() -> PlayedEngine:
    """What `python -m lmcache_sdk.devserver --model` plays."""
    return cli.played_engines(cli.parse(["--model", MODEL]))[0]


@pytest.fixture(params=["shm", "inline"])
def server(request: pytest.FixtureRequest) -> DevServer:
    """The server of the pages, not started yet."""
    shm_name = unique_shm_name() if request.param == "shm" else ""
    return DevServer(models=[_engine()], shm_name=shm_name, l1_size_bytes=32 * 2**20)


@pytest.mark.parametrize("block", runnable_blocks(), ids=_block_id)
def test_runnable_block_runs_and_leaves_nothing(
    server: DevServer, block: Block, capsys: pytest.CaptureFixture[str]
) -> None:
    with server:
        _run(block, server.url, server.http_url)
        held = server.held()
        assert (held.read_locks, held.write_reservations, held.sessions, held.jobs) == (0, 0, 0, 0)
        assert held.registrations == frozenset()
    assert capsys.readouterr().err == ""


def test_blocks_that_call_us_are_run_or_are_the_contract() -> None:
    """A block that imports us and is not run is the contract's snippet, with the dots of its lists."""
    idle = [
        block for page in pages() for block in blocks(page) if block.info == "python" and "lmcache_sdk" in block.code
    ]
    assert [_page_id(block.page) for block in idle if "import lmcache_sdk" in block.code] == ["README.md"]
    assert len(runnable_blocks()) >= 5


def test_contract_snippet_runs(server: DevServer) -> None:
    """As it stands, but for the dots and the addresses; its first tokens are cached, as an engine would have them."""
    snippet = next(block for block in blocks(README) if block.info == "python" and "retrieve(ctx" in block.code)
    assert snippet.code.count("...]") == 2
    filled = snippet.code.replace("[1, 2, 3, ...]", "list(range(1, 513))").replace(
        "[4, 5, 6, ...]", "list(range(4, 516))"
    )
    with server:
        with lmc_sdk.connect(server.url, server.http_url, MODEL) as ctx:
            layout = ctx.layout
            assert layout is not None
            kv = zeros(layout, 512)
            assert ctx.store(kv, list(range(1, 513)))
            assert ctx.lookup(list(range(4, 516))).hit_tokens == 0
        _run(
            Block(snippet.page, snippet.line, snippet.info, filled + "assert ok is True\n"), server.url, server.http_url
        )
        with lmc_sdk.connect(server.url, server.http_url, MODEL) as ctx:
            assert ctx.lookup(list(range(4, 516))).hit_tokens == 512


def test_runnable_blocks_check_for_a_strict_user(mypy: Mypy, tmp_path: Path) -> None:
    """All of them in one file, each in a function of its own."""
    file = tmp_path / "blocks.py"
    parts = ["import lmcache_sdk\n"]
    for number, block in enumerate(runnable_blocks()):
        indented = "".join(f"    {line}\n" if line else "\n" for line in block.code.splitlines())
        parts.append(f"\ndef block_{number}() -> None:  # {block.name}\n{indented}")
    file.write_text("\n".join(parts), encoding="utf-8")
    checked = mypy(file)
    assert checked.returncode == 0, checked.output


def zeros(layout: KVLayout, num_tokens: int) -> torch.Tensor:
    """KV of zeros."""
    return torch.zeros(layout.planes, layout.num_layers, num_tokens, layout.hidden_dim, dtype=layout.dtype)
