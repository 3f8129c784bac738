"""What transfers cost the model: its thread at a submission, its cores in a step."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any, Final

import torch
from transfer_rivals import NullCuda, make_job

from vllm_ctx_offload.worker.cpu_transfer import CpuTransfer
from vllm_ctx_offload.worker.cuda_transfer import (
    SCRATCH_BYTES,
    CudaTransfer,
    DeviceTerms,
)
from vllm_ctx_offload.worker.host_pool import HostPool
from vllm_ctx_offload.worker.kv_layout import BlockLayout, derive_layout

__all__ = ["step_ratios", "submission_us"]

# Two kinds of step: one whose matrices stay in the caches, so that it competes for
# cores alone, and one that streams them, so that it competes for the memory too.
_STEPS: Final = {"cached": (512, 4), "streamed": (2048, 16)}
_STEPS_A_TURN: Final = {"cached": 100, "streamed": 8}


def _caches(num_layers: int, num_blocks: int, page: int, device: str) -> BlockLayout:
    caches = {
        str(layer): torch.zeros(num_blocks, page, dtype=torch.uint8, device=device)
        for layer in range(num_layers)
    }
    return derive_layout(caches, num_blocks)


def submission_us(device: str) -> dict[str, float]:
    """Returns what a job of 2,000 blocks costs the model's thread, in microseconds.

    Also, as `launch`, what it costs the launching thread.
    """
    cuda: Any = torch.cuda if device == "cuda" else NullCuda()
    layout = _caches(32, 4096, 64, device)
    pool = HostPool(4096, layout.bytes_per_block, device)
    terms = DeviceTerms(cuda, pool.pinned_rows, SCRATCH_BYTES)
    transfer = CudaTransfer(layout, pool.rows, terms)
    job = make_job(layout, 4096, 2000, "scattered")
    submitted, ended = [], []
    for number in range(60):
        start = time.perf_counter()
        transfer.submit(job, to_host=bool(number % 2))
        submitted.append(1e6 * (time.perf_counter() - start))
        while not transfer.poll(1.0):
            pass
        ended.append(1e6 * (time.perf_counter() - start))
    transfer.close()
    pool.close()
    submitted = sorted(submitted[10:])
    return {
        "median": statistics.median(submitted),
        "p90": submitted[len(submitted) * 9 // 10],
        "until_done": statistics.median(ended[10:]),
    }


class _Copies:
    """A thread that submits stores, or loads, of 128 MiB, one after the other."""

    def __init__(self, page: int, num_blocks: int, *, to_host: bool) -> None:
        layout = _caches(4, 2 * num_blocks, page, "cpu")
        self._pool = HostPool(2 * num_blocks, layout.bytes_per_block)
        self._transfer = CpuTransfer(layout, self._pool.rows)
        self._job = make_job(layout, 2 * num_blocks, num_blocks, "scattered")
        self._to_host = to_host
        self._num_bytes = num_blocks * layout.bytes_per_block
        self.done_bytes = 0
        self.on = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self.on.wait() and not self._over:
            self._transfer.submit(self._job, to_host=self._to_host)
            # As beside steps with tokens: for who waits, a store would hurry.
            while not self._transfer.poll():
                time.sleep(0.001)
            self.done_bytes += self._num_bytes

    def close(self) -> None:
        self._over = True
        self.on.set()
        self._thread.join()
        self._transfer.close()
        self._pool.close()


def step_ratios(page: int, num_blocks: int, turns: int) -> dict[str, dict[str, float]]:
    """Returns what a step takes beside stores, or loads, over what it takes alone.

    A step multiplies a batch of 8 with matrices, as decoding does, on all cores but
    one; with and without copies by turns. Also how fast the copies are then.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(before - 1, 1))
    found = {}
    for name, to_host in (("stores", True), ("loads", False)):
        copies = _Copies(page, num_blocks, to_host=to_host)
        for kind in _STEPS:
            found[f"{kind}, beside {name}"] = _beside(copies, kind, turns)
        copies.close()
    torch.set_num_threads(before)
    return found


def _beside(copies: _Copies, kind: str, turns: int) -> dict[str, float]:
    times: dict[bool, list[float]] = {False: [], True: []}
    seconds, before_bytes = 0.0, copies.done_bytes
    for turn in range(2 * turns):
        beside = bool(turn % 2)
        (copies.on.set if beside else copies.on.clear)()
        start = time.perf_counter()
        times[beside].append(_step_seconds(kind))
        seconds += beside * (time.perf_counter() - start)
    copies.on.clear()
    pairs = zip(times[True], times[False], strict=True)
    return {
        "ratio": statistics.median(busy / idle for busy, idle in pairs),
        "step_ms": 1e3 * statistics.median(times[False]),
        "copy_gb_per_s": (copies.done_bytes - before_bytes) / seconds / 1e9,
    }


def _step_seconds(kind: str) -> float:
    size, count = _STEPS[kind]
    weights = [torch.randn(size, size) for _ in range(count)]
    hidden = torch.randn(8, size)
    seconds = []
    for _ in range(_STEPS_A_TURN[kind]):
        start = time.perf_counter()
        for weight in weights:
            hidden = torch.nn.functional.normalize(hidden @ weight)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])
