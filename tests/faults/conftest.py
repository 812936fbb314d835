"""Fixtures of the fault tests, and the table at the end of a run.

Contract: every test here carries the mark `faults` and names its rows of `rows.py` with the mark `row`. A `world` is a
running server shared by the tests of its release and transport, emptied before each test; what it holds afterwards is
what it held before, or the row is poor. Leaks in this process fail a test by `tests/fix_leaks.py`. Nothing is collected
in a run that did not name this folder.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import zmq

from tests.fix_leaks import Snapshot
from tests.integration.make_env import is_present
from tests.integration.servers import Transport

from .report import Case, Danger, Fault, Report, Verdict
from .rows import ROWS
from .worlds import SMALL_POOL, World, world

HERE: Final = Path(__file__).resolve().parent
TABLE: Final = HERE / "out" / "table.md"
TRANSPORTS: Final[tuple[Transport, ...]] = ("shm", "inline")
BOTH: Final = [("0.5.6", transport) for transport in TRANSPORTS]
EVERYWHERE: Final = [(release, transport) for release in ("0.5.6", "0.5.0", "0.5.7rc2") for transport in TRANSPORTS]
SHM_EVERYWHERE: Final = [place for place in EVERYWHERE if place[1] == "shm"]

WHERE: Final = ("shared_world", "own_world", "hasty_world", "reaped", "server")
"""Parameters that say on which server of which transport a test runs."""

_FAULT: Final = pytest.StashKey[Fault]()
_CASE: Final = pytest.StashKey[Case]()
_REPORT: Final = pytest.StashKey[Report]()
_BEGAN: Final = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "faults: faults on real servers; only `make faults` runs it")
    config.addinivalue_line("markers", "leaves(what): something stays on the server, which the test itself judges")
    config.addinivalue_line("markers", "row(*numbers): the faults of rows.py that a test shows")
    config.stash[_REPORT] = Report()
    config.stash[_BEGAN] = time.monotonic()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = (Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args)
    return None if any(path == HERE or HERE in path.parents for path in named) else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The worlds of a test that does not say which: 0.5.6 with both transports."""
    if "shared_world" in metafunc.fixturenames and not _says_where(metafunc.definition):
        metafunc.parametrize("shared_world", BOTH, ids=_place, indirect=True, scope="session")


def _says_where(node: pytest.Item) -> bool:
    return any("shared_world" in str(mark.args[:1]) for mark in node.iter_markers("parametrize"))


def _place(place: tuple[str, str]) -> str:
    return "-".join(place)


everywhere = pytest.mark.parametrize("shared_world", EVERYWHERE, ids=_place, indirect=True, scope="session")
own_at_both = pytest.mark.parametrize("own_world", BOTH, ids=_place, indirect=True, scope="module")
own_everywhere = pytest.mark.parametrize("own_world", EVERYWHERE, ids=_place, indirect=True, scope="module")
shm_everywhere = pytest.mark.parametrize("shared_world", SHM_EVERYWHERE, ids=_place, indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.faults)
            if "own" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.may_leak("a restarted server; the fixture looks at everything else"))
            item.add_marker(pytest.mark.timeout(150))


# ---- what a test gets ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real_servers() -> None:
    """The environment of the real servers is there."""
    if is_present():
        return
    hint = "no real servers here: run tests/integration/make_env.py"
    if os.environ.get("LMCACHE_SDK_REQUIRE_INTEROP") == "1":
        pytest.fail(hint, pytrace=False)
    pytest.skip(hint)


@pytest.fixture(scope="session", autouse=True)
def pyzmq_collector() -> None:
    """The thread that pyzmq makes in each process for its first large frame is there before anything is compared."""
    zmq.Frame(bytes(2**20), copy=False, copy_threshold=0)


@pytest.fixture(autouse=True)
def fault(request: pytest.FixtureRequest) -> Fault:
    """This test's lines of the report."""
    node: pytest.Item = request.node
    rows = tuple(str(number) for mark in node.iter_markers("row") for number in mark.args)
    assert rows and all(row in ROWS for row in rows), f"{node.nodeid} names no row of rows.py"
    made = Fault(rows)
    callspec: object = getattr(node, "callspec", None)
    parameters: dict[str, object] = getattr(callspec, "params", {})
    place = next((parameters[name] for name in WHERE if name in parameters), None)
    if isinstance(place, tuple):
        made.server, made.transport = str(place[0]), str(place[1])
    node.stash[_FAULT] = made
    return made


@pytest.fixture(scope="session")
def shared_world(
    request: pytest.FixtureRequest, real_servers: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """One server with a small pool, and its engine, for all tests of a release and transport."""
    release, transport = request.param
    with world(release, transport, *SMALL_POOL, log_dir=tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.fixture
def here(request: pytest.FixtureRequest, shared_world: World) -> Iterator[World]:
    """The shared world, empty; after the test the proof that nothing was left on its server."""
    shared_world.server.clear()
    before = shared_world.server.held()
    shared_world.contexts = contextlib.ExitStack()
    yield shared_world
    shared_world.contexts.close()
    if not request.node.get_closest_marker("leaves"):
        shared_world.settled(before)


@pytest.fixture(scope="module")
def own_world(request: pytest.FixtureRequest, real_servers: None) -> Iterator[World]:
    """A server that the tests of a module may kill."""
    release, transport = request.param
    with world(release, transport, *SMALL_POOL) as made:
        yield made


@pytest.fixture
def own(own_world: World) -> Iterator[World]:
    """The same, alive, with its first chunk size and layout, empty."""
    if own_world.dead or own_world.changed:
        own_world.restart()
    own_world.server.clear()
    own_world.contexts = contextlib.ExitStack()
    before = _held_but_children()
    yield own_world
    own_world.contexts.close()
    end = time.monotonic() + 5
    while (left := _held_but_children() - before) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert not left, f"left behind: {sorted(left)}"


def _held_but_children() -> frozenset[str]:
    """What this process holds; a server that was restarted is a new child of it."""
    return frozenset(each for each in Snapshot.take().held if not each.startswith("child process"))


# ---- the verdicts ----------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Judges each phase; the worst is the test's verdict."""
    outcome = yield
    fault = item.stash.get(_FAULT, None)
    if fault is not None and not (call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception)):
        case = item.stash.get(_CASE, None)
        if case is None:
            case = item.stash[_CASE] = Case(fault, Verdict.RIGHT)
            item.config.stash[_REPORT].cases.append(case)
        _judge(case, call)
    return outcome


def _judge(case: Case, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is None:
        if call.when == "call" and case.fault.bound:
            case.verdict = max(case.verdict, Verdict.BOUNDED)
        return
    text = str(call.excinfo.value).split("\n")[0][:300]
    hang = "Timeout" in text and call.excinfo.errisinstance(pytest.fail.Exception)
    danger = hang or call.excinfo.errisinstance(Danger)
    case.verdict = max(case.verdict, Verdict.DANGEROUS if danger else Verdict.POOR)
    case.problem = case.problem or f"{call.excinfo.typename}: {text}"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the table and writes it down."""
    report = config.stash[_REPORT]
    if not report.cases:
        return
    TABLE.parent.mkdir(exist_ok=True)
    minutes = (time.monotonic() - config.stash[_BEGAN]) / 60
    text = f"{report.table()}\n{minutes:.1f} minutes.\n"
    TABLE.write_text(text)
    terminalreporter.section("faults")
    terminalreporter.write_line(text)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A poor or dangerous row fails the run, and so does a row that a whole run did not show."""
    report = session.config.stash[_REPORT]
    whole = all(Path(argument).resolve() == HERE for argument in session.config.args)
    narrowed = session.config.option.keyword or session.config.option.markexpr not in ("", "faults")
    if report.cases and (report.failed() or (whole and not narrowed and report.missing())):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
