"""The tree of errors: who is whose child, what each carries, and that all of it survives the way to another process.

What a pickle does is done here with `copy`, which takes the same road (`__reduce_ex__`): pickle itself is not imported.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Final

import pytest

from lmcache_sdk import errors
from lmcache_sdk.errors import Fate, KVCacheSDKError

BASES: Final[dict[str, tuple[str, ...]]] = {
    "KVCacheSDKError": ("RuntimeError",),
    "UsageError": ("KVCacheSDKError", "ValueError"),
    "ArgumentTypeError": ("UsageError", "TypeError"),
    "SessionClosedError": ("UsageError",),
    "ProtocolError": ("KVCacheSDKError",),
    "LocalProtocolError": ("ProtocolError",),
    "RemoteProtocolError": ("ProtocolError",),
    "UnsupportedError": ("ProtocolError",),
    "TransportError": ("KVCacheSDKError",),
    "ConnectError": ("TransportError",),
    "ConnectionLostError": ("TransportError",),
    "DeadlineExceededError": ("TransportError", "TimeoutError"),
    "ServerError": ("KVCacheSDKError",),
    "NotRegisteredError": ("ServerError",),
    "LeaseExpiredError": ("ServerError",),
    "StoreRejectedError": ("ServerError",),
    "PoolFullError": ("ServerError",),
    "AlreadyCachedError": ("ServerError",),
    "HTTPStatusError": ("ServerError",),
    "LayoutError": ("KVCacheSDKError",),
    "LayoutChangedError": ("LayoutError",),
    "UnknownLayoutError": ("LayoutError",),
    "ShapeMismatchError": ("LayoutError", "ValueError"),
}

FACTS: Final[dict[str, dict[str, Any]]] = {
    "RemoteProtocolError": {"path": "status.x[0]"},
    "UnsupportedError": {"request": "connect", "dialect": "0.5.6"},
    "DeadlineExceededError": {"step": "lookup: LOOKUP"},
    "ServerError": {"reply": "no"},
    "NotRegisteredError": {"registered_models": ("a", "b"), "reply": "no"},
    "AlreadyCachedError": {"chunk_indices": (0, 2), "reply": "no"},
    "HTTPStatusError": {"status": 503, "url": "http://h:1/status", "reply": "no"},
    "LayoutChangedError": {"before": "256", "after": "512"},
    "ShapeMismatchError": {"expected": "[2]", "found": "[3]"},
}

FATES: Final = {
    **dict.fromkeys(("UsageError", "ArgumentTypeError", "SessionClosedError"), Fate.NOT_SENT),
    **dict.fromkeys(("LocalProtocolError", "UnsupportedError", "ConnectError"), Fate.NOT_SENT),
    **dict.fromkeys(("LayoutError", "UnknownLayoutError", "ShapeMismatchError"), Fate.NOT_SENT),
    **dict.fromkeys(("RemoteProtocolError", "ServerError", "NotRegisteredError", "LeaseExpiredError"), Fate.ANSWERED),
    **dict.fromkeys(("StoreRejectedError", "PoolFullError", "AlreadyCachedError", "HTTPStatusError"), Fate.ANSWERED),
}
"""Where it is known from the class alone; UNKNOWN otherwise, which promises nothing."""


def _classes() -> dict[str, type[KVCacheSDKError]]:
    return {name: value for name, value in vars(errors).items() if _is_error(value)}


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _made(name: str, **also: Any) -> KVCacheSDKError:
    return _classes()[name]("what, and what to do", **FACTS.get(name, {}), **also)


def test_the_tree_is_the_one_that_is_drawn() -> None:
    assert {name: tuple(base.__name__ for base in kind.__bases__) for name, kind in _classes().items()} == BASES


def test_the_drawing_names_every_class_under_its_parent() -> None:
    drawing = errors.__doc__ or ""
    parents: list[str] = []
    drawn = {}
    for line in drawing.splitlines():
        match = re.match(r"^([│├└─ ]*)([A-Z]\w+Error)\b", line)
        if match and (match[1] or match[2] == "KVCacheSDKError"):
            depth = len(match[1]) // 4
            parents[depth:] = [match[2]]
            drawn[match[2]] = parents[depth - 1] if depth else "RuntimeError"
    assert drawn == {name: bases[0] for name, bases in BASES.items()}


@pytest.mark.parametrize("name", BASES)
def test_message_is_the_only_positional_argument_and_kept_in_args(name: str) -> None:
    kind: Any = _classes()[name]
    error = _made(name)
    assert error.args == ("what, and what to do",)
    assert str(error) == "what, and what to do"
    with pytest.raises(TypeError):
        kind("one", "two")
    assert str(kind()) == ""


@pytest.mark.parametrize("name", BASES)
def test_facts_are_attributes(name: str) -> None:
    error = _made(name)
    for attribute, expected in FACTS.get(name, {}).items():
        assert getattr(error, attribute) == expected


@pytest.mark.parametrize("name", BASES)
def test_fate_is_the_classes_until_somebody_knows_better(name: str) -> None:
    assert _made(name).fate is FATES.get(name, Fate.UNKNOWN)
    for fate in Fate:
        assert _made(name, fate=fate).fate is fate


@pytest.mark.parametrize("fate", [None, *Fate])
@pytest.mark.parametrize("name", BASES)
def test_it_travels_to_another_process_whole(name: str, fate: Fate | None) -> None:
    error = _made(name, fate=fate)
    error.note = "an attribute of the user"  # type: ignore[attr-defined]  # users do
    for arrived in (copy.copy(error), copy.deepcopy(error)):
        assert type(arrived) is type(error)
        assert arrived.args == error.args and str(arrived) == str(error)
        assert vars(arrived) == vars(error)
        assert arrived.fate is error.fate
    reduced = error.__reduce_ex__(4)
    assert not isinstance(reduced, str)
    assert reduced[0] is type(error) and reduced[1] == error.args


def test_sequences_are_taken_as_they_are_now() -> None:
    models = ["a"]
    error = errors.NotRegisteredError("m", registered_models=models)
    models.append("b")
    assert error.registered_models == ("a",)
    assert errors.AlreadyCachedError("m", chunk_indices=range(2)).chunk_indices == (0, 1)


def test_they_are_caught_by_what_people_write() -> None:
    for kind, builtin in (
        (errors.DeadlineExceededError, TimeoutError),
        (errors.ArgumentTypeError, TypeError),
        (errors.UsageError, ValueError),
        (errors.ShapeMismatchError, ValueError),
        (errors.KVCacheSDKError, RuntimeError),
    ):
        with pytest.raises(builtin):
            raise kind("x")


def test_a_timeout_is_not_mistaken_for_an_errno() -> None:
    error = errors.DeadlineExceededError("lookup: LOOKUP: no answer within 2 s", step="lookup: LOOKUP")
    assert error.errno is None and error.strerror is None
    assert repr(error) == "DeadlineExceededError('lookup: LOOKUP: no answer within 2 s')"
