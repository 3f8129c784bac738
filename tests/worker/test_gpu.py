"""What only a GPU can show: real streams, real pinned memory."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from worker.gpu_device import (
    LONG_CYCLES,
    NUM_BLOCKS,
    WORDS,
    Device,
    make_transfer,
    wait,
)
from worker.layouts import CASE_IDS, CASES, build, copied, storages_of

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker import host_pool
from vllm_ctx_offload.worker.host_pool import HostPool
from vllm_ctx_offload.worker.kv_layout import BlockLayout, derive_layout
from vllm_ctx_offload.worker.paths import Path
from vllm_ctx_offload.worker.proof import prove_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def copy_one_by_one(
    layout: BlockLayout, pool: torch.Tensor, job: TransferJob, *, to_host: bool
) -> None:
    for block, row in zip(job.block_ids, job.rows, strict=True):
        for segment in layout.segments:
            end = segment.offset + segment.num_bytes
            on_host = pool[row, segment.offset : end].view(layout.word)
            on_device = segment.view[block]
            if to_host:
                on_host.copy_(on_device)
            else:
                on_device.copy_(on_host)


@pytest.fixture
def model_stream() -> Iterator[None]:
    """The model runs on a stream of its own, as vLLM's does."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


@pytest.fixture(params=Path)
def device(request: pytest.FixtureRequest, model_stream: None) -> Iterator[Device]:
    made = Device(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize(("layout", "dtype"), CASES, ids=CASE_IDS)
def test_blocks_of_every_layout_come_back_and_nothing_else_changes(
    layout: str, dtype: torch.dtype, path: Path
) -> None:
    case = build(layout, dtype, "cuda")
    found = derive_layout(case.caches, case.num_blocks)
    pool = HostPool(9, found.bytes_per_block, "cuda")
    transfer = make_transfer(found, pool, path)
    prove_layout(transfer, case.caches, case.num_blocks)
    sources, targets = (11, 3, 4, 5, 0), (1, 6, 7, 8, 10)
    rows = (8, 2, 3, 4, 6)
    expected = copied(case, list(zip(sources, targets, strict=True)))
    for job_id, (blocks, to_host) in enumerate([(sources, True), (targets, False)]):
        transfer.submit(TransferJob(job_id, "r", blocks, rows), to_host=to_host)
        (result,) = wait(transfer, 1)
        assert result.ok
    for key, storage in storages_of(case).items():
        assert torch.equal(storage, expected[key])
    transfer.close()
    pool.close()


@pytest.mark.parametrize("path", [None, *Path])
@pytest.mark.parametrize("seed", range(5))
def test_random_jobs_do_what_a_copy_a_block_does(seed: int, path: Path | None) -> None:
    """Rounds of a store and a load at once, of blocks and rows that do not meet."""
    rng = random.Random(seed)
    caches = {
        f"l{i}": torch.randint(
            0, 99, (NUM_BLOCKS, words), dtype=torch.int32, device="cuda"
        )
        for i, words in enumerate((WORDS, 24, 1025))
    }
    mirrors = {name: cache.cpu() for name, cache in caches.items()}
    layout, mirror = (derive_layout(c, NUM_BLOCKS) for c in (caches, mirrors))
    pool = HostPool(NUM_BLOCKS, layout.bytes_per_block, "cuda")
    pool.rows.random_()
    mirror_pool = pool.rows.clone()
    transfer = make_transfer(layout, pool, path)
    for job_id in range(0, 40, 2):
        blocks = rng.sample(range(NUM_BLOCKS), rng.randrange(2, NUM_BLOCKS))
        start = rng.randrange(NUM_BLOCKS - len(blocks) + 1)
        rows = list(range(start, start + len(blocks)))
        half = len(blocks) // 2
        for number, part in enumerate((slice(half), slice(half, None))):
            ids = tuple(blocks[part]), tuple(rows[part])
            job, to_host = TransferJob(job_id + number, "r", *ids), number == 0
            transfer.submit(job, to_host=to_host)
            copy_one_by_one(mirror, mirror_pool, job, to_host=to_host)
        assert all(result.ok for result in wait(transfer, 2))
    assert torch.equal(pool.rows, mirror_pool)
    for name, cache in caches.items():
        assert torch.equal(cache.cpu(), mirrors[name])
    transfer.close()
    pool.close()


@pytest.mark.parametrize("path", Path)
def test_a_thousand_jobs_leave_no_memory_behind(path: Path) -> None:
    cache = torch.zeros((NUM_BLOCKS, WORDS), dtype=torch.int32, device="cuda")
    layout = derive_layout({"l": cache}, NUM_BLOCKS)
    pool = HostPool(NUM_BLOCKS, layout.bytes_per_block, "cuda")
    transfer = make_transfer(layout, pool, path)
    used = []
    for round_id in range(10):
        for number in range(100):
            ids = tuple(range(number % 7, NUM_BLOCKS))
            job = TransferJob(100 * round_id + number, "r", ids, ids)
            transfer.submit(job, to_host=bool(number % 2))
            wait(transfer, 1)
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        events = len(transfer._events)
        assert events <= 6
    assert len(set(used[1:])) == 1
    transfer.close()
    pool.close()


def test_a_store_reads_what_a_slow_step_before_it_writes(device: Device) -> None:
    torch.cuda._sleep(LONG_CYCLES)
    device.cache.fill_(7)
    job_id = device.start(range(NUM_BLOCKS), to_host=True)
    device.launched()
    # Nothing has been copied yet, or the sleep was too short to show anything.
    assert device.transfer.poll() == []
    device.wait(job_id)
    assert bool((device.row(0) == 7).all())
    assert bool((device.row(NUM_BLOCKS - 1) == 7).all())


def test_compute_after_a_fence_does_not_overwrite_what_a_store_reads(
    device: Device,
) -> None:
    device.cache.fill_(1)
    torch.cuda.synchronize()
    device.hold_stores_back()
    job_id = device.start(range(NUM_BLOCKS), to_host=True)
    device.transfer.fence([job_id])
    device.cache.fill_(2)
    device.wait(job_id)
    torch.cuda.synchronize()
    for block in range(NUM_BLOCKS):
        assert bool((device.row(block) == 1).all())
    assert bool((device.cache == 2).all())


def test_a_load_does_not_overwrite_what_a_slow_step_before_it_reads(
    device: Device,
) -> None:
    device.pool.rows.fill_(9)
    device.cache.fill_(3)
    seen = torch.empty_like(device.cache)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    seen.copy_(device.cache)
    job_id = device.start(range(NUM_BLOCKS), to_host=False)
    device.launched()
    assert device.transfer.poll() == []
    device.wait(job_id)
    torch.cuda.synchronize()
    assert bool((seen == 3).all())
    assert bool((device.cache.view(torch.uint8) == 9).all())


def test_submitting_does_not_wait_for_the_device(device: Device) -> None:
    torch.cuda._sleep(LONG_CYCLES)
    asleep = torch.cuda.Event()
    asleep.record()
    stored = device.start(range(NUM_BLOCKS // 2), to_host=True)
    device.transfer.fence([stored])
    device.start(range(NUM_BLOCKS // 2, NUM_BLOCKS), to_host=False)
    device.launched()
    assert not asleep.query()
    assert len(wait(device.transfer, 2)) == 2


@pytest.mark.parametrize("path", Path)
def test_a_store_of_thousands_of_copies_does_not_hold_up_the_models_launches(
    path: Path, model_stream: None
) -> None:
    """What the driver queues is shared by all threads; once full, all of them wait."""
    device = Device(path, 4096)
    torch.cuda.synchronize()
    device.hold_stores_back()
    asleep = torch.cuda.Event()
    asleep.record(device.transfer._stores.kernels)
    # No two neighbours in the cache are any in the pool.
    blocks, rows = tuple(range(4096)), tuple(reversed(range(4096)))
    device.transfer.submit(TransferJob(99, "r", blocks, rows), to_host=True)
    began = time.monotonic()
    # Enough for the launching thread to get as far as it goes.
    while time.monotonic() - began < 0.1:
        device.cache.add_(0)
        torch.cuda.current_stream().synchronize()
    assert not asleep.query()
    (result,) = wait(device.transfer, 1)
    assert result.ok
    device.close()


@pytest.mark.parametrize("path", Path)
def test_jobs_take_no_harm_from_how_the_pool_was_pinned(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of three rows: a copy over two of them would be refused."""
    monkeypatch.setattr(host_pool, "_PIN_PIECE_BYTES", 3 * WORDS * 4)
    device = Device(path)
    assert device.pool.pinned_rows == 3
    device.cache.copy_(torch.arange(NUM_BLOCKS, device="cuda")[:, None])
    device.wait(device.start(range(NUM_BLOCKS), to_host=True))
    device.cache.zero_()
    device.wait(device.start(range(1, NUM_BLOCKS), to_host=False))
    assert device.cache[:, 0].tolist() == list(range(NUM_BLOCKS))
    assert [int(device.row(row)[-1]) for row in range(NUM_BLOCKS)] == list(
        range(NUM_BLOCKS)
    )
    device.close()


def test_deterministic_algorithms_change_nothing(device: Device) -> None:
    """With them torch scatters in another way."""
    device.cache.copy_(torch.arange(NUM_BLOCKS, device="cuda")[:, None])
    torch.use_deterministic_algorithms(True)
    try:
        device.wait(device.start(range(NUM_BLOCKS), to_host=True))
        device.cache.zero_()
        device.wait(device.start(range(NUM_BLOCKS), to_host=False))
    finally:
        torch.use_deterministic_algorithms(False)
    assert device.cache[:, -1].tolist() == list(range(NUM_BLOCKS))


def test_a_graph_can_be_captured_while_no_job_is_open(device: Device) -> None:
    """Capturing fails if any thread meanwhile asks the driver for what may wait."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert device.transfer.poll() == []
        device.cache.fill_(5)
    graph.replay()
    device.wait(device.start(range(NUM_BLOCKS), to_host=True))
    assert bool((device.row(0) == 5).all())


def test_kernels_run_after_the_pool_could_not_be_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real: Any = torch.cuda.cudart()

    class RegistersTwice:
        """The second time fails in the driver: the range is registered already."""

        def cudaHostRegister(self, *args: int) -> Any:  # noqa: N802 - CUDA's name
            first = real.cudaHostRegister(*args)
            second = real.cudaHostRegister(*args)
            if not int(first):
                real.cudaHostUnregister(args[0])
            return second

    monkeypatch.setattr(host_pool.torch.cuda, "cudart", RegistersTwice)
    pool = HostPool(16, 4096, "cuda")
    assert not pool.pinned
    assert "Pinning host memory failed" in caplog.text
    monkeypatch.undo()

    case = build("block_first", torch.bfloat16, "cuda")
    layout = derive_layout(case.caches, case.num_blocks)
    plain = HostPool(2, layout.bytes_per_block)
    assert not plain.pinned
    transfer = make_transfer(layout, plain)
    prove_layout(transfer, case.caches, case.num_blocks)
    transfer.close()
