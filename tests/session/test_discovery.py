"""What HTTP tells before the first frame: which dialect, in which order it is asked, and each refusal's way out."""

from __future__ import annotations

from typing import Final

import pytest

from lmcache_sdk import protocol as p
from lmcache_sdk.errors import DeadlineExceededError, HTTPStatusError, RemoteProtocolError, UnsupportedError
from lmcache_sdk.session import Addresses, Deadline, ServerFacts, discover
from tests.session.pages import config_page, server_pages, status_page
from tests.session.ports import HttpPort, Page, page

pytestmark = pytest.mark.usefixtures("hasty")

HTML: Final = Page(b"<html>busy</html>")


def ask(port: HttpPort, dialect: str | None = None, api_key: str | None = None) -> ServerFacts:
    addresses = Addresses(url="tcp://127.0.0.1:1", http_url=port.url)
    return discover(addresses, api_key, dialect, Deadline.after(5))


@pytest.mark.parametrize("release", p.DIALECTS)
def test_every_release_is_recognised_at_its_own_paths(release: str) -> None:
    with HttpPort(server_pages(release)) as port:
        facts = ask(port)
        assert (facts.version, facts.dialect.release, facts.dialect_was_named) == (release, release, False)
        config = "/conf" if release == "0.5.0" else "/config"
        assert port.paths == ["/lmc_version", config, "/status"]
        assert port.num_connections == 1


@pytest.mark.parametrize(
    ("pages", "version"),
    [
        ({"/version": page("0.5.4-g3e11e108")}, "0.5.4"),
        ({"/version": page("0.5.4-NA")}, "0.5.4"),
        ({"/version": page("0.5.7rc2-gabc")}, "0.5.7rc2"),
        ({"/lmc_version": page(""), "/version": page("0.5.4-gabc")}, "0.5.4"),
        ({"/lmc_version": page("NA"), "/version": page("0.5.4-gabc")}, "0.5.4"),
        ({"/lmc_version": page("0.5.3"), "/version": page("0.5.4-gabc")}, "0.5.3"),
    ],
)
def test_version_from_whichever_page_names_it(pages: dict[str, Page], version: str) -> None:
    rest = {path: found for path, found in server_pages().items() if path != "/lmc_version"}
    with HttpPort({**rest, **pages}) as port:
        facts = ask(port)
        assert (facts.version, facts.dialect.release) == (version, version)


@pytest.mark.parametrize(
    "pages",
    [
        {},
        {"/lmc_version": page(""), "/version": page("NA-NA")},
        {"/lmc_version": page("NA")},
        {"/version": page("NA-gabc")},
        {"/version": page("-gabc")},
        {"/version": page("")},
    ],
)
def test_a_version_that_nobody_names_needs_the_callers_word(pages: dict[str, Page]) -> None:
    rest = {path: found for path, found in server_pages().items() if path != "/lmc_version"}
    with HttpPort({**rest, **pages}) as port:
        with pytest.raises(UnsupportedError, match=r'dialect="0\.5\.6"') as caught:
            ask(port)
        assert caught.value.request == "connect"
        assert set(port.paths) <= {"/lmc_version", "/version"}
        facts = ask(port, "0.5.6")
        assert (facts.version, facts.dialect.release, facts.dialect_was_named) == ("", "0.5.6", True)


@pytest.mark.parametrize("version", ["0.4.7", "0.5.7", "0.5.8", "1.0.0", "0.5.7.dev1", "main"])
def test_an_unknown_version_is_refused_by_name_and_can_be_overridden(version: str) -> None:
    with HttpPort({**server_pages(), "/lmc_version": page(version)}) as port:
        with pytest.raises(UnsupportedError, match=version.replace(".", r"\.")):
            ask(port)
        assert port.paths == ["/lmc_version"]
        facts = ask(port, "0.5.5")
        assert (facts.version, facts.dialect.release, facts.dialect_was_named) == (version, "0.5.5", True)


def test_a_named_dialect_is_looked_up_before_anything_is_asked() -> None:
    with HttpPort(server_pages()) as port:
        with pytest.raises(UnsupportedError, match=r"0\.9\.9"):
            ask(port, "0.9.9")
        assert port.visits == []


def test_a_named_dialect_wins_over_what_the_server_reports() -> None:
    with HttpPort(server_pages("0.5.6")) as port:
        facts = ask(port, "0.5.3")
        assert (facts.version, facts.dialect.release, facts.dialect_was_named) == ("0.5.6", "0.5.3", True)


def test_the_other_config_path_is_tried_on_404() -> None:
    pages = server_pages("0.5.6")
    pages["/conf"] = pages.pop("/config")
    with HttpPort(pages) as port:
        assert ask(port).config.mp.chunk_size == 4
        assert port.paths == ["/lmc_version", "/config", "/conf", "/status"]


def test_no_config_at_all() -> None:
    pages = server_pages()
    del pages["/config"]
    with HttpPort(pages) as port:
        with pytest.raises(HTTPStatusError) as caught:
            ask(port)
        assert caught.value.status == 404


def test_the_effective_chunk_size_is_that_of_the_status() -> None:
    """0.5.7's engines negotiate it upward; asking over ZMQ would freeze it."""
    with HttpPort({**server_pages("0.5.7rc2"), "/status": status_page(chunk_size=512)}) as port:
        assert ask(port).chunk_size == 512


# ---- servers that cannot be used -------------------------------------------------------------------------------------


def test_the_lmcache_driven_mode_is_refused_at_once_with_the_flag() -> None:
    with HttpPort({**server_pages(), "/config": config_page(supported_transfer_mode="lmcache_driven")}) as port:
        with pytest.raises(UnsupportedError, match=r"--supported-transfer-mode auto") as caught:
            ask(port)
        assert caught.value.dialect == "0.5.6"
        assert "/status" not in port.paths


@pytest.mark.parametrize("mode", ["auto", "engine_driven"])
def test_the_other_modes_are_fine(mode: str) -> None:
    with HttpPort({**server_pages(), "/config": config_page(supported_transfer_mode=mode)}) as port:
        assert ask(port).config.mp.supported_transfer_mode == mode


def test_a_status_without_the_engine_driven_registry_is_refused_with_the_flag() -> None:
    pages = {**server_pages(), "/status": page({"chunk_size": 4})}
    with HttpPort(pages) as port, pytest.raises(UnsupportedError, match=r"--supported-transfer-mode auto"):
        ask(port)


def test_grpc_is_refused_with_the_flag() -> None:
    pages = {**server_pages(), "/config": config_page(transport="grpc")}
    with HttpPort(pages) as port, pytest.raises(UnsupportedError, match=r"grpc.*--transport zmq"):
        ask(port)


# ---- pages that are wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/lmc_version", "/config", "/status"])
@pytest.mark.parametrize(
    "wrong", [HTML, Page(b""), page(None), page([]), page([1]), page(5), Page(b'{"mp": '), Page(b"\xff\xfe")]
)
def test_a_page_that_is_no_document_is_refused_with_its_name(path: str, wrong: Page) -> None:
    with HttpPort({**server_pages(), path: wrong}) as port:
        with pytest.raises(RemoteProtocolError) as caught:
            ask(port)
        assert caught.value.path == path.lstrip("/")
        assert path.lstrip("/") in str(caught.value)


@pytest.mark.parametrize(
    ("path", "wrong", "where"),
    [
        ("/config", page({}), "config.mp"),
        ("/config", page({"mp": None}), "config.mp"),
        ("/config", page({"mp": {"chunk_size": 4}}), "config.mp.supported_transfer_mode"),
        ("/config", config_page(chunk_size=0), "config.mp.chunk_size"),
        ("/config", config_page(chunk_size=-4), "config.mp.chunk_size"),
        ("/config", config_page(chunk_size="abc"), "config.mp.chunk_size"),
        ("/status", page({}), "status.chunk_size"),
        ("/status", status_page(chunk_size=0), "status.chunk_size"),
        ("/status", status_page(chunk_size=True), "status.chunk_size"),
        ("/status", status_page(cache_context_meta=[]), "status.cache_context_meta"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(path: str, wrong: Page, where: str) -> None:
    with HttpPort({**server_pages(), path: wrong}) as port:
        with pytest.raises(RemoteProtocolError) as caught:
            ask(port)
        assert caught.value.path == where and where in str(caught.value)


@pytest.mark.parametrize("path", ["/lmc_version", "/config", "/status"])
@pytest.mark.parametrize("status", [401, 500, 503])
def test_a_status_that_is_no_404_is_not_guessed_around(path: str, status: int) -> None:
    with HttpPort({**server_pages(), path: Page(b"{}", status)}) as port:
        with pytest.raises(HTTPStatusError) as caught:
            ask(port)
        assert (caught.value.status, caught.value.url) == (status, port.url + path)
        assert port.paths[-1] == path


def test_the_key_goes_with_every_question() -> None:
    with HttpPort(server_pages("0.5.7rc2")) as port:
        ask(port, api_key="secret")
        assert {visit.headers.get("authorization") for visit in port.visits} == {"Bearer secret"}


def test_one_deadline_over_all_questions() -> None:
    with HttpPort(server_pages()) as port:
        addresses = Addresses(url="tcp://127.0.0.1:1", http_url=port.url)
        with pytest.raises(DeadlineExceededError):
            discover(addresses, None, None, Deadline.after(1e-9))
        assert port.visits == []
