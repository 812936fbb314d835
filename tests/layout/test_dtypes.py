from __future__ import annotations

import pytest
import torch

from lmcache_sdk.errors import UnknownLayoutError
from lmcache_sdk.layout import dtype_from_name, dtype_name, itemsize
from lmcache_sdk.layout.dtypes import DTYPES

REQUIRED = [
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    *("uint8", "int8", "int16", "int32", "int64", "bool"),
]


@pytest.mark.parametrize("name", REQUIRED)
def test_every_dtype_that_servers_send_is_known(name: str) -> None:
    assert str(dtype_from_name(name)) == f"torch.{name}"


@pytest.mark.parametrize("name", DTYPES)
def test_names_go_both_ways(name: str) -> None:
    dtype = dtype_from_name(name)
    assert dtype_name(dtype) == name
    assert itemsize(dtype) == torch.empty(1, dtype=dtype).element_size()


@pytest.mark.parametrize("name", ["float", "half", "torch.bfloat16", "Tensor", "", "complex64", "quint8", "x" * 10_000])
def test_other_names_are_refused_in_few_words(name: str) -> None:
    with pytest.raises(UnknownLayoutError) as caught:
        dtype_from_name(name)
    assert len(str(caught.value)) < 500


def test_a_dtype_that_no_cache_holds_is_refused() -> None:
    with pytest.raises(UnknownLayoutError, match="complex64"):
        dtype_name(torch.complex64)
