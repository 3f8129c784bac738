"""The backend for CUDA: streams for each direction, ordered by events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import torch

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import format_bytes
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.kv_layout import BlockLayout
from vllm_ctx_offload.worker.lane import DeviceTerms, InFlight, Lane
from vllm_ctx_offload.worker.launcher import Launcher, LaunchThread
from vllm_ctx_offload.worker.transfer import JobResult

__all__ = ["SCRATCH_BYTES", "CudaTransfer", "DeviceTerms"]

# Of device memory for each direction; longer jobs go through it in pieces. A half of
# it keeps the link busy for longer than a piece takes to launch.
SCRATCH_BYTES: Final = 64 * 1024**2
# Between two looks at the device while a poll waits: CUDA's own wait has no limit.
_LOOK_S: Final = 0.00002


class CudaTransfer:
    """Copies on streams of its own; see `Transfer` for the contract.

    The model's thread records an event and hands the job to the launching thread of
    its direction; it never waits, but in a fence for a store that is still being
    launched. What runs after what: [Note: event order] in lane.py. Events, indices and
    scratch are reused, so a steady state allocates nothing.

    Not used: CUDA graphs, which would make one launch of the kernels of a piece, but
    are tied to addresses and to the number of layers, and save time only on the
    launching thread. `expandable_segments` changes nothing: what is allocated here
    stays where it is for the life of the transfers, and the pool is no memory of
    torch's allocator.

    Raises:
        ConfigError: the device has no room for the scratch.
    """

    def __init__(
        self,
        layout: BlockLayout,
        pool: torch.Tensor,
        terms: DeviceTerms,
        make_launcher: Callable[[str, Callable[[], None]], Launcher] = LaunchThread,
    ) -> None:
        self._cuda: Any = terms.cuda
        self._events: deque[Any] = deque()
        try:
            self._stores = Lane(layout, pool, terms, to_host=True)
            self._loads = Lane(layout, pool, terms, to_host=False)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"CtxOffloadConnector: the device has no {format_bytes(SCRATCH_BYTES)} "
                "left for each direction of its transfers; lower "
                "--gpu-memory-utilization."
            ) from error
        # A thread begins on the first GPU, whichever the worker's is.
        begin = partial(self._cuda.set_device, layout.device)
        self._launchers = {
            True: make_launcher("ctx-offload-store", begin),
            False: make_launcher("ctx-offload-load", begin),
        }

    def submit(self, job: TransferJob, *, to_host: bool) -> None:
        lane = self._stores if to_host else self._loads
        compute, sources_read, done = (self._event() for _ in range(3))
        # [Note: event order] after all compute that was submitted before this call.
        compute.record(self._cuda.current_stream())
        began = time.monotonic()
        in_flight = InFlight(job, to_host, began, compute, sources_read, done)
        lane.open.append(in_flight)
        self._launchers[to_host].start(partial(lane.launch, in_flight))

    def _event(self) -> Any:
        return self._events.pop() if self._events else self._cuda.Event()

    def fence(self, job_ids: Iterable[int]) -> None:
        waited = set(job_ids)
        for in_flight in self._stores.open:
            if in_flight.job.job_id in waited:
                # Until then its event stands for an earlier job.
                if not in_flight.launched:
                    self._wait_for_launch(in_flight)
                # [Note: event order] compute after the store whose source it reuses.
                self._cuda.current_stream().wait_event(in_flight.sources_read)

    def _wait_for_launch(self, in_flight: InFlight) -> None:
        self._launchers[True].wait_until(lambda: in_flight.launched)

    def poll(self, timeout_s: float = 0.0) -> list[JobResult]:
        deadline = time.monotonic() + timeout_s
        while True:
            results = self._ended()
            some_open = self._stores.open or self._loads.open
            if results or not some_open or time.monotonic() >= deadline:
                return results
            time.sleep(_LOOK_S)

    def _ended(self) -> list[JobResult]:
        results = []
        for lane in (self._stores, self._loads):
            while lane.open and lane.open[0].launched and lane.open[0].done.query():
                results.append(self._result(lane.open.popleft()))
        return results

    def _result(self, in_flight: InFlight) -> JobResult:
        # Whoever had to wait for them has been told to: a wait is for what an event
        # stood for at the time of the call.
        self._events += (in_flight.compute, in_flight.sources_read, in_flight.done)
        return JobResult(
            in_flight.job,
            in_flight.to_host,
            in_flight.ok,
            time.monotonic() - in_flight.began,
        )

    def close(self) -> None:
        lanes = (self._stores, self._loads)
        for lane in lanes:
            lane.stopping = True
        for launcher in self._launchers.values():
            launcher.close()
        # The pool is freed next: no copy may still use it.
        for lane in lanes:
            lane.kernels.synchronize()
            lane.copies.synchronize()
