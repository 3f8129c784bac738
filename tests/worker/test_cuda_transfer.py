"""Orders on the device: every wait that CudaTransfer makes, and that each is needed.

`FakeCuda` runs the five streams, and the two launching threads beside them, in random
orders that respect nothing but the waits, and checks what orders every access.
`Traffic` plays vLLM and the planner on top of it and knows which bytes belong where.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from worker.fake_cuda import FakeCuda
from worker.fake_launcher import InlineLauncher
from worker.happens_before import HazardError
from worker.traffic import NUM_BLOCKS, Traffic, WrongBytesError, check

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.cuda_transfer import CudaTransfer, DeviceTerms
from vllm_ctx_offload.worker.kv_layout import derive_layout
from vllm_ctx_offload.worker.lane import InFlight, Lane
from vllm_ctx_offload.worker.paths import Path

NUM_SEEDS = 40


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_byte_is_right_in_any_order_that_the_waits_allow(seed: int) -> None:
    traffic = Traffic(seed)
    traffic.play(30)
    assert traffic.num_failed == 0
    assert traffic.gpu.checker.num_accesses > 100


@pytest.mark.slow
def test_ten_thousand_random_schedules_have_no_hazard() -> None:
    for seed in range(10_000):
        lane = FailsSometimes if seed % 4 == 0 else Lane
        traffic = Traffic(seed, lane=lane, num_layers=1)
        traffic.play(2)
        assert lane is FailsSometimes or traffic.num_failed == 0


class FailsSometimes(Lane):
    """Fails in the middle of some jobs, when a part of their copies is under way."""

    num_calls = 0

    def _fail_now(self) -> None:
        self.num_calls += 1
        if self.num_calls % 5 == 0:
            raise RuntimeError("injected")

    def _store_piece(self, *args: Any) -> None:
        super()._store_piece(*args)
        self._fail_now()

    def _load_piece(self, *args: Any) -> None:
        super()._load_piece(*args)
        self._fail_now()

    def _copy_pages(self, in_flight: InFlight) -> None:
        super()._copy_pages(in_flight)
        self._fail_now()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_failed_job_is_reported_once_its_copies_are_over(seed: int) -> None:
    traffic = Traffic(seed, lane=FailsSometimes)
    traffic.play(30)
    assert traffic.num_failed > 0


class OneScratch(CudaTransfer):
    """Broken: both directions share their scratch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for one, other in zip(self._loads._halves, self._stores._halves, strict=True):
            object.__setattr__(one, "scratch", other.scratch)


class OneHalf(Lane):
    """Broken: the halves of the scratch are the same memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        first, second = self._halves
        object.__setattr__(second, "scratch", first.scratch)


class ReportsEarly(Lane):
    """Broken: takes a job for done when its kernels are."""

    def _end(self, in_flight: InFlight) -> None:
        super()._end(in_flight)
        in_flight.done.record(self._first)


class ReportsFailuresEarly(FailsSometimes):
    """Broken: reports a failed job at once."""

    def _end(self, in_flight: InFlight) -> None:
        super()._end(in_flight)
        if not in_flight.ok:
            in_flight.done = self._terms.cuda.Event()  # not recorded: it has passed


class ForgetsHalves(FailsSometimes):
    """Broken: after a failure a half is taken for free as it was before."""

    def _fail_now(self) -> None:
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            for half in self._halves:
                object.__setattr__(half, "free", self._terms.cuda.Event())
            raise RuntimeError("injected")

    def _end(self, in_flight: InFlight) -> None:
        ok, in_flight.ok = in_flight.ok, True
        super()._end(in_flight)
        in_flight.ok = ok


class ReadsEarly(Lane):
    """Broken: takes the sources of a direct store for read before the copies."""

    def _end(self, in_flight: InFlight) -> None:
        super()._end(in_flight)
        in_flight.sources_read.record(self._first)


class ReusesIndex(Lane):
    """Broken: an index is used anew while a kernel may still read it."""

    def launch(self, in_flight: InFlight) -> None:
        super().launch(in_flight)
        self.give_back(in_flight)


class LaunchedTooSoon(Lane):
    """Broken: a job counts as launched before its events are recorded."""

    def launch(self, in_flight: InFlight) -> None:
        pass


class NoFence(CudaTransfer):
    """Broken: compute does not wait for stores."""

    def fence(self, job_ids: Iterable[int]) -> None:
        pass


class FencesTheFirst(CudaTransfer):
    """Broken: waits for the oldest of the stores only."""

    def fence(self, job_ids: Iterable[int]) -> None:
        super().fence(sorted(job_ids)[:1])


class FencesUnlaunched(CudaTransfer):
    """Broken: waits for the event of a store that was not recorded yet."""

    def _wait_for_launch(self, in_flight: InFlight) -> None:
        pass


class IgnoresLaunch(CudaTransfer):
    """Broken: believes the events of a job that was not launched yet."""

    def submit(self, job: TransferJob, *, to_host: bool) -> None:
        super().submit(job, to_host=to_host)
        (self._stores if to_host else self._loads).open[-1].launched = True


Broken = tuple[type[CudaTransfer], type[Lane], str]
WHOLE = CudaTransfer
BROKEN: dict[str, Broken] = {
    "a store's kernels wait for nothing": (WHOLE, Lane, "stores:kernels"),
    "a store's copies wait for nothing": (WHOLE, Lane, "stores:copies"),
    "a load's kernels wait for nothing": (WHOLE, Lane, "loads:kernels"),
    "a load's copies wait for nothing": (WHOLE, Lane, "loads:copies"),
    "compute does not wait at a fence": (WHOLE, Lane, "compute"),
    "a fence does nothing": (NoFence, Lane, ""),
    "a fence waits for one store": (FencesTheFirst, Lane, ""),
    "a fence does not wait for a launch": (FencesUnlaunched, Lane, ""),
    "a job is reported before its launch": (IgnoresLaunch, Lane, ""),
    "both directions share a scratch": (OneScratch, Lane, ""),
    "both halves are one": (WHOLE, OneHalf, ""),
    "jobs are reported early": (WHOLE, ReportsEarly, ""),
    "failed jobs are reported early": (WHOLE, ReportsFailuresEarly, ""),
    "a failed job's half is used at once": (WHOLE, ForgetsHalves, ""),
    "a fence is over before direct copies": (WHOLE, ReadsEarly, ""),
    "an index is reused at once": (WHOLE, ReusesIndex, ""),
}


def caught(what: str, *, checked: bool) -> set[type[AssertionError]]:
    """Returns what is found out over all seeds; a run ends at its first finding."""
    kind, lane, deaf = BROKEN[what]
    errors: set[type[AssertionError]] = set()
    for seed in range(NUM_SEEDS):
        traffic = Traffic(seed, kind=kind, lane=lane, deaf=deaf, checked=checked)
        try:
            traffic.play(30)
        except (HazardError, WrongBytesError) as error:
            errors.add(type(error))
    return errors


@pytest.mark.parametrize("what", BROKEN)
def test_without_it_bytes_go_wrong(what: str) -> None:
    assert caught(what, checked=False) == {WrongBytesError}


@pytest.mark.parametrize("what", BROKEN)
def test_without_it_the_checker_finds_a_hazard(what: str) -> None:
    assert HazardError in caught(what, checked=True)


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
    assert [result.num_bytes for result in results] == [8, 8]


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
    assert [result.num_bytes for result in results] == [0] * 4
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
    assert counts[0][2] == 0


def test_polling_waits_for_the_first_end_but_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traffic = Traffic(0)
    now = [0.0]
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        now[0] += seconds
        if len(looks) == 20:
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
        assert 0.001 <= now[0] < 0.0012
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
        make(64, 128, pinned=False)


def make(
    block_bytes: int, scratch_bytes: int, num_layers: int = 1, **terms: Any
) -> CudaTransfer:
    caches = {
        f"l{number}": torch.zeros((NUM_BLOCKS, block_bytes), dtype=torch.uint8)
        for number in range(num_layers)
    }
    layout = derive_layout(caches, NUM_BLOCKS)
    pool = torch.zeros((2, layout.bytes_per_block), dtype=torch.uint8)
    return CudaTransfer(
        layout,
        pool,
        DeviceTerms(FakeCuda(0), scratch_bytes=scratch_bytes, **terms),
        InlineLauncher,
    )


@pytest.mark.parametrize(
    ("block_bytes", "scratch_bytes", "rows"),
    [(64, 10, 1), (64, 128, 1), (64, 6 * 64 + 1, 3), (64, 1024**3, NUM_BLOCKS)],
)
def test_a_half_of_the_scratch_holds_a_block_and_at_most_all(
    block_bytes: int, scratch_bytes: int, rows: int
) -> None:
    transfer = make(block_bytes, scratch_bytes, pinned=False)
    for lane in (transfer._stores, transfer._loads):
        assert [half.scratch.shape for half in lane._halves] == [(rows, 64)] * 2


def test_indices_grow_to_the_largest_job_and_are_kept() -> None:
    lane = make(64, 128, pinned=False)._stores
    index = lane._index_for(5000)
    assert [part.shape[0] for part in index] == [8192, 8192]
    lane._indices.append(index)
    assert lane._index_for(5000) is index
    assert lane._index_for(5)[0].shape[0] == 4096


@pytest.mark.parametrize(
    ("page_bytes", "num_layers", "num_blocks", "pinned", "path"),
    [
        (65_536, 1, 1, True, Path.STAGED),
        (512 * 1024, 2, 512, True, Path.DIRECT),
        (512 * 1024, 2, 513, True, Path.STAGED),
        (2 * 1024**2, 2, 513, True, Path.DIRECT),
        (2 * 1024**2, 2, 4097, True, Path.STAGED),
        (2 * 1024**2, 2, 1, False, Path.STAGED),
    ],
)
def test_pages_that_are_large_and_few_are_copied_directly(
    page_bytes: int, num_layers: int, num_blocks: int, pinned: bool, path: Path
) -> None:
    lane = make(page_bytes, 1024, num_layers, pinned=pinned)._stores
    assert lane._path(num_blocks) is path


def test_with_one_segment_neighbours_are_one_copy() -> None:
    one, two = (make(64, 128, n, pinned=True)._stores._pages for n in (1, 2))
    assert [len(part) for part in one.pairs((4, 5, 7), (0, 1, 0))] == [2, 2]
    assert [len(part) for part in two.pairs((4, 5, 7), (0, 1, 0))] == [6, 6]
