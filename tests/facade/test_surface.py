"""What users are promised: names, the order of arguments, what is keyword-only, defaults, and words for all of it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

import lmcache_sdk
import lmcache_sdk.kvcache as lmc_sdk
from lmcache_sdk import KVLayout, LMCacheKVCacheContext

POSITIONAL: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD
KEYWORD: Final = inspect.Parameter.KEYWORD_ONLY
MISSING: Final = inspect.Parameter.empty

FUNCTIONS: Final[dict[Callable[..., object], list[tuple[str, object, object]]]] = {
    lmc_sdk.connect: [
        ("url", POSITIONAL, MISSING),
        ("http_url", POSITIONAL, MISSING),
        ("model_name", POSITIONAL, MISSING),
        ("timeout", POSITIONAL, 60.0),
        ("layout", KEYWORD, None),
        ("dialect", KEYWORD, None),
        ("api_key", KEYWORD, None),
        ("transport", KEYWORD, None),
        ("recycle_bytes", KEYWORD, 2 * 2**30),
    ],
    lmc_sdk.retrieve: [
        ("ctx", POSITIONAL, MISSING),
        ("tokens", POSITIONAL, MISSING),
        ("cache_salt", POSITIONAL, ""),
        ("out", KEYWORD, None),
    ],
    lmc_sdk.view: [("ctx", POSITIONAL, MISSING), ("tokens", POSITIONAL, MISSING), ("cache_salt", POSITIONAL, "")],
    lmc_sdk.lookup: [("ctx", POSITIONAL, MISSING), ("tokens", POSITIONAL, MISSING), ("cache_salt", POSITIONAL, "")],
    lmc_sdk.store: [
        ("ctx", POSITIONAL, MISSING),
        ("kv", POSITIONAL, MISSING),
        ("tokens", POSITIONAL, MISSING),
        ("cache_salt", POSITIONAL, ""),
    ],
    lmc_sdk.close: [("ctx", POSITIONAL, MISSING)],
    LMCacheKVCacheContext.lookup: [
        ("self", POSITIONAL, MISSING),
        ("tokens", POSITIONAL, MISSING),
        ("cache_salt", POSITIONAL, ""),
    ],
    LMCacheKVCacheContext.retrieve: [
        ("self", POSITIONAL, MISSING),
        ("tokens", POSITIONAL, MISSING),
        ("cache_salt", POSITIONAL, ""),
        ("out", KEYWORD, None),
    ],
    LMCacheKVCacheContext.view: [
        ("self", POSITIONAL, MISSING),
        ("tokens", POSITIONAL, MISSING),
        ("cache_salt", POSITIONAL, ""),
    ],
    LMCacheKVCacheContext.store: [
        ("self", POSITIONAL, MISSING),
        ("kv", POSITIONAL, MISSING),
        ("tokens", POSITIONAL, MISSING),
        ("cache_salt", POSITIONAL, ""),
        ("existing", KEYWORD, "skip"),
    ],
    LMCacheKVCacheContext.close: [("self", POSITIONAL, MISSING)],
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_arguments_are_those_of_the_contract(function: Callable[..., object]) -> None:
    found = [(name, each.kind, each.default) for name, each in inspect.signature(function).parameters.items()]
    assert found == FUNCTIONS[function]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_every_argument_and_every_error_has_words(function: Callable[..., object]) -> None:
    text = inspect.getdoc(function)
    assert text and text.split("\n\n")[0].endswith(".")
    full = [lmc_sdk.connect, LMCacheKVCacheContext.lookup, LMCacheKVCacheContext.retrieve, LMCacheKVCacheContext.store]
    if function in full:
        for section in ("Args:", "Returns:", "Raises:"):
            assert section in text
        for name, _, _ in FUNCTIONS[function]:
            assert name == "self" or f"{name}:" in text


def test_module_functions() -> None:
    assert lmc_sdk.__all__ == ["close", "connect", "lookup", "retrieve", "store", "view"]


def test_names_of_the_package_are_sorted_and_there() -> None:
    assert lmcache_sdk.__all__ == sorted(lmcache_sdk.__all__)
    assert all(hasattr(lmcache_sdk, name) for name in lmcache_sdk.__all__)


def test_every_public_class_has_words() -> None:
    for name in lmcache_sdk.__all__:
        value = getattr(lmcache_sdk, name)
        if inspect.isclass(value):
            assert inspect.getdoc(value), name


def test_what_the_module_says_as_an_example_is_python() -> None:
    """The example in the module's docstring is the first thing that users copy."""
    text = inspect.getdoc(lmc_sdk) or ""
    example = text.split("```python")[1].split("```")[0]
    tree = ast.parse(example)
    calls = {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert calls == {"connect", "retrieve", "store", "close"}


def test_a_layout_is_made_by_keyword_and_cannot_change() -> None:
    parameters = inspect.signature(KVLayout).parameters
    assert {each.kind for each in parameters.values()} == {KEYWORD}
    assert set(parameters) == {
        *("num_layers", "dtype", "num_kv_heads", "head_dim", "is_mla", "is_fused"),
        *("hidden_dim", "planes", "tokens_per_block", "slots_per_block"),
    }
    assert [name for name, each in parameters.items() if each.default is MISSING] == ["num_layers", "dtype"]


def test_importing_the_package_starts_nothing() -> None:
    """No thread, no socket, no context shared by the process."""
    for path in Path(lmcache_sdk.__file__).parent.rglob("*.py"):
        if "devserver" in path.parts:
            continue
        for node in ast.parse(path.read_text()).body:
            called = _called(node)
            assert not called & {"Thread", "Context", "Session", "socket", "register_at_fork", "pipe"}, path


def _called(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return set()
    calls = [inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}


def test_python_version_and_typing_marker() -> None:
    assert (Path(lmcache_sdk.__file__).parent / "py.typed").exists()
    module: Any = importlib.import_module("lmcache_sdk")
    assert module.__doc__
