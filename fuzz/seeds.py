"""Writes the hand-made part of the corpora: golden messages, golden payloads and golden status entries as inputs.

Run from the repository's root: `python -m fuzz.seeds`. These files are named `seed-` and what they hold; inputs that a
run has found are named by their hash.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from lmcache_sdk.layout import KVLayout, payload_frame_nbytes, write_payload_into
from lmcache_sdk.protocol import PayloadForm

from . import documents, frames, payloads

ROOT: Final = Path(__file__).parent
CORPUS: Final = ROOT / "corpus"
GOLDEN: Final = ROOT.parent / "tests" / "golden"
_RELEASES: Final = {each.release: index for index, each in enumerate(frames.DIALECTS)}
_LARGEST: Final = 700
_PICKLES: Final = {"empty_list", "one_bfloat16_2_1_4_2", "one_float8_e4m3fn_2_1_4_2", "two_bf16_2_1_4_2"}
"""Payloads of other dtypes differ in a name only; tests/layout reads them all."""


def payload_seeds() -> Iterator[tuple[str, bytes]]:
    """Golden payloads (pickles of 0.5.6: those of other releases differ in a storage key), our own, and short ones."""
    for release, envelope in (("0.5.6", 0), ("0.5.7rc2", payloads.ENVELOPE)):
        for vector in _wire(release)["tensor_payloads"]:
            if "error" not in vector and (envelope or vector["name"] in _PICKLES):
                count = len(vector["tensors"])
                how = envelope | count << payloads.COUNT_SHIFT
                yield f"{release}-{vector['name']}", bytes([how]) + base64.b64decode(vector["payload_b64"])
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        layout = KVLayout(num_layers=1, dtype=dtype, hidden_dim=2)
        kv = torch.zeros(2, 1, 4, 2, dtype=torch.uint8).to(dtype)
        for chunks in (1, 2):
            frame = bytearray(payload_frame_nbytes(layout, 2, chunks, PayloadForm.PICKLE))
            write_payload_into(memoryview(frame), kv, layout, 2, 0, chunks, PayloadForm.PICKLE)
            yield f"by-hand-{chunks}-{dtype}", bytes([payloads.STORED]) + bytes(frame[frame.index(0x80) :])
    for name, payload in _short_payloads():
        yield f"short-{name}", bytes([1 << payloads.COUNT_SHIFT]) + payload
    yield from _refused_payloads()
    latin = b"\x80\x02]c_codecs\nencode\nX\x02\x00\x00\x00ab\x8c\x06latin1\x86Ra."
    yield "latin1", bytes([payloads.STORED]) + latin
    frombuffer = b"\x80\x04]cnumpy\nfrombuffer\nC\x04abcd\x8c\x02u1\x86Ra."
    yield "frombuffer", bytes([payloads.STORED]) + frombuffer


def _short_payloads() -> Iterator[tuple[str, bytes]]:
    """One tensor in as few opcodes as there can be: most executions start from these, and they are the fastest."""
    yield "half", _list_of(_short_tensor(b"ctorch\nHalfStorage\n", b"", 1, b"ab"))
    yield "long", _list_of(_short_tensor(b"ctorch\nLongStorage\n", b"", 2, bytes(16)))
    yield "float8", _list_of(_short_tensor(b"ctorch.storage\nUntypedStorage\n", b"ctorch\nfloat8_e5m2\n", 3, b"abc"))


def _refused_payloads() -> Iterator[tuple[str, bytes]]:
    """Just over a limit each: the same tensor or text twice, too many opcodes, a call where there may be none."""
    tensor = _short_tensor(b"ctorch\nByteStorage\n", b"", 40, bytes(40))
    sixty_four = 2 << payloads.COUNT_SHIFT | 1 << payloads.ROOM_SHIFT
    yield "refused-tensor-twice", bytes([sixty_four]) + b"\x80\x04]" + tensor + b"q\x00ah\x00a."
    encode = b"c_codecs\nencode\n\x8c%s\x8c\x06latin1\x86"
    again = b"q\x00R" + b"c_codecs\nencode\nh\x00R" * 4
    yield "refused-text-twice", bytes([payloads.STORED]) + b"\x80\x04" + encode % (b"\x40" + b"a" * 64) + again + b"."
    yield "refused-text", bytes([payloads.STORED]) + b"\x80\x04" + encode % b"\x03\xe2\x82\xac" + b"R."
    yield "refused-opcodes", bytes([0]) + b"\x80\x04" + b"N0" * 600 + b"]."
    called = _short_tensor(b"ctorch\nHalfStorage\n)R", b"", 1, b"ab")
    yield "refused-call", bytes([1 << payloads.COUNT_SHIFT]) + _list_of(called)
    large = b"(" + b"\x8a\x06\x00\x00\x00\x00\x00\x01" * 2 + b"t"
    yield (
        "refused-large",
        bytes([1 << payloads.COUNT_SHIFT]) + _list_of(tensor.replace(b"K\x28\x85K\x01\x85", large * 2)),
    )


def _list_of(tensor: bytes) -> bytes:
    return b"\x80\x04]" + tensor + b"a."


def _short_tensor(kind: bytes, typed: bytes, count: int, raw: bytes) -> bytes:
    streams = (
        b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19",
        b"M\xe9\x03",
        b"}(X\x0d\x00\x00\x00little_endian\x88u",
        b"(\x8c\x07storage" + kind + b"\x8c\x010\x8c\x03cpuK" + bytes([count]) + b"NtQ",
        b"]\x8c\x010a",
    )
    storage = b"".join(b"\x80\x02" + stream + b"." for stream in streams) + count.to_bytes(8, "little") + raw
    loaded = b"ctorch.storage\n_load_from_bytes\nC" + bytes([len(storage)]) + storage + b"\x85R"
    rebuild = b"_rebuild_tensor_v3" if typed else b"_rebuild_tensor_v2"
    numbers = b"K\x00K" + bytes([count]) + b"\x85K\x01\x85\x89"
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n" + rebuild + b"\n(" + loaded + numbers + hooks + typed + b"tR"


def frame_seeds() -> Iterator[tuple[str, bytes]]:
    """Golden replies and requests, one of each name and dialect family, decoded, raw, and as answers in flight."""
    seen: set[tuple[str, str]] = set()
    for release in ("0.5.1", "0.5.3", "0.5.6", "0.5.7rc2"):
        names = [rule.name for rule in frames.RULES[release]]
        for vector in _wire(release)["vectors"]:
            raw = [bytes.fromhex(frame) for frame in vector["frames"]]
            fresh = (vector["kind"], vector["name"]) not in seen or release == "0.5.7rc2"
            if vector["op"] not in names or sum(map(len, raw)) > _LARGEST or not fresh:
                continue
            seen.add((vector["kind"], vector["name"]))
            kind = names.index(vector["op"])
            name = f"{release}-{vector['kind']}-{vector['name']}-{vector['uid']}"
            yield from _frame_inputs(name, _RELEASES[release], kind, vector["kind"], raw)

    key: dict[str, object] = {
        "model_name": "m",
        "world_size": 1,
        "worker_id": 0,
        "start": 0,
        "end": 0,
        "request_id": "r",
    }
    for release, tokens, name in (
        ("0.5.6", {"token_ids": [2**32]}, "large"),
        ("0.5.6", {"token_ids": [-1]}, "negative"),
        ("0.5.7rc2", {"token_bytes": b"abcde"}, "torn"),
    ):
        packed = [msgspec.msgpack.encode(key | tokens), b"\x01"]
        yield f"refused-tokens-{name}", bytes([_RELEASES[release], frames.REQUEST, 0, 0]) + frames.join(packed)


def _frame_inputs(name: str, release: int, kind: int, direction: str, raw: list[bytes]) -> Iterator[tuple[str, bytes]]:
    if direction == "request":
        yield name, bytes([release, frames.REQUEST, kind, 0]) + frames.join(raw[2:] or [b""])
    else:
        yield name, bytes([release, frames.REPLY, kind, 0]) + (raw[2] if len(raw) > 2 else b"")
        answer = [b"\x00", *raw[1:], b""][:4]
        how = 1 | (len(raw) - 1) << 2
        yield f"{name}-in-flight", bytes([release, frames.EXCHANGE, kind, how]) + frames.join(answer)
    if kind % 4 == 0:
        yield f"{name}-raw", bytes([release, frames.RAW, kind, len(raw) - 2]) + frames.join(raw)


def document_seeds() -> Iterator[tuple[str, bytes]]:
    """Golden entries, one of each engine format, alone and inside a status; small documents of every endpoint."""
    seen: set[str] = set()
    for path in sorted((GOLDEN / "layouts").glob("*.json")):
        for case in json.loads(path.read_text())["cases"]:
            entry = case["status_entry"]
            layout = entry["kv_cache_layout"]
            group = layout["kernel_groups"][0]
            kind = f"{group['engine_kv_format']}-{len(layout['kernel_groups'])}-{group['dtype']}"
            if kind in seen:
                continue
            seen.add(kind)
            yield f"entry-{kind}", bytes([documents.ENTRY]) + _json(_small(entry))
            if len(seen) % 4 == 1:
                status = {"chunk_size": 256, "cache_context_meta": {"7": _small(entry)}}
                yield f"status-{kind}", bytes([documents.STATUS]) + _json(status)
                yield f"layout-{kind}", bytes([documents.LAYOUT]) + _json(_small(layout))
    yield from _contradictions()
    driven = {"model_name": "m", "world_size": 1, "block_size": 16, "use_mla": False}
    l1 = {"total_object_count": 1, "write_ttl_seconds": 600, "read_ttl_seconds": 300.0}
    status = {
        "chunk_size": 256, "is_healthy": True, "active_sessions": 0, "storage_manager": {"l1_manager": l1},
        "non_cuda_context_meta": {"1": driven}, "registered_non_cuda_instance_ids": [1], "worker_liveness": {"1": {}},
    }  # fmt: skip
    yield "status-driven", bytes([documents.STATUS]) + _json(status)
    mp = {
        "chunk_size": 256, "supported_transfer_mode": "engine_driven", "transport": "zmq", "shm_name": None,
        "instance_id": "a", "port": 5555, "worker_registration_grace_seconds": 60.0,
    }  # fmt: skip
    yield "config", bytes([documents.CONFIG]) + _json({"mp": mp})
    for version in ("0.5.6", "v0.5.7rc2", "0.5.5.post1+cpu", "0.5.7.dev3"):
        yield f"version-{version}", bytes([documents.VERSION]) + _json(version)


def _contradictions() -> Iterator[tuple[str, bytes]]:
    """Entries that say two things, or more than fits; each is refused for its own reason, or read the rarer way."""
    plain, two_hs = "NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_BS_NH_TWO_HS"
    for name, changes in (
        ("mla", {"is_mla": True}),
        ("memory", {"engine_kv_concrete_shape": f"2 x [2, {2**31 - 1}, 16, {2**31 - 1}, 64]"}),
        ("width", {"engine_kv_concrete_shape": f"2 x [2, 1, 16, {2**20}, {2**20}]"}),
        ("text", {"engine_kv_concrete_shape": "x" * 201}),
        ("odd", {"engine_kv_format": "NL_X_NB_BS_NH_CS", "engine_kv_concrete_shape": "2 x [8, 16, 1, 3]"}),
        ("unknown", {"engine_kv_format": two_hs, "engine_kv_concrete_shape": "Unknown (a.b)"}),
        ("fused", {"engine_kv_format": two_hs, "engine_kv_concrete_shape": "2 x [8, 16, 1, 2, 64]"}),
        ("planes", {"engine_kv_format": two_hs, "engine_kv_concrete_shape": "2 x [8, 16, 1, 2, 128]"}),
    ):
        group: dict[str, object] = {
            "num_layers": 2, "tokens_per_block": 16, "slots_per_block": 16, "dtype": "torch.bfloat16",
            "engine_kv_concrete_shape": "2 x [2, 8, 16, 1, 64]", "engine_kv_format": plain, "is_mla": False, **changes,
        }  # fmt: skip
        for size in (256, 512, 1024) if name == "fused" else (512,):
            layout = {"cache_size_per_token": size, "kernel_groups": [group]}
            yield f"contradiction-{name}-{size}", bytes([documents.ENTRY]) + _json({"kv_cache_layout": layout})


def _small(value: Any) -> Any:
    """Without the fields that nobody reads."""
    if isinstance(value, Mapping):
        read = {
            *("model_name", "world_size", "kv_cache_layout", "cache_size_per_token", "kernel_groups", "num_layers"),
            *("tokens_per_block", "slots_per_block", "dtype", "engine_kv_concrete_shape", "engine_kv_format"),
            *("is_mla", "object_group_idx"),
        }
        return {key: _small(each) for key, each in value.items() if key in read}
    return [_small(each) for each in value] if isinstance(value, list) else value


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _wire(release: str) -> Any:
    return json.loads((GOLDEN / "wire" / f"lmcache-{release}.json").read_text())


SEEDS: Final = {"payloads": payload_seeds, "frames": frame_seeds, "documents": document_seeds}


def file_name(name: str) -> str:
    """The file of a seed."""
    return "seed-" + "".join(c if c.isalnum() or c in "._-" else "_" for c in name)


def write() -> None:
    """Writes the files; what is there under other names stays."""
    for target, make in SEEDS.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in make():
            (folder / file_name(name)).write_bytes(data)


if __name__ == "__main__":
    write()
