"""The tree itself: each file has a place and a size that can be read; no import or public type breaks a promise.

What is public is what `lmcache_sdk.__all__` and `lmcache_sdk.kvcache` name. The walk over their signatures accepts a
type of ours only when it is public too (or spelled out by a public alias), and no Any anywhere.
"""

from __future__ import annotations

import ast
import collections.abc
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

import lmcache_sdk
import lmcache_sdk.kvcache

SRC: Final = Path(lmcache_sdk.__file__).parent
MAX_LINES: Final = 400
MAX_FUNCTION_LINES: Final = 40
# A signature of named keywords that hands each one on: long, and nothing to understand in it.
PASS_THROUGH: Final = {("devserver/server.py", "__init__")}

# STYLE: a new file must name the noun it serves; it takes its place here when it does.
TREE: Final[dict[str, set[str]]] = {
    ".": {"__init__", "errors", "kvcache", "values"},
    # a byte
    "protocol": {
        *("__init__", "messages", "rules", "dialects", "codec", "exchange", "documents"),
        "replies",  # how each reply is read and written: split from codec for its length
        "showing",  # what a server sent, as an error shows it: split from documents and structuring
        "structuring",  # JSON values -> documents, split from documents because cattrs loads on first use
        "envelope",  # the typed tensor envelope of 0.5.7: MessagePack, so protocol's, though blobs makes the tensors
    },
    # a lock
    "session": {
        *("__init__", "transport", "zmq_transport", "http_transport", "shared_memory", "deadline", "channel"),
        *("states", "leases", "registration", "session"),
        "addresses",  # the two URLs, normalised and checked against each other
        "buffers",  # memory of dropped results, for the next ones
        "debts",  # what a call that was given up still owes the server
        "discovery",  # what HTTP tells before the first frame: release, configuration, status
        "deadline_sockets",  # what http_transport connects with; requests, for its certificates, on first use
        "gate",  # one call at a time for each key; a close ends the waiting
        "interrupts",  # when a signal handler may run: at a wait, and nowhere else
        "operation",  # one user call: its request id, its key, its guaranteed END_SESSION
        "process",  # whether this is a forked child of the process that made something
        "probe",  # what HTTP says while the message port is silent
        "renewal",  # a channel that has gone bad, replaced once for all threads
        "reservations",  # the write half of leases
        "tracing",  # LMCACHE_SDK_TRACE: frames printed in the golden form
    },
    # a shape
    "layout": {
        *("__init__", "dtypes", "axes", "geometry", "chunking", "packing", "views", "blobs"),
        "entries",  # a /status entry -> geometry: split from geometry for its length
        "opcodes",  # blobs, in three steps: payload bytes -> pickle opcodes,
        "unpickling",  # opcodes -> tensors,
        "pickling",  # and tensors -> payload bytes
    },
    # a user call
    "facade": {
        *("__init__", "context", "transfer", "results"),
        "canary",  # the proof that the mapped pool is the server's
        "link",  # a connection that has gone bad, made again
        "connecting",  # the handshake, in its order
        "arguments",  # what a user may pass, checked before the first request
        "storing",  # the store half of transfer
        "viewing",  # chunks where they are, for the time of a block
    },
}
# Packages beside the core: they import the public names (devserver also protocol and layout), and are free inside.
BESIDE: Final = {"devserver", "testing", "cli", "edit", "streams", "interop"}

# Made by connect() or a context and never by a user: what their __init__ takes is not a promise.
MADE_FOR_USERS: Final = {"lmcache_sdk.LMCacheKVCacheContext.__init__", "lmcache_sdk.KVView.__init__"}

FORBIDDEN_IMPORTS: Final = {"pickle", "lmcache", "multiprocessing", "dill", "cloudpickle", "marshal", "shelve"}


def _sources() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def _id(path: Path) -> str:
    return str(path.relative_to(SRC))


def _modules() -> list[str]:
    found = pkgutil.walk_packages([str(SRC)], prefix="lmcache_sdk.")
    return ["lmcache_sdk", *sorted(module.name for module in found if not module.name.endswith("__main__"))]


def test_every_file_has_a_place() -> None:
    misplaced = []
    for path in _sources():
        folder, name = path.relative_to(SRC).parent, path.stem
        if folder.parts[:1] and folder.parts[0] in BESIDE:
            continue
        if name not in TREE.get(str(folder), set()):
            misplaced.append(_id(path))
    assert misplaced == []


def test_every_place_has_its_file() -> None:
    """A name in TREE without a file is a name to take out: the table must stay true."""
    missing = [
        f"{folder}/{name}.py"
        for folder, names in TREE.items()
        for name in sorted(names)
        if not (SRC / folder / f"{name}.py").exists()
    ]
    assert missing == []


def test_only_python_and_py_typed() -> None:
    other = [_id(p) for p in SRC.rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"} and p.name != "py.typed"]
    assert other == []
    assert (SRC / "py.typed").exists()


@pytest.mark.parametrize("path", _sources(), ids=_id)
def test_file_can_be_read_at_once(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", _sources(), ids=_id)
def test_functions_are_short(path: Path) -> None:
    """Lines from `def` to the end, without the docstring; a table of one or two statements may be longer."""
    long = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            statements = [inner for outer in body for inner in ast.walk(outer) if isinstance(inner, ast.stmt)]
            header = node.body[0].lineno - node.lineno
            lines = header + ((node.end_lineno or 0) - body[0].lineno + 1 if body else 0)
            if lines > MAX_FUNCTION_LINES and len(statements) > 2 and (_id(path), node.name) not in PASS_THROUGH:
                long[node.name] = lines
    assert long == {}


@pytest.mark.parametrize("path", _sources(), ids=_id)
def test_module_states_its_contract(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", _sources(), ids=_id)
def test_nothing_forbidden_is_imported(path: Path) -> None:
    """Wherever the import stands; also the ways around the statement."""
    tree = ast.parse(path.read_text())
    imported = {name.partition(".")[0] for name in _imported(tree)}
    assert imported & FORBIDDEN_IMPORTS == set()
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert called & {"eval", "exec", "__import__"} == set()


@pytest.mark.parametrize("path", _sources(), ids=_id)
def test_imports_stand_at_the_top(path: Path) -> None:
    """An import in a function, or one for the checker only, hides a cycle (STYLE 2)."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    inside = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and id(node) not in top
        and any(name.partition(".")[0] == "lmcache_sdk" for name in _names(node))
    ]
    assert inside == []


@pytest.mark.parametrize("name", _modules())
def test_module_imports_and_its_names_exist(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", None)
    if exported is None:
        assert not hasattr(module, "__path__") or not _defines_names(module), f"{name} has names but no __all__"
        return
    assert len(set(exported)) == len(exported)
    assert [n for n in exported if not hasattr(module, n)] == []
    if hasattr(module, "__path__"):
        assert list(exported) == sorted(exported, key=_rank)


def test_public_names() -> None:
    """The names promised, and every error class; nothing else without a thought given to it here."""
    error_classes = {
        name
        for name, value in vars(importlib.import_module("lmcache_sdk.errors")).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    promised = {"Fate", "KVLayout", "KVView", "LMCacheKVCacheContext", "LookupResult", "StoreResult", "TokenSequence"}
    assert set(lmcache_sdk.__all__) == promised | error_classes
    assert {"close", "connect", "lookup", "retrieve", "store"} <= set(lmcache_sdk.kvcache.__all__)


def test_root_has_no_code() -> None:
    body = ast.parse(Path(lmcache_sdk.__file__).read_text()).body
    kinds = {type(node) for node in body}
    assert kinds <= {ast.Expr, ast.ImportFrom, ast.Import, ast.Assign, ast.AnnAssign}


# ------------------------------------------------------------------------------------------- the walk over signatures


@attrs.frozen
class Annotation:
    """One type in a public signature, and where it stands."""

    where: str
    hint: object


def _public_annotations() -> Iterator[Annotation]:
    for module in (lmcache_sdk, lmcache_sdk.kvcache):
        for name in module.__all__:
            yield from _annotations_of(f"{module.__name__}.{name}", getattr(module, name))


def _annotations_of(where: str, value: object) -> Iterator[Annotation]:
    if inspect.isclass(value):
        yield from _annotations_of_class(where, value)
    elif inspect.isroutine(value):
        yield from _annotations_of_function(where, value)
    elif typing.get_origin(value) is not None or isinstance(value, types.UnionType):
        yield from (Annotation(where, part) for part in typing.get_args(value))


def _annotations_of_class(where: str, cls: type) -> Iterator[Annotation]:
    for name, hint in typing.get_type_hints(cls).items():
        if not name.startswith("_"):
            yield Annotation(f"{where}.{name}", hint)
    for name, member in inspect.getmembers_static(cls) if hasattr(inspect, "getmembers_static") else _members(cls):
        ours = any(name in vars(base) and base.__module__.startswith("lmcache_sdk") for base in cls.__mro__)
        if not ours or (name.startswith("_") and name not in {"__init__", "__enter__", "__exit__", "__bool__"}):
            continue
        if f"{where}.{name}" in MADE_FOR_USERS:
            continue
        if isinstance(member, property):
            yield from _annotations_of_function(f"{where}.{name}", member.fget)
        elif isinstance(member, classmethod | staticmethod):
            yield from _annotations_of_function(f"{where}.{name}", member.__func__)
        elif inspect.isfunction(member):
            yield from _annotations_of_function(f"{where}.{name}", member)


def _members(cls: type) -> list[tuple[str, object]]:
    return [(name, inspect.getattr_static(cls, name)) for name in dir(cls)]


def _annotations_of_function(where: str, function: Callable[..., object] | None) -> Iterator[Annotation]:
    assert function is not None, where
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    unannotated = [p for p in parameters if p not in hints and p not in {"self", "cls"}]
    assert unannotated == [], f"{where}: no type for {unannotated}"
    assert "return" in hints, f"{where}: no type for what it returns"
    for name, hint in hints.items():
        yield Annotation(f"{where}({name})", hint)


def _parts(hint: object) -> Iterator[object]:
    """The hint and every type inside it."""
    yield hint
    for part in typing.get_args(hint):
        if isinstance(part, list):  # the parameters of a Callable
            for inner in part:
                yield from _parts(inner)
        else:
            yield from _parts(part)


def _public_types() -> set[object]:
    public: set[object] = set()
    for name in lmcache_sdk.__all__:
        public.update(_parts(getattr(lmcache_sdk, name)))
    return public


def test_public_signatures_mention_public_types_only() -> None:
    public = _public_types()
    offences = sorted(
        f"{annotation.where}: {part}"
        for annotation in _public_annotations()
        for part in _parts(annotation.hint)
        if isinstance(part, type) and part.__module__.startswith("lmcache_sdk") and part not in public
    )
    assert offences == []


def test_public_signatures_have_no_any() -> None:
    offences = sorted({a.where for a in _public_annotations() for part in _parts(a.hint) if part is Any})
    assert offences == []


def test_the_walk_finds_what_it_looks_for() -> None:
    """The walk over a class that breaks both rules; and it is not a walk over nothing."""

    class Hidden:
        pass

    Hidden.__module__ = "lmcache_sdk.somewhere"

    class Offender:
        def method(self, a: collections.abc.Callable[[Hidden], list[Any]]) -> None: ...

        @property
        def fact(self) -> Hidden | None: ...

    Offender.__module__ = "lmcache_sdk.somewhere"
    method, fact = Offender.method, inspect.getattr_static(Offender, "fact").fget
    method.__annotations__ = {"a": collections.abc.Callable[[Hidden], list[Any]], "return": None}
    fact.__annotations__ = {"return": Hidden | None}
    found = [part for a in _annotations_of("x", Offender) for part in _parts(a.hint)]
    assert found.count(Hidden) == 2
    assert Any in found
    assert sum(1 for _ in _public_annotations()) > 60


# ------------------------------------------------------------------------------------------------------------- helpers


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _names(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            yield ast.unparse(node.args[0]).strip("'\"")


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""]


def _rank(name: str) -> tuple[int, str]:
    """The order that the linter keeps too: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def _defines_names(module: types.ModuleType) -> bool:
    return any(not name.startswith("_") and not inspect.ismodule(value) for name, value in vars(module).items())
