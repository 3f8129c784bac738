"""What CudaTransfer does with a job: reports, paths, reuse, failures, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from worker.fake_cuda import FakeCuda, FakeStream
from worker.fake_launcher import InlineLauncher
from worker.traffic import NUM_BLOCKS, Traffic, check

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker import lane
from vllm_ctx_offload.worker.cuda_transfer import CudaTransfer, DeviceTerms
from vllm_ctx_offload.worker.kv_layout import derive_layout
from vllm_ctx_offload.worker.lane import InFlight, Lane
from vllm_ctx_offload.worker.paths import Path


@pytest.mark.parametrize("path", Path)
def test_closing_waits_for_copies_that_still_use_the_pool(path: Path) -> None:
    traffic = Traffic(0, path=path)
    with traffic.gpu:
        traffic._forward([], [1, 2, 3])
        traffic._store([1, 2, 3])
        traffic.launchers[0].run(1)
        traffic.transfer.close()
        (result,) = traffic.transfer.poll()
    assert result.ok
    for row, value in zip(result.job.rows, (1, 2, 3), strict=True):
        check(traffic.pool[row], value, "a stored row")


def test_jobs_that_were_not_launched_when_closing_end_as_failed() -> None:
    traffic = Traffic(0)
    before = traffic.pool.clone()
    with traffic.gpu:
        traffic._store([1, 2])
        traffic.transfer.close()
        traffic._store([3])
        traffic.gpu.drain()
        results = traffic.transfer.poll()
    assert [(result.job.job_id, result.ok) for result in results] == [
        (0, False),
        (1, False),
    ]
    assert torch.equal(traffic.pool, before)


def test_a_long_job_stops_between_its_pieces_when_closing() -> None:
    class Closes(Lane):
        def _store_piece(self, *args: Any) -> None:
            super()._store_piece(*args)
            self.stopping = True

    traffic = Traffic(0, lane=Closes, path=Path.STAGED)
    with traffic.gpu:
        traffic._forward([], [1, 2, 3])
        traffic._store([1, 2, 3])
        traffic.launchers[0].run(1)
        traffic.transfer.close()
        (result,) = traffic.transfer.poll()
    assert not result.ok
    assert traffic.pool[list(result.job.rows)].unique().tolist() == [0, 1]


def test_jobs_of_a_direction_are_reported_in_order_and_no_earlier() -> None:
    traffic = Traffic(0)
    with traffic.gpu:
        traffic._forward([], [1, 2])
        traffic._store([1])
        traffic._store([2])
        traffic.launchers[0].run(2)
        assert traffic.transfer.poll() == []
        traffic.gpu.drain()
        results = traffic.transfer.poll()
        assert traffic.transfer.poll() == []
    assert [result.job.job_id for result in results] == [0, 1]
    assert [result.ok for result in results] == [True, True]


def test_a_job_outside_cache_or_pool_fails_and_touches_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    traffic = Traffic(0)
    jobs: list[tuple[Sequence[int], Sequence[int]]] = [
        ((1,), ()),
        ((NUM_BLOCKS,), (0,)),
        ((0, -1), (0, 1)),
        ((0,), (99,)),
    ]
    with traffic.gpu:
        for number, (blocks, rows) in enumerate(jobs):
            job = TransferJob(number, "r", tuple(blocks), tuple(rows))
            traffic.transfer.submit(job, to_host=True)
        traffic.launchers[0].run(9)
        traffic.gpu.drain()
        results = traffic.transfer.poll()
    assert [result.ok for result in results] == [False] * 4
    assert traffic.gpu.checker.num_accesses == 0
    assert "lies outside 0 to 9" in caplog.text


def test_a_store_lets_compute_go_on_once_it_has_gathered() -> None:
    """The copy to the host, which takes far longer, is not waited for."""
    traffic = Traffic(0, path=Path.STAGED)
    with traffic.gpu:
        traffic._store([1])
        traffic.transfer.fence([0])
        traffic._forward([], [1])
        stores = traffic.transfer._stores
        held_back = list(stores.copies.queue)
        stores.copies.queue.clear()
        while traffic.gpu.compute.queue:
            traffic.gpu.run_towards(traffic.gpu.compute)
        assert traffic.transfer.poll() == []
        stores.copies.queue.extend(held_back)
        traffic.gpu.drain()
        (result,) = traffic.transfer.poll()
    check(traffic.pool[result.job.rows[0]], 0, "a stored row")


@pytest.mark.parametrize("path", Path)
def test_a_steady_state_allocates_nothing_and_waits_for_nothing(path: Path) -> None:
    traffic = Traffic(3, path=path)
    counts = []
    waited = traffic.gpu.num_synchronized
    for _ in range(6):
        with traffic.gpu:
            for to_host in (True, False) * 4:
                blocks, rows = ((4, 2, 7), (1, 2, 3)) if to_host else ((1, 3), (5, 6))
                job = TransferJob(0, "r", blocks, rows)
                traffic.transfer.submit(job, to_host=to_host)
                for launcher in traffic.launchers:
                    launcher.run(1)
            traffic.transfer.fence([0])
            traffic.gpu.drain()
            assert len(traffic.transfer.poll()) == 8
            gpu = traffic.gpu
        counts.append((gpu.num_events, gpu.num_allocated, gpu.num_synchronized))
    assert len(set(counts)) == 1
    assert counts[0][2] == waited


def test_polling_waits_for_the_first_end_but_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traffic = Traffic(0)
    now = [0.0]
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        now[0] += seconds
        if len(looks) == 60:
            traffic.launchers[0].run(1)
            traffic.gpu.drain()

    module = "vllm_ctx_offload.worker.cuda_transfer.time"
    monkeypatch.setattr(f"{module}.sleep", sleep)
    monkeypatch.setattr(f"{module}.monotonic", lambda: now[0])
    with traffic.gpu:
        assert traffic.transfer.poll(5.0) == []
        assert now[0] == 0
        traffic._store([1])
        assert traffic.transfer.poll() == []
        assert traffic.transfer.poll(0.001) == []
        assert 0.001 <= now[0] < 0.00103
        (result,) = traffic.transfer.poll(5.0)
    assert result.ok
    assert now[0] < 0.01


def test_a_device_that_is_lost_ends_no_launching_thread() -> None:
    class Lost(Lane):
        def _end(self, in_flight: InFlight) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    traffic = Traffic(0, lane=Lost)
    with traffic.gpu:
        traffic._store([1])
        traffic._store([2])
        traffic.transfer.fence([0, 1])
        traffic.gpu.drain()
        results = traffic.transfer.poll()
    assert [result.ok for result in results] == [False, False]


def test_a_device_without_room_for_the_scratch_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Lane, "_half", full)
    with pytest.raises(ConfigError, match=r"64.00 MiB left.*gpu-memory-utilization"):
        make(64, 128)


def make(
    block_bytes: int,
    scratch_bytes: int,
    num_layers: int = 1,
    *,
    pinned_rows: int = 0,
    gpu: FakeCuda | None = None,
    path: Path | None = None,
) -> CudaTransfer:
    caches = {
        f"l{number}": torch.zeros((NUM_BLOCKS, block_bytes), dtype=torch.uint8)
        for number in range(num_layers)
    }
    layout = derive_layout(caches, NUM_BLOCKS)
    pool = torch.zeros((NUM_BLOCKS, layout.bytes_per_block), dtype=torch.uint8)
    gpu = gpu or FakeCuda(0)
    if pinned_rows:
        gpu.pin(pool, pinned_rows)
    terms = DeviceTerms(gpu, pinned_rows, scratch_bytes, path)
    return CudaTransfer(layout, pool, terms, InlineLauncher)


@pytest.mark.parametrize(
    ("block_bytes", "scratch_bytes", "rows"),
    [(64, 10, 1), (64, 128, 1), (64, 6 * 64 + 1, 3), (64, 1024**3, NUM_BLOCKS)],
)
def test_a_half_of_the_scratch_holds_a_block_and_at_most_all(
    block_bytes: int, scratch_bytes: int, rows: int
) -> None:
    transfer = make(block_bytes, scratch_bytes)
    for each in (transfer._stores, transfer._loads):
        assert [half.scratch.shape for half in each._halves] == [(rows, 64)] * 2


def test_a_half_of_the_scratch_takes_no_more_rows_than_a_piece_may_have_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane, "MAX_COPIES", 4)
    transfer = make(64, 1024**3)
    assert transfer._stores._halves[0].scratch.shape[0] == 4


def test_scratch_is_there_before_a_stream_uses_it_that_did_not_allocate_it() -> None:
    gpu = FakeCuda(0)
    make(64, 128, gpu=gpu)
    assert gpu.num_synchronized == 2  # a stream of each direction


@pytest.mark.parametrize(
    ("page_bytes", "pinned_rows", "path"),
    [
        (512 * 1024 - 8, 1, Path.STAGED),
        (512 * 1024, 1, Path.DIRECT),
        (512 * 1024, 0, Path.STAGED),
    ],
)
def test_large_pages_of_a_pinned_pool_are_copied_directly(
    page_bytes: int, pinned_rows: int, path: Path
) -> None:
    assert make(page_bytes, 1024, pinned_rows=pinned_rows)._stores._path() is path


def test_with_one_segment_neighbours_are_one_copy() -> None:
    one, two = (make(64, 128, n, pinned_rows=9)._stores._pages for n in (1, 2))
    assert [len(part) for part in one.pairs((4, 5, 7), (0, 1, 0))] == [2, 2]
    assert [len(part) for part in two.pairs((4, 5, 7), (0, 1, 0))] == [6, 6]


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("path", Path)
def test_no_copy_spans_two_pieces_of_the_pool(path: Path, to_host: bool) -> None:
    """Neighbouring blocks go to neighbouring rows, of which CUDA knows three a time."""
    gpu = FakeCuda(0, eager=True)
    transfer = make(64, 1024, pinned_rows=3, gpu=gpu, path=path)
    for number, cache in enumerate((transfer._stores._pool, _cache(transfer))):
        cache.copy_(torch.arange(NUM_BLOCKS)[:, None] + 100 * number)
    ids = tuple(range(1, NUM_BLOCKS))
    with gpu:
        transfer.submit(TransferJob(0, "r", ids, ids), to_host=to_host)
        (result,) = transfer.poll()
    assert result.ok
    assert torch.equal(transfer._stores._pool[1:], _cache(transfer)[1:])


def _cache(transfer: CudaTransfer) -> torch.Tensor:
    return transfer._stores._layout.segments[0].view.view(torch.uint8)


@pytest.mark.parametrize("path", Path)
def test_no_more_than_two_pieces_of_a_job_are_with_the_driver(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is full at 1,024 launches, and the model's launches then wait, too."""
    monkeypatch.setattr(lane, "MAX_COPIES", 2)
    traffic = Traffic(0, path=path)
    blocks = tuple(range(NUM_BLOCKS))
    with traffic.gpu:
        traffic._forward([], [1])
        for job_id in range(3):
            job = TransferJob(job_id, "r", blocks, blocks)
            traffic.transfer.submit(job, to_host=True)
        traffic.launchers[0].run(3)
        traffic.gpu.drain()
        results = traffic.transfer.poll()
    assert [result.ok for result in results] == [True] * 3
    # A piece: the wait for compute or for kernels, an index, a copy or a kernel for
    # each of two layers, events for the other stream and for the ends of jobs.
    assert traffic.gpu.most_queued <= 2 * 7


def test_a_lane_takes_no_stream_that_the_model_runs_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's streams come by turns, so the model's own comes up again."""
    gpu = FakeCuda(0)
    new_stream = gpu.Stream
    turns = iter([True, False] * 9)

    def stream(priority: int) -> FakeStream:
        return gpu.compute if next(turns) else new_stream(priority)

    monkeypatch.setattr(gpu, "Stream", stream)
    transfer = make(64, 128, gpu=gpu)
    lanes = (transfer._stores, transfer._loads)
    streams = {id(one) for each in lanes for one in (each.kernels, each.copies)}
    assert len(streams - {id(gpu.compute)}) == 4
