"""Every file of the fuzzing corpora, replayed under the fuzzer's own guard; and that guard does notice things."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fuzz import documents, frames, guard, mutators, payloads, seeds
from fuzz.guard import Guard, Violation

CORPUS = Path(seeds.CORPUS)
TARGETS = {"payloads": payloads.check, "frames": frames.check, "documents": documents.check}
FILES = [path for target in TARGETS for path in sorted((CORPUS / target).iterdir())]


@pytest.fixture(scope="module")
def guards() -> dict[str, Guard]:
    made = {name: Guard(check) for name, check in TARGETS.items()}
    for name, each in made.items():
        each.warm_up([data for _, data in seeds.SEEDS[name]()])
    return made


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_corpus_file_has_no_finding(path: Path, guards: dict[str, Guard]) -> None:
    data = path.read_bytes()
    guards[path.parent.name].run(data)
    guards[path.parent.name].run_traced(data)


def test_corpora_are_there_and_small() -> None:
    assert {path.parent.name for path in FILES} == set(TARGETS)
    assert sum(path.stat().st_size for path in FILES) < 200 * 2**10


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_are_what_the_script_makes(target: str) -> None:
    written = {path.name: path.read_bytes() for path in (CORPUS / target).glob("seed-*")}
    assert written == {seeds.file_name(name): data for name, data in seeds.SEEDS[target]()}


@pytest.mark.parametrize("target", TARGETS)
def test_structured_mutations_of_every_seed_have_no_finding(target: str, guards: dict[str, Guard]) -> None:
    def reversed_bytes(data: bytes, most: int) -> bytes:
        return data[:most][::-1]

    for number, (_, data) in enumerate(seeds.SEEDS[target]()):
        for seed in (4 * number, 4 * number + 400):
            mutated = mutators.MUTATORS[target](data, 1024, seed, reversed_bytes)
            assert len(mutated) <= 1024
            guards[target].run(mutated)


def test_opcodes_of_a_payload_are_cut_without_loss() -> None:
    for _, data in seeds.payload_seeds():
        tokens = mutators.opcodes_of(data[1:])
        assert b"".join(tokens) == data[1:]
        assert all(tokens)


def test_frames_are_split_as_they_were_joined() -> None:
    given = [b"", b"abc", bytes(300), b"x"]
    assert frames.split(frames.join(given), 4) == given
    assert frames.split(b"\x05\x00abc", 2) == [b"abc", b""]


# ---- the guard itself: a guard that never barks guards nothing


def test_guard_notices_an_import() -> None:
    def imports(data: bytes) -> None:
        sys.modules.pop("this_is_no_module", None)
        with pytest.raises(ImportError):
            __import__("this_is_no_module")

    with pytest.raises(Violation, match="import"):
        Guard(imports).run(b"")


def test_guard_notices_an_opened_file_even_when_the_code_swallows_everything() -> None:
    def opens(data: bytes) -> None:
        with suppress(BaseException):
            Path(__file__).read_bytes()

    with pytest.raises(Violation, match="swallowed: open"):
        Guard(opens).run(b"")


def test_guard_notices_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_SECONDS", 0.02)

    def spins(data: bytes) -> None:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass

    with pytest.raises(Violation, match="CPU time"):
        Guard(spins).run(b"")


def test_guard_notices_memory_on_credit() -> None:
    def allocates(data: bytes) -> None:
        assert bytearray(2**20 * len(data))

    with pytest.raises(Violation, match="bytes of memory"):
        Guard(allocates).run_traced(b"x")


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError])
def test_guard_lets_no_other_error_pass(error: type[Exception]) -> None:
    def raises(data: bytes) -> None:
        raise error

    with pytest.raises(error):
        Guard(raises).run(b"")
