"""The host memory: as much as was asked for, given back, or refused in one sentence."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import torch

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import MemoryLimit
from vllm_ctx_offload.worker import host_pool
from vllm_ctx_offload.worker.host_pool import HostPool
from vllm_ctx_offload.worker.numa import process_cores

MIB = 1024**2


def test_resident_memory_grows_by_what_was_asked_and_goes_back() -> None:
    # In a process of its own: other tests' garbage would count here.
    code = """
        import psutil, torch
        from vllm_ctx_offload.worker.host_pool import HostPool

        rss = lambda: psutil.Process().memory_info().rss
        HostPool(1, 4096).close()
        before = rss()
        # Just above a power of two, where an allocator that rounds up shows.
        pool = HostPool(264 * 16, 65_536)
        full = rss()
        asked = pool.rows.nbytes
        pool.close()
        print(asked, full - before, rss() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    asked, grown, left = map(int, done.stdout.split())
    assert asked == 264 * MIB
    assert 0.95 * asked <= grown <= 1.05 * asked
    assert left <= 0.05 * asked


def test_rows_are_zeroed_and_one_contiguous_range() -> None:
    pool = HostPool(5, 33)
    assert pool.rows.shape == (5, 33)
    assert pool.rows.is_contiguous()
    assert not pool.rows.any()
    assert not pool.pinned
    pool.close()


def test_too_little_memory_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = MemoryLimit(300 * MIB, "cgroup memory.max")
    monkeypatch.setattr(host_pool, "available_memory", lambda: limit)
    before = psutil.Process().memory_info().rss
    with pytest.raises(ConfigError) as caught:
        HostPool(1024, MIB)
    message = str(caught.value)
    for part in ("cpu_bytes_to_use", "1.00 GiB", "300.00 MiB", "cgroup memory.max"):
        assert part in message
    assert message.endswith(".")
    assert ". " not in message
    assert psutil.Process().memory_info().rss - before < 100 * MIB


def test_a_pool_as_large_as_the_memory_left_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = MemoryLimit(8192, "cgroup memory.max")
    monkeypatch.setattr(host_pool, "available_memory", lambda: limit)
    HostPool(2, 4096).close()
    with pytest.raises(ConfigError):
        HostPool(2, 4097)


def test_address_space_that_the_system_refuses_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_pool.mmap, "mmap", refuse)
    with pytest.raises(ConfigError) as caught:
        HostPool(4, MIB)
    message = str(caught.value)
    for part in ("cpu_bytes_to_use", "4.00 MiB", "Cannot allocate memory", "ulimit -v"):
        assert part in message
    assert message.endswith(".")
    assert ". " not in message


def test_memory_goes_back_although_a_view_is_kept() -> None:
    pool = HostPool(256, MIB)
    rows = pool.rows
    rows.fill_(1)
    full = psutil.Process().memory_info().rss
    pool.close()
    pool.close()
    assert full - psutil.Process().memory_info().rss > 240 * MIB
    assert not rows[0].any()


def test_it_is_touched_in_pieces_from_the_cores_that_are_near(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cores = {min(process_cores())} if process_cores() else set()
    seen: list[set[int]] = []
    monkeypatch.setattr(host_pool, "cores_near", lambda device: (7, cores))
    monkeypatch.setattr(host_pool, "_TOUCH_PIECE_BYTES", 8192)
    bind = os.sched_setaffinity

    def note(thread: int, wanted: set[int]) -> None:
        seen.append(wanted)
        bind(thread, wanted)

    monkeypatch.setattr(host_pool.os, "sched_setaffinity", note)
    with caplog.at_level("INFO"):
        pool = HostPool(25, 1000)
    assert seen == [cores]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "on NUMA node 7: touched in" in line
    assert line.endswith("s, not pinned.")
    assert os.sched_getaffinity(0) != set()
    pool.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_a_child_of_the_worker_gets_no_copy_of_the_pool() -> None:
    """Pinned memory is copied at once when a process forks."""
    pool = HostPool(4, MIB)
    address = pool.rows.data_ptr()
    text = Path("/proc/self/smaps").read_text(encoding="ascii")
    # A mapping is a line "from-to ..." and more of its own, the last with its flags.
    mappings = re.findall(
        r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$", text, re.MULTILINE | re.DOTALL
    )
    (flags,) = [
        flags.split()
        for first, end, flags in mappings
        if int(first, 16) <= address < int(end, 16)
    ]
    assert "dc" in flags  # do not copy
    pool.close()


class FakeCudart:
    """Registers ranges, and fails from the `fails_at`-th one on."""

    def __init__(self, fails_at: int = 1000) -> None:
        self.registered: dict[int, int] = {}
        self.fails_at = fails_at

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if len(self.registered) == self.fails_at:
            return 2  # cudaErrorMemoryAllocation
        assert flags == 1
        self.registered[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802 - CUDA's name
        del self.registered[start]
        return 0


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "_PIN_PIECE_BYTES", 4096)


def use(monkeypatch: pytest.MonkeyPatch, cudart: FakeCudart) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    # It would ask CUDA for the GPU's PCI slot.
    monkeypatch.setattr(host_pool, "cores_near", lambda device: (None, set()))


@pytest.mark.parametrize(
    ("num_rows", "bytes_per_row", "rows_per_pin"),
    [(10, 1024, 4), (10, 1000, 512), (3, 8192, 1), (5, 6144, 2)],
)
def test_the_pool_is_pinned_in_pieces_of_whole_rows_and_pages_that_cover_it_once(
    num_rows: int,
    bytes_per_row: int,
    rows_per_pin: int,
    monkeypatch: pytest.MonkeyPatch,
    small_pieces: None,
) -> None:
    cudart = FakeCudart()
    use(monkeypatch, cudart)
    pool = HostPool(num_rows, bytes_per_row, "cuda")
    assert pool.pinned
    assert pool.pinned_rows == rows_per_pin
    assert cudart.registered == {
        part.data_ptr(): part.nbytes for part in pool.rows.split(rows_per_pin)
    }
    assert not any(start % mmap.PAGESIZE for start in cudart.registered)
    pool.close()
    assert cudart.registered == {}
    assert pool.rows.nbytes == 0


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_pool_that_cannot_be_pinned_is_used_as_it_is(
    fails_at: int,
    monkeypatch: pytest.MonkeyPatch,
    small_pieces: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cudart = FakeCudart(fails_at)
    use(monkeypatch, cudart)
    kernels: list[str] = []

    def blamed(*args: object, device: str) -> None:
        # What torch does after a launch: it finds the error left behind by CUDA.
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", blamed)
    pool = HostPool(10, 1024, "cuda")
    assert not pool.pinned
    assert cudart.registered == {}
    assert kernels == ["cuda"]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "CUDA error 2" in warning
    assert "ulimit -l" in warning
    assert "with a memlock limit of" in warning
    assert not pool.rows.any()
    pool.close()


def test_memory_that_is_not_pinned_needs_no_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent() -> None:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "cudart", absent)
    HostPool(2, 64).close()
