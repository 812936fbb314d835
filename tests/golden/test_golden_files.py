"""The golden files themselves: as they came, each with a header that says from where, and complete for every dialect.

Whether the codec agrees with them is asked in tests/protocol and tests/layout. Here nothing is decoded by our code.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmcache_sdk.protocol import DIALECTS

HERE = Path(__file__).parent
FILES = sorted((*HERE.glob("wire/*.json"), *HERE.glob("layouts/*.json")))


def _name(path: Path) -> str:
    return path.relative_to(HERE).as_posix()


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_golden_files_are_exactly_those_listed() -> None:
    """A file that changed did not come from the release that it names: see README.md."""
    there = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {_name(path)}" for path in FILES]
    assert sorted(there) == sorted((HERE / "SHA256SUMS").read_text().splitlines())


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_golden_header_says_where_it_comes_from(path: Path) -> None:
    document = _load(path)
    if path.parent.name == "wire":
        assert path.stem == f"lmcache-{document['lmcache_version']}"
        assert {"torch_version", "msgspec_version", "operation_ids"} <= document.keys()
    else:
        assert document["how"]
        assert document.get("lmcache_version", "0.5.6") in path.stem


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "wire"], ids=_name)
def test_golden_frames_are_hexadecimal_and_named_once(path: Path) -> None:
    vectors = _load(path)["vectors"]
    named = [(vector["kind"], vector["name"], vector["uid"]) for vector in vectors]
    assert len(set(named)) == len(named) > 80
    for vector in vectors:
        assert vector["kind"] in {"request", "reply"}
        assert all(re.fullmatch(r"(?:[0-9a-f]{2})*", frame) for frame in vector["frames"]), vector["name"]


@pytest.mark.parametrize("release", DIALECTS)
def test_golden_files_cover_every_rule_of_a_dialect(release: str) -> None:
    """Each rule has a recorded request with its opcode and as many frames, and a recorded reply unless that is void."""
    documents = [_load(path) for path in FILES if path.parent.name == "wire"]
    lacking = []
    for rule in DIALECTS[release].rules.values():
        recorded = [d for d in documents if d["operation_ids"].get(rule.name, rule.name) == rule.opcode]
        requests = [v for d in recorded for v in d["vectors"] if v["kind"] == "request" and v["op"] == rule.name]
        if not any(len(v["payloads"]) == len(rule.frames) for v in requests):
            lacking.append(rule.name)
    assert lacking == []
