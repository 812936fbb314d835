"""Which version string speaks which wire, and what the table promises about its releases."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import UnsupportedError

RELEASES: Final = ("0.5.0", "0.5.1", "0.5.2", "0.5.3", "0.5.4", "0.5.5", "0.5.6", "0.5.7rc2")

SPOKEN: Final = {
    **{release: release for release in RELEASES},
    "v0.5.6": "0.5.6",
    "0.5.6+cpu": "0.5.6",
    "0.5.6-g3e11e108": "0.5.6",
    "0.5.6.post1": "0.5.6",
    "0.5.3.post2+cu128": "0.5.3",
    "0.5.7rc1": "0.5.7rc2",
    "0.5.7rc3": "0.5.7rc2",
    "0.5.7rc2+local": "0.5.7rc2",
}

REFUSED: Final = (
    *("", "NA", "unknown", "0", "0.5", "5", "latest"),
    *("0.4.7", "0.4.99", "0.3.0", "0.5.8", "0.6.0", "1.0.0", "0.50.6", "10.5.6", "0.5.10", "0.5.60"),
    *("0.5.7", "0.5.7.dev3", "0.5.7rc2.dev1", "0.5.7a1", "0.5.7b2", "0.5.8rc1"),
    *("0.5.6rc1", "0.5.6.dev0", "0.5.6.dev12+gabc", "0.5.6 ", " 0.5.6", "0.5.6.1", "0.5.6x", "x0.5.6", "0.5.6,0.5.7"),
)

FAMILIES: Final = {"D1": RELEASES[:3], "D2": RELEASES[3:7], "D3": RELEASES[7:]}

FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "two_hs_may_be_two_planes": RELEASES[:2],
    "free_needs_live_session": RELEASES[6:],
    "free_clips_to_hit": RELEASES[4:],
    "readers_required": RELEASES[5:],
    "garbage_after_write_ttl": RELEASES[:6],
    "get_chunk_size_freezes": RELEASES[7:],
    "op_strings": RELEASES[6:],
    "unknown_opcode_kills": RELEASES[:6],
}
"""In which releases a flag is set (PROTOCOL.md sections 0, 2, 5, 6 and 12)."""


@pytest.mark.parametrize(("version", "release"), SPOKEN.items())
def test_version_chooses_the_dialect(version: str, release: str) -> None:
    assert p.dialect_of_server(version).release == release


@pytest.mark.parametrize("version", REFUSED)
def test_any_other_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        p.dialect_of_server(version)
    assert repr(version) in str(caught.value)
    assert "dialect=" in str(caught.value) and "0.5.0" in str(caught.value) and "0.5.7rc2" in str(caught.value)
    assert caught.value.dialect == version


@given(st.text(max_size=40))
def test_whatever_a_server_calls_itself(version: str) -> None:
    try:
        dialect = p.dialect_of_server(version)
    except UnsupportedError:
        return
    assert version.removeprefix("v").startswith(dialect.release[:5])


def test_a_dialect_can_be_named() -> None:
    assert [p.dialect_named(release).release for release in RELEASES] == list(RELEASES)


@pytest.mark.parametrize("name", ["", "0.5", "0.5.7", "D2", "0.5.6 ", "0.5.6.post1", "latest"])
def test_a_named_dialect_must_be_one_of_the_table(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        p.dialect_named(name)
    assert repr(name) in str(caught.value) and "0.5.6" in str(caught.value)


def test_families() -> None:
    assert tuple(p.DIALECTS) == RELEASES
    for family, releases in FAMILIES.items():
        assert tuple(r for r, dialect in p.DIALECTS.items() if dialect.family == family) == releases


@pytest.mark.parametrize("flag", FLAGS)
def test_flags(flag: str) -> None:
    assert tuple(r for r, dialect in p.DIALECTS.items() if getattr(dialect, flag)) == FLAGS[flag]


def test_forms() -> None:
    keys = {release: dialect.key_form for release, dialect in p.DIALECTS.items()}
    assert {keys[r] for r in RELEASES[:5]} == {p.KeyForm.TOKEN_IDS_8}
    assert {keys[r] for r in RELEASES[5:7]} == {p.KeyForm.TOKEN_IDS_10}
    assert keys["0.5.7rc2"] is p.KeyForm.TOKEN_BYTES
    assert [r for r, d in p.DIALECTS.items() if d.payload_form is p.PayloadForm.ENVELOPE] == ["0.5.7rc2"]
    assert [r for r, d in p.DIALECTS.items() if d.config_path == "/conf"] == ["0.5.0"]
    assert {d.config_path for r, d in p.DIALECTS.items() if r != "0.5.0"} == {"/config"}


@pytest.mark.parametrize("release", RELEASES)
def test_within_a_release_no_two_requests_share_an_opcode_or_a_name(release: str) -> None:
    rules = p.DIALECTS[release].rules.values()
    assert len({rule.opcode for rule in rules}) == len(rules)
    assert len({rule.name for rule in rules}) == len(rules)


@pytest.mark.parametrize("release", RELEASES)
def test_every_request_has_a_rule_but_for_what_the_release_lacks(release: str) -> None:
    everything = set(p.DIALECTS["0.5.7rc2"].rules)
    lacking = {kind.__name__ for kind in everything - set(p.DIALECTS[release].rules)}
    expected = set() if release == "0.5.7rc2" else {"NegotiateChunkSize"}
    if release in FAMILIES["D1"]:
        expected.add("GetExperimental")
    assert lacking == expected


def test_an_opcode_that_would_delete_is_another_operation_elsewhere() -> None:
    """Why the nearest dialect is never good enough: 17 clears a D1 server and commits a store on a D2 one."""
    clear_of_d1 = p.DIALECTS["0.5.2"].rules[p.Clear].opcode
    assert p.DIALECTS["0.5.3"].rules[p.CommitStore].opcode == clear_of_d1


@pytest.mark.parametrize("release", RELEASES)
def test_every_dialect_names_its_source(release: str) -> None:
    dialect = p.DIALECTS[release]
    assert len(dialect.source) > 10
    assert repr(dialect) == f"<Dialect {release} {dialect.family}>"
