"""The harness itself: what the other tests here rest on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from .cases import fresh_tokens
from .make_env import PROJECT_ROOT, RELEASES
from .patterns import logical_values, raw_bytes, same_bytes
from .processes import Child, StartError, free_port
from .servers import Engine, EngineShape, RealServer, child_env, remove_orphaned_segments

SLEEPER = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def wait_until_dead(pid: int) -> bool:
    """Wait, bounded, until a process is gone."""
    end = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.mark.parametrize("axis", range(5))
def test_pattern_depends_on_every_index(axis: int) -> None:
    values = logical_values((2, 4, 64, 4, 4), torch.bfloat16, seed=1)
    assert not same_bytes(values, values.roll(1, axis))
    assert not same_bytes(values, logical_values((2, 4, 64, 4, 4), torch.bfloat16, seed=2))
    # heads and dims swapped, the classic mistake
    assert not same_bytes(values, values.transpose(3, 4).contiguous())
    assert raw_bytes(values)[:2] != raw_bytes(values)[2:4]


def test_same_bytes_sees_what_equality_does_not() -> None:
    zeros = torch.zeros(4, dtype=torch.bfloat16)
    nans = torch.full((4,), float("nan"), dtype=torch.bfloat16)
    assert torch.equal(zeros, -zeros) and not same_bytes(zeros, -zeros)
    assert not torch.equal(nans, nans) and same_bytes(nans, nans.clone())
    assert not same_bytes(zeros, zeros.view(2, 2))
    assert not same_bytes(zeros, zeros.to(torch.float16))


def test_tokens_share_no_prefix() -> None:
    lists = [fresh_tokens(600) for _ in range(50)]
    assert len({tokens[0] for tokens in lists}) == 50
    assert all(len(tokens) == 600 and min(tokens) > 0 and max(tokens) < 1 << 32 for tokens in lists)


def test_child_is_stopped(tmp_path: Path) -> None:
    child = Child("sleeper", SLEEPER, os.environ, tmp_path / "log")
    child.wait_for(lambda: "up" in child.log.read_text(), timeout=20)
    assert is_alive(child.pid)
    child.stop()
    child.stop()
    assert not is_alive(child.pid)


def test_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.integration.processes._TERMINATE_WAIT", 0.2)
    deaf = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    child = Child("deaf", (sys.executable, "-c", deaf), os.environ, tmp_path / "log")
    child.wait_for(lambda: "up" in child.log.read_text(), timeout=20)
    child.stop()
    assert not is_alive(child.pid)


def test_child_that_fails_shows_its_log(tmp_path: Path) -> None:
    child = Child("failing", (sys.executable, "-c", "raise SystemExit('the reason')"), os.environ, tmp_path / "log")
    with pytest.raises(StartError, match="the reason"):
        child.wait_for(lambda: False, timeout=20)
    child.stop()


def test_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """What remains of a test run that was killed outright: nothing."""
    program = f"""
import os, sys, time
from pathlib import Path
from tests.integration.processes import Child
child = Child("sleeper", {SLEEPER!r}, os.environ, Path({str(tmp_path / "log")!r}))
child.wait_for(lambda: "up" in child.log.read_text(), timeout=20)
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=PROJECT_ROOT) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        assert is_alive(grandchild)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    assert wait_until_dead(grandchild)


def test_orphaned_segments_are_removed() -> None:
    gone = Child("short", (sys.executable, "-c", ""), os.environ, Path(os.devnull))
    gone.wait(20)
    gone.stop()
    orphan = Path("/dev/shm", f"lmcache_l1_pool_sdktest-{gone.pid}-0")
    ours = Path("/dev/shm", f"lmcache_l1_pool_sdktest-{os.getpid()}-0")
    for segment in (orphan, ours):
        segment.touch()
    try:
        assert orphan.name in remove_orphaned_segments()
        assert not orphan.exists() and ours.exists()
    finally:
        ours.unlink()


def test_server_and_engine_leave_nothing(interop_env: None, tmp_path: Path) -> None:
    """Also `once`: an engine that has gone and left its registration, as a crashed one does."""
    release = RELEASES[-2]
    with RealServer(release, transport="shm", log_dir=tmp_path) as server:
        pids = [server.pid]
        assert Path("/dev/shm", server.segment).exists()
        with Engine(server, {"staying": EngineShape()}) as staying:
            pids.append(staying.pid)
            assert is_alive(staying.pid)
            assert list(Path("/dev/shm").glob(f"lmcache_kv_{staying.pid}_*")) == []
            with Engine(server, {"gone": EngineShape(num_layers=2)}, once=True) as gone:
                pids.append(gone.pid)
                assert not is_alive(gone.pid)
            assert registered_models(server) == ["gone", "staying"]
        assert registered_models(server) == ["gone", "staying"]
    assert [pid for pid in pids if is_alive(pid)] == []
    left = {segment.name for segment in Path("/dev/shm").iterdir()}
    assert server.segment not in left
    assert [name for name in left if any(f"_{pid}_" in name for pid in pids)] == []


def test_server_that_cannot_start_is_told(interop_env: None, tmp_path: Path) -> None:
    server = RealServer(RELEASES[-2], transport="inline", extra_args=["--no-such-option"], log_dir=tmp_path)
    with pytest.raises(StartError, match="no-such-option"), server:
        pytest.fail("it started")
    assert not is_alive(server.pid)


def test_environment_of_children_is_the_release(interop_env: None) -> None:
    env = child_env("0.5.3")
    assert env["PYTHONPATH"].endswith("releases/0.5.3")
    assert env["LMCACHE_TRACK_USAGE"] == "false"
    assert free_port() < 32768


def registered_models(server: RealServer) -> list[str]:
    """The models of the lmcache-driven registrations."""
    meta = server.status()["cache_context_meta"]
    assert isinstance(meta, dict)
    return sorted(entry["model_name"] for entry in meta.values())
