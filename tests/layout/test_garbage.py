"""Whatever arrives as a payload is tensors or one error: no other exception, no name looked up, no memory on credit."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_sdk.errors import RemoteProtocolError
from lmcache_sdk.layout import KVLayout, payload_of_tensors, read_payload, read_stored_payload
from lmcache_sdk.protocol import PayloadForm
from tests.layout.frames import frame_of
from tests.layout.golden import payload_of, raw_bytes, tensor_payloads
from tests.layout.strategies import bits

GOLDEN = dict(tensor_payloads())
ONE = payload_of(GOLDEN["0.5.6-one_bfloat16_2_1_4_2"])
TWO = payload_of(GOLDEN["0.5.6-two_bf16_2_1_4_2"])
FP8 = payload_of(GOLDEN["0.5.6-one_float8_e4m3fn_2_1_4_2"])
LAYOUT = KVLayout(num_layers=1, dtype=torch.bfloat16, num_kv_heads=1, head_dim=2)
BY_HAND = bytes(frame_of(bits((2, 1, 8, 2), torch.bfloat16, 1), LAYOUT, 4, 0, 2, PayloadForm.PICKLE))[3:]
SEEDS = [
    *(payload_of(vector) for vector in GOLDEN.values()),
    BY_HAND,
    bytes(payload_of_tensors([], PayloadForm.PICKLE)),
]

HEAD = b"\x80\x04"
ENCODE = b"c_codecs\nencode\n"
LATIN = b"\x8c\x06latin1"
TENSOR = ONE[ONE.index(b"\x8c\x0ctorch._utils") : -2]  # what leaves one tensor on the stack; memo numbers from 0


def refused(payload: bytes, words: str = "") -> None:
    for num_tensors in (0, 1, 2):
        with pytest.raises(RemoteProtocolError, match=words or None if num_tensors == 2 else None):
            read_payload(memoryview(payload), PayloadForm.PICKLE, num_tensors=num_tensors, max_nbytes=2**20)
    with pytest.raises(RemoteProtocolError, match=words or None):
        read_stored_payload(memoryview(payload), PayloadForm.PICKLE, max_tensors=2, max_nbytes=2**20)


@contextmanager
def peak_below(nbytes: int) -> Iterator[None]:
    """Fails when more memory than that was allocated at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes


def replaced(payload: bytes, old: bytes, new: bytes) -> bytes:
    assert payload.count(old) >= 1
    return payload.replace(old, new, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        HEAD + b"cos\nsystem\n\x8c\x04true\x85R.",
        HEAD + b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        HEAD + b"cbuiltins\neval\n\x8c\x011\x85R.",
        HEAD + b"c__builtin__\nbytes\n)R.",
        HEAD + b"ctorch\nload\n\x8c\x01x\x85R.",
        HEAD + b"ctorch.storage\n_load_from_bytes.__globals__\n)R.",
        HEAD + b"ctorch\nTensor.__class__\n)R.",
        HEAD + b"]c" + b"x" * 500 + b".",
        HEAD + b"]\x8c\xff" + b"x" * 255 + b"\x8c\x01y\x93a.",
        HEAD + b"]\x8c\x05torch\x8c\x08bfloat16\x93a.",
        HEAD + b"]ctorch\nfloat\na.",
    ],
)
def test_names_outside_the_list_are_refused(payload: bytes) -> None:
    refused(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b".",
        HEAD,
        HEAD + b".",
        b"]\x94.",
        b"\x80\x01].",
        b"\x80\x06].",
        HEAD + b"N.",
        HEAD + b"}.",
        HEAD + b"K\x01.",
        HEAD + b"]].",
        HEAD + b"(].",
        HEAD + b"](.",
        HEAD + b"]Na.",
        HEAD + b"](K\x01K\x02e.",
        HEAD + b"].x",
        HEAD + b"]." + HEAD + b"].",
        HEAD + b"0].",
        HEAD + b"(0].",
        HEAD + b"a.",
        HEAD + b"Na.",
        HEAD + b"NNa.",
        HEAD + b"e.",
        HEAD + b"(e.",
        HEAD + b"N(Ne.",
        HEAD + b"](]a.",
        HEAD + b"u.",
        HEAD + b"}(Nu.",
        HEAD + b"}(K\x01Nu.",
        HEAD + b"}(](Ntu.",
        HEAD + b"t.",
        HEAD + b"\x85.",
        HEAD + b"N\x87.",
        HEAD + b"(N\x86.",
        HEAD + b"R.",
        HEAD + b")R.",
        HEAD + b"N)R.",
        HEAD + b"ccollections\nOrderedDict\nR.",
        HEAD + b"ccollections\nOrderedDict\nNR.",
        HEAD + b"]ccollections\nOrderedDict\n)Ra.",
        HEAD + b"]ctorch.storage\n_load_from_bytes\n)Ra.",
        HEAD + b"]ctorch.storage\n_load_from_bytes\n\x8c\x01x\x85Ra.",
        HEAD + b"]ctorch.storage\n_load_from_bytes\nC\x00\x85Ra.",
        HEAD + b"]ccollections\nOrderedDict\n(N\x85tRa.",
        HEAD + b"h\x00.",
        HEAD + b"j\xff\xff\xff\xff.",
        HEAD + b"]q\x01.",
        HEAD + b"]r\xff\xff\xff\xff.",
        HEAD + b"q\x00.",
        HEAD + b"(\x94.",
        HEAD + b"Q.",
        HEAD + b"]NQa.",
        HEAD + b"]\x8c\x01\xffa.",
        HEAD + b"]X\x03\x00\x00\x00\xc3\x28\x41a.",
        HEAD + b"\x93.",
        HEAD + b"NN\x93.",
        HEAD + b"]\x8b\x01\x00\x00\x00\x01a.",
        HEAD + b"]\x81.",
        HEAD + b"]}b.",
        HEAD + b"]" + ENCODE + b"\x8c\x02\xc4\x80" + LATIN + b"\x86Ra.",
        HEAD + b"]" + ENCODE + b"\x8c\x01x\x8c\x05utf-8\x86Ra.",
        HEAD + b"]" + ENCODE + b"\x8c\x01x\x85Ra.",
    ],
)
def test_programs_that_make_no_list_of_tensors_are_refused(payload: bytes) -> None:
    refused(payload)


@pytest.mark.parametrize("code", [b"\x96", b"\x8d", b"\x8e", b"\x95"])
@pytest.mark.parametrize("length", [2**20, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_length_is_not_believed(code: bytes, length: int) -> None:
    payload = HEAD + b"]" + code + length.to_bytes(8, "little") + b"xa."
    with peak_below(2**20):
        refused(payload)


@pytest.mark.parametrize("code", [b"X", b"B"])
def test_a_short_length_is_not_believed_either(code: bytes) -> None:
    refused(HEAD + b"]" + code + b"\xff\xff\xff\xffxa.", "too early")


def test_long_integers_are_refused() -> None:
    refused(HEAD + b"]\x8a\xff" + b"\x01" * 255 + b"a.", "an integer of 255 bytes")


@pytest.mark.parametrize("filler", [b"N0", b"]0", b"K\x000", b"(t0", b")\x940", b"h\x000"])
def test_cheap_opcodes_run_out_of_budget(filler: bytes) -> None:
    """Ten million of them would keep an unbounded machine busy for minutes."""
    refused(HEAD + b"]\x94" + filler * 5_000_000 + b".", "more opcodes")


def test_nesting_is_neither_recursion_nor_a_bomb() -> None:
    refused(HEAD + b")" + b"\x85" * 1400 + b".", "not a list")
    steps = [b"\x940h" + bytes([step]) + b"h" + bytes([step]) + b"\x86" for step in range(200)]
    doubling = b")" + b"".join(steps)
    refused(HEAD + doubling + b".")
    refused(HEAD + b"]\x94h\x00a.", "other things than tensors")


def test_the_same_bytes_cannot_be_copied_over_and_over() -> None:
    text = b"X" + (10**6).to_bytes(4, "little") + b"x" * 10**6
    again = ENCODE + b"h\x00" + LATIN + b"\x86R0"
    payload = HEAD + text + b"\x940" + again * 100 + b"]."
    with peak_below(10 * 10**6):
        refused(payload, "used more than once")


def test_one_tensor_listed_twice_counts_twice() -> None:
    payload = memoryview(HEAD + b"](" + TENSOR + b"\x940h\x11h\x11e.")
    first, second = read_payload(payload, PayloadForm.PICKLE, num_tensors=2, max_nbytes=64)
    assert raw_bytes(first) == raw_bytes(second) == raw_bytes(torch.tensor([0, 1] * 8, dtype=torch.bfloat16))
    with pytest.raises(RemoteProtocolError, match="more than 63 bytes"):
        read_payload(payload, PayloadForm.PICKLE, num_tensors=2, max_nbytes=63)


def test_a_tensor_where_a_number_belongs_is_refused() -> None:
    """Comparing a tensor with anything gives a tensor, whose truth is an error of torch."""
    storage = TENSOR[TENSOR.index(b"\x8c\x0dtorch.storage") : TENSOR.index(b"K\x00(")]
    call = b"ctorch._utils\n_rebuild_tensor_v2\n("
    for at in range(6):
        arguments = [storage, b"K\x00", b"K\x10\x85", b"K\x01\x85", b"\x89", b"ccollections\nOrderedDict\n)R"]
        good = HEAD + b"]" + call + b"".join(arguments) + b"tRa."
        memo_free = good.replace(b"\x94", b"")
        assert len(read_payload(memoryview(memo_free), PayloadForm.PICKLE, num_tensors=1, max_nbytes=32)) == 1
        arguments[at] = memo_free[len(HEAD) + 1 : -2]
        refused((HEAD + b"]" + call + b"".join(arguments) + b"tRa.").replace(b"\x94", b""))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"K\x00(K\x02", b"K\x01(K\x02", "whole storage"),
        (b"K\x08K\x08K\x02K\x01t", b"K\x08K\x08K\x01K\x04t", "not contiguous"),
        (b"K\x08K\x08K\x02K\x01t", b"K\x08K\x08K\x02t", "not contiguous"),
        (b"K\x08K\x08K\x02K\x01t", b"K\x08K\x08K\x00K\x00t", "not contiguous"),
        (b"(K\x02K\x01K\x04K\x02t", b"(K\x03K\x01K\x04K\x02t", "storage of 32"),
        (b"(K\x02K\x01K\x04K\x02t", b"(K\x02K\x01K\x04K\x01t", "storage of 32"),
        (b"(K\x02K\x01K\x04K\x02t", b"(K\x02K\x01K\x04K\x00t", "positive integers"),
        (b"(K\x02K\x01K\x04K\x02t", b"(K\x02K\x01K\x04Nt", "positive integers"),
        (b"(K\x02K\x01K\x04K\x02t", b"(" + b"J\xff\xff\xff\x7f" * 16 + b"t", "larger than any memory"),
        (b"(K\x02K\x01K\x04K\x02t", b"(t", "axes"),
        (b"(K\x02K\x01K\x04K\x02t", b"(" + b"K\x01" * 17 + b"t", "axes"),
        (b"(K\x02K\x01K\x04K\x02t", b"]", "shape"),
        (b"\x89\x8c\x0bcollections", b"N\x8c\x0bcollections", "whole storage"),
        (b"l\xfc\x9cF", b"l\xfc\x9cG", "another kind"),
        (b"M\xe9\x03.\x80", b"M\xe8\x03.\x80", "another kind"),
        (b"little_endianq\x02\x88", b"little_endianq\x02\x89", "not a storage"),
        (b"storageq\x00ctorch", b"storagesq\x00ctorch", ""),
        (b"storageq\x00ctorch\nBFloat16Storage", b"modulesq\x00ctorch\nBFloat16Storage", ""),
        (b"\x03\x00\x00\x00cpu", b"\x04\x00\x00\x00cuda", "not on the CPU"),
        (b"q\x03K\x10N", b"q\x03K\x11N", "17 elements"),
        (b"q\x03K\x10N", b"q\x03K\x10K\x00", "not on the CPU"),
        (b"a.\x10\x00\x00\x00\x00\x00\x00\x00", b"a.\x11\x00\x00\x00\x00\x00\x00\x00", "16 elements"),
        (b"a.\x10\x00\x00\x00\x00\x00\x00\x00", b"a.\x10\x00\x00\x00\x00\x00\x00\x80", "16 elements"),
        (b"torch\nBFloat16Storage", b"torch\nFloatStorage", ""),
        (b"torch\nBFloat16Storage", b"os\nsystem", "not allowed"),
        (b"torch\nBFloat16Storage", b"torch.storage\nUntypedStorage", ""),
        (b"Ntq\x04Q.", b"Ntq\x04.", "not a storage"),
        (b"a.\x10", b"e.\x10", "no mark"),
        (b"}q\x00(X\x10", b"ctorch\nHalfStorage\n)RX\x10", "a call of HalfStorage inside"),
    ],
)
def test_a_recorded_payload_with_one_wrong_fact_is_refused(old: bytes, new: bytes, words: str) -> None:
    inner = ONE[ONE.index(b"\x80\x02\x8a") : ONE.index(b"\x94\x85\x94R\x94K\x00")]
    changed = replaced(inner, old, new) if old in inner else inner
    rest = ONE if old in inner else replaced(ONE, old, new)
    length = ONE.index(inner) - 4
    assert int.from_bytes(ONE[length : length + 4], "little") == len(inner)
    start = rest.index(inner)
    payload = rest[: start - 4] + len(changed).to_bytes(4, "little") + changed + rest[start + len(inner) :]
    refused(payload.replace(ONE[2:11], b""), words)  # without the frame, whose length would be wrong


def test_strides_of_axes_of_length_one_do_not_matter() -> None:
    """For torch such a tensor is contiguous, and it writes the strides it happens to have."""
    payload = replaced(ONE, b"(K\x08K\x08K\x02K\x01t", b"(K\x08K\x63K\x02K\x01t")
    [tensor] = read_payload(memoryview(payload), PayloadForm.PICKLE, num_tensors=1, max_nbytes=32)
    assert tensor.stride() == (8, 8, 2, 1)


def test_a_typed_tensor_needs_an_untyped_storage_and_a_known_dtype() -> None:
    frameless = FP8.replace(FP8[2:11], b"")
    assert len(read_payload(memoryview(frameless), PayloadForm.PICKLE, num_tensors=1, max_nbytes=16)) == 1
    refused(replaced(frameless, b"\x8c\x0dfloat8_e4m3fn", b"\x8c\x09complex64"), "not allowed")
    refused(replaced(frameless, b"\x8c\x12_rebuild_tensor_v3", b"\x8c\x12_rebuild_tensor_v2"), "whole storage")
    refused(replaced(frameless, b"\x8c\x0dfloat8_e4m3fn", b"\x8c\x08bfloat16"), "storage of 16")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\x8c\x02u1", b"\x8c\x02i1"),
        (b"\x8c\x02u1", b"N"),
        (b"h\x02h\x03", b"h\x03h\x03"),
        (b"\x86Rh\x05\x86R", b"\x86R0h\x05h\x05\x86R"),
        (b"\x86Rh\x05\x86R", b"\x86R"),
        (b"Rh\x04\x86R", b"Rh\x05\x86R"),
        (b"M\x02\x00M\x01\x00M\x04\x00M\x02\x00", b"M\x02\x00M\x01\x00M\x04\x00M\x03\x00"),
    ],
)
def test_the_clients_form_with_one_wrong_fact_is_refused(old: bytes, new: bytes) -> None:
    assert len(read_stored_payload(memoryview(BY_HAND), PayloadForm.PICKLE, max_nbytes=64)) == 2
    with pytest.raises(RemoteProtocolError):
        read_stored_payload(memoryview(replaced(BY_HAND, old, new)), PayloadForm.PICKLE, max_nbytes=64)


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        (b"\xa8bfloat16", b"\xa7float32", "payload.tensors[0].data"),
        (b"\xa8bfloat16", b"\xa6Tensor", "payload.tensors[0].dtype"),
        (b"\x94\x02\x01\x04\x02", b"\x94\x02\x01\x04\x03", "payload.tensors[0].data"),
        (b"\x94\x02\x01\x04\x02", b"\x94\x02\x01\x04\x00", "payload"),
        (b"\xa8bfloat16", b"\xa5int64", "payload.tensors[0].data"),
    ],
)
def test_an_envelope_with_one_wrong_fact_is_refused(old: bytes, new: bytes, path: str) -> None:
    payload = replaced(payload_of(GOLDEN["0.5.7rc2-one_bfloat16_2_1_4_2"]), old, new)
    with pytest.raises(RemoteProtocolError) as caught:
        read_payload(memoryview(payload), PayloadForm.ENVELOPE, num_tensors=1, max_nbytes=2**20)
    assert caught.value.path == path


def tensors_or_refused(payload: bytes) -> None:
    problems: list[RemoteProtocolError] = []
    for form in PayloadForm:
        for stored in (False, True):
            try:
                if stored:
                    found = read_stored_payload(memoryview(payload), form, max_tensors=4, max_nbytes=2**20)
                else:
                    found = read_payload(memoryview(payload), form, num_tensors=1, max_nbytes=2**20)
            except RemoteProtocolError as error:
                problems.append(error)
            else:
                assert all(type(tensor) is torch.Tensor for tensor in found)
                assert sum(tensor.nbytes for tensor in found) <= 2**20
    assert all(error.path.startswith("payload") and len(str(error)) < 1000 for error in problems)


@given(st.binary(max_size=200))
def test_random_bytes(payload: bytes) -> None:
    tensors_or_refused(payload)
    tensors_or_refused(HEAD + payload)


@given(st.sampled_from(SEEDS), st.data())
def test_mutated_payloads(seed: bytes, data: st.DataObject) -> None:
    payload = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(payload)))
        end = data.draw(st.integers(start, min(len(payload), start + 8)))
        payload[start:end] = data.draw(st.binary(max_size=8) | st.sampled_from(PIECES))
    tensors_or_refused(bytes(payload))


PIECES = [
    *(
        b"(",
        b"0",
        b"N",
        b"\x88",
        b"\x89",
        b"]",
        b"}",
        b")",
        b"t",
        b"\x85",
        b"\x86",
        b"\x87",
        b"a",
        b"e",
        b"u",
        b"R",
        b"Q",
    ),
    *(
        b"\x94",
        b"h\x00",
        b"h\x01",
        b"h\x02",
        b"q\x00",
        b"q\x01",
        b"j\x00\x00\x00\x00",
        b"K\x00",
        b"K\x02",
        b"M\x04\x00",
    ),
    *(b"J\xff\xff\xff\xff", b"\x8a\x01\x02", b"\x8c\x02u1", LATIN, b"C\x04abcd", b"\x93", b"."),
    *(b"ctorch\nbfloat16\n", b"ctorch\nfrom_numpy\n", b"cnumpy\nfrombuffer\n", b"ctorch\nTensor.view\n"),
    *(b"ctorch\nTensor.reshape\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch._utils\n_rebuild_tensor_v3\n"),
    *(b"ctorch.storage\n_load_from_bytes\n", b"ccollections\nOrderedDict\n", ENCODE, TENSOR),
    TENSOR[TENSOR.index(b"\x8c\x0dtorch.storage") : TENSOR.index(b"K\x00(")],
]


@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_random_programs(pieces: list[bytes]) -> None:
    tensors_or_refused(HEAD + b"".join(pieces) + b".")
    tensors_or_refused(HEAD + b"](" + b"".join(pieces) + b"e.")
