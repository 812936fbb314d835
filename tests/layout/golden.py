"""The recorded payloads and status entries, as test parameters; used by several files of this folder."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from lmcache_sdk.layout.dtypes import dtype_from_name
from lmcache_sdk.protocol import PayloadForm

GOLDEN: Final = Path(__file__).parent.parent / "golden"
FORMS: Final = {"pickle": PayloadForm.PICKLE, "typed_envelope_v1": PayloadForm.ENVELOPE}


def tensor_payloads() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every recorded payload with its id; entries that record an error have no payload to read."""
    for path in sorted((GOLDEN / "wire").glob("*.json")):
        document = json.loads(path.read_text())
        for vector in document["tensor_payloads"]:
            if "error" not in vector:
                yield f"{document['lmcache_version']}-{vector['name']}", vector


def status_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every case of the recorded /status entries with its id."""
    for path in sorted((GOLDEN / "layouts").glob("status-*.json")):
        for case in json.loads(path.read_text())["cases"]:
            yield f"{path.stem}-{case['name']}", case


def live_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every entry read from a running server with its id."""
    document = json.loads((GOLDEN / "layouts" / "live-0.5.6.json").read_text())
    for index, case in enumerate(document["cases"]):
        yield f"{index}-{case['engine_layout']}", case


def groups_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernel groups of a case's entry."""
    found: list[dict[str, Any]] = case["status_entry"]["kv_cache_layout"]["kernel_groups"]
    return found


def payload_of(vector: dict[str, Any]) -> bytes:
    """The recorded bytes."""
    return base64.b64decode(vector["payload_b64"])


def expected_tensors(vector: dict[str, Any]) -> list[tuple[torch.dtype, list[int], bytes]]:
    """Dtype, shape and bytes of each tensor."""
    return [
        (dtype_from_name(each["dtype"]), each["shape"], base64.b64decode(each["raw_le_b64"]))
        for each in vector["tensors"]
    ]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in C order, whatever its dtype: NaNs compare by their bits."""
    flat = tensor.detach().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
