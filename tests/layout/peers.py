"""A process with nothing of ours that reads and writes payloads the way servers and other clients do.

It uses what the library itself must not: the unpickler of the standard library, on bytes that a test made a moment ago.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

from lmcache_sdk.layout import dtype_name
from tests.layout.golden import raw_bytes

_LOAD: Final = """
import base64, json, pickle, sys, warnings
import numpy, torch
warnings.simplefilter("error")
def raw(tensor):
    return base64.b64encode(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).decode()
def load(text):
    loaded = pickle.loads(base64.b64decode(text))
    return [type(loaded).__name__, [[str(t.dtype), list(t.shape), raw(t)] for t in loaded]]
print(json.dumps([load(text) for text in json.load(sys.stdin)]))
"""

_DUMP: Final = """
import base64, json, pickle, sys
import torch
def tensor(dtype, shape, raw):
    flat = torch.frombuffer(bytearray(base64.b64decode(raw)), dtype=torch.uint8).clone()
    return flat.view(getattr(torch, dtype)).view(shape)
def dump(case):
    found = {"list": list, "tuple": tuple}[case["container"]](tensor(*each) for each in case["tensors"])
    return base64.b64encode(pickle.dumps(found, protocol=case["protocol"])).decode()
print(json.dumps([dump(case) for case in json.load(sys.stdin)]))
"""


def loaded_elsewhere(payloads: Sequence[bytes | bytearray]) -> list[tuple[str, list[tuple[str, list[int], bytes]]]]:
    """What `pickle.loads` makes of each payload: the container's type, and dtype, shape and bytes of each tensor."""
    answers = _run(_LOAD, [base64.b64encode(payload).decode() for payload in payloads])
    return [
        (container, [(dtype, shape, base64.b64decode(raw)) for dtype, shape, raw in tensors])
        for container, tensors in answers
    ]


def dumped_elsewhere(cases: Sequence[tuple[int, str, Sequence[torch.Tensor]]]) -> list[bytes]:
    """What `pickle.dumps` makes of each (protocol, "list" or "tuple", tensors)."""
    asked = [
        {
            "protocol": protocol,
            "container": container,
            "tensors": [
                (dtype_name(each.dtype), list(each.shape), base64.b64encode(raw_bytes(each)).decode())
                for each in tensors
            ],
        }
        for protocol, container, tensors in cases
    ]
    return [base64.b64decode(text) for text in _run(_DUMP, asked)]


def _run(script: str, asked: list[Any]) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", script],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[Any] = json.loads(done.stdout)
    return answers
