"""The pages of the repository, read as what they are: links, headings, code blocks, spans of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
README: Final = ROOT / "README.md"
RUNNABLE: Final = "python runnable"
"""The info string of a block that is run."""

_FENCE: Final = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING: Final = re.compile(r"^#{1,6} (?P<text>.+)$", re.MULTILINE)
_SPAN: Final = re.compile(r"`([^`\n]+)`")


@attrs.frozen
class Block:
    """A fenced block, and the page and line at which its code begins."""

    page: Path
    line: int
    info: str
    code: str

    @property
    def name(self) -> str:
        """What a test calls it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page that users read."""
    others = ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "docs/reference/README.md")
    return [README, *(ROOT / name for name in others), *_docs()]


def _docs() -> list[Path]:
    return sorted(DOCS.glob("*.md"))


def text_of(page: Path) -> str:
    """The whole page."""
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = text_of(page)
    for match in _FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, match.start()) + 2, match["info"].strip(), match["code"])


def runnable_blocks() -> list[Block]:
    """Every block of every page that says it can be run."""
    return [block for page in pages() for block in blocks(page) if block.info == RUNNABLE]


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", text_of(page))


def links(page: Path) -> list[str]:
    """The targets of a page's links."""
    return [match["target"] for match in _LINK.finditer(prose_of(page))]


def spans(page: Path) -> list[str]:
    """What a page's prose shows as code."""
    return _SPAN.findall(prose_of(page))


def headings(page: Path) -> list[str]:
    """A page's headings, without marks."""
    return [match["text"].replace("`", "") for match in _HEADING.finditer(prose_of(page))]


def anchor(heading: str) -> str:
    """What a link to a heading says, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
