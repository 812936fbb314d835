"""JSON values -> attrs documents, by cattrs: nothing is converted, and an error has the path of the field.

The only importer of cattrs, which it imports with the first document: that is a tenth of what importing this library
costs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Protocol, TypeVar

import attrs

from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.protocol.showing import show

T = TypeVar("T")


def structured(value: object, document: type[T], path: str) -> T:
    """A document; RemoteProtocolError with the path of the first field that is wrong."""
    from cattrs.errors import BaseValidationError  # noqa: PLC0415  # see the module

    try:
        return _structure_function()(value, document)
    except (BaseValidationError, KeyError, TypeError, ValueError, AttributeError) as error:
        where, problem = _first_problem(error, path)
        raise RemoteProtocolError(f"{where}: {problem}", path=where) from error


def _first_problem(error: BaseException, path: str) -> tuple[str, str]:
    """The path and words of the first leaf of cattrs' tree of errors."""
    from cattrs.errors import ClassValidationError, IterableValidationError  # noqa: PLC0415

    if isinstance(error, ClassValidationError):
        noted, bare = error.group_exceptions()
        if noted:
            return _first_problem(noted[0][0], f"{path}.{noted[0][1].name}")
        return _first_problem(bare[0], path)
    if isinstance(error, IterableValidationError):
        items, loose = error.group_exceptions()
        if items:
            index = items[0][1].index
            step = f"[{index}]" if isinstance(index, int) else f".{index}"
            return _first_problem(items[0][0], f"{path}{step}")
        return _first_problem(loose[0], path)
    if isinstance(error, KeyError):
        return (path if path.endswith(f".{error.args[0]}") else f"{path}.{error.args[0]}"), "missing"
    return path, str(error)


def _exactly(kind: type, *also: type) -> Callable[[object, object], object]:
    """A structure hook that takes instances of `kind` as they are and refuses the rest, bool for int included."""

    def check(value: object, _: object) -> object:
        if isinstance(value, (kind, *also)) and (kind is bool or not isinstance(value, bool)):
            return value
        raise TypeError(f"expected {kind.__name__}, got {show(value)}")

    return check


class _Structure(Protocol):
    """What a converter does."""

    def __call__(self, value: object, document: type[T], /) -> T:
        """A document; raises what cattrs raises, or TypeError."""


@cache
def _structure_function() -> _Structure:
    import cattrs  # noqa: PLC0415
    from cattrs.gen import make_dict_structure_fn  # noqa: PLC0415

    converter = cattrs.Converter()
    for kind, also in ((str, ()), (int, ()), (bool, ()), (float, (int,))):
        converter.register_structure_hook(kind, _exactly(kind, *also))
    raw = (
        (str | int | None, (str, int, type(None))),
        (dict[str, object], (dict,)),
        (list[object] | None, (list, type(None))),
        (list[object], (list,)),
        (object, (object,)),
    )
    for shape, kinds in (*raw, (dict[str, object] | None, (dict, type(None)))):
        converter.register_structure_hook_func(partial(operator.eq, shape), _exactly(*kinds))
    converter.register_structure_hook_factory(
        attrs.has, lambda document: _from_object_only(make_dict_structure_fn(document, converter))
    )
    return converter.structure


def _from_object_only(structure: Callable[[dict[str, object], object], T]) -> Callable[[object, object], T]:
    """A document is made of a JSON object: where every field is optional, cattrs alone would take a list for an empty
    one.
    """

    def check(value: object, kind: object) -> T:
        if not isinstance(value, dict):
            raise TypeError(f"expected a JSON object, got {show(value)}")
        return structure(value, kind)

    return check
