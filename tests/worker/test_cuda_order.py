"""Orders on the device: every wait that CudaTransfer makes, and that each is needed.

`FakeCuda` runs the five streams, and the two launching threads beside them, in random
orders that respect nothing but the waits, and checks what orders every access.
`Traffic` plays vLLM and the planner on top of it and knows which bytes belong where.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from worker.happens_before import HazardError
from worker.traffic import Traffic, WrongBytesError

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.cuda_transfer import CudaTransfer
from vllm_ctx_offload.worker.lane import InFlight, Lane

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
            for name in ("scratch", "parts"):
                object.__setattr__(one, name, getattr(other, name))


class OneHalf(Lane):
    """Broken: the halves of the scratch are the same memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        first, second = self._halves
        for name in ("scratch", "parts"):
            object.__setattr__(second, name, getattr(first, name))


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


class NeverWaits(Lane):
    """Broken: takes each half of the scratch for free."""

    def _half(self, num_rows: int) -> Any:
        half = super()._half(num_rows)
        half.free.synchronize = lambda: None
        return half


class OneIndex(Lane):
    """Broken: the halves of the scratch share an index."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        first, second = self._halves
        object.__setattr__(second, "index", first.index)


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
    "halves are taken before they are free": (WHOLE, NeverWaits, ""),
    "both halves share an index": (WHOLE, OneIndex, ""),
}


def caught(what: str, *, checked: bool) -> set[type[BaseException]]:
    """Returns what is found out over all seeds; a run ends at its first finding."""
    kind, lane, deaf = BROKEN[what]
    errors: set[type[BaseException]] = set()
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
