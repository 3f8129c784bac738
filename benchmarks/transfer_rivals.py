"""What the transfers are compared with: the limit, the naive way, and vLLM's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.kv_layout import BlockLayout
from vllm_ctx_offload.worker.transfer import Transfer

__all__ = [
    "Naive",
    "NullCuda",
    "Ours",
    "Plain",
    "Rival",
    "make_job",
    "vllm_rivals",
]


class Rival(Protocol):
    """A way to move the blocks of a job."""

    def run(self, job: TransferJob, directions: Sequence[bool]) -> None:
        """Returns when the job is done in each direction; True is to the host."""

    def close(self) -> None: ...


def make_job(layout: BlockLayout, num_rows: int, count: int, ids: str) -> TransferJob:
    """Returns a job of so many blocks; the same for the same arguments."""
    rand = random.Random(count)
    if ids == "runs":
        return TransferJob(0, "", tuple(range(count)), tuple(range(count)))
    blocks = rand.sample(range(layout.num_blocks), count)
    slots = list(range(0, num_rows, 64))
    rand.shuffle(slots)
    rows = [row for slot in slots for row in range(slot, min(slot + 64, num_rows))]
    return TransferJob(0, "", tuple(blocks), tuple(rows[:count]))


class Ours:
    """A backend as the worker drives it: submit, then poll."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def run(self, job: TransferJob, directions: Sequence[bool]) -> None:
        """Returns when the job is done in each direction."""
        for to_host in directions:
            self._transfer.submit(job, to_host=to_host)
        num_open = len(directions)
        while num_open:
            results = self._transfer.poll(10.0)
            assert all(result.ok for result in results)
            num_open -= len(results)

    def close(self) -> None:
        self._transfer.close()


class _OnStreams:
    """Runs `copy` on a stream for each direction; on the CPU `copy` alone is used."""

    def __init__(self, layout: BlockLayout, pool: torch.Tensor) -> None:
        self._layout = layout
        self._pool = pool
        self._streams: dict[bool, Any] = {}
        if layout.device.type == "cuda":
            self._streams = {way: torch.cuda.Stream() for way in (True, False)}

    def copy(
        self, block_ids: Sequence[int], rows: Sequence[int], *, to_host: bool
    ) -> None:
        raise NotImplementedError

    def run(self, job: TransferJob, directions: Sequence[bool]) -> None:
        for to_host in directions:
            with torch.cuda.stream(self._streams[to_host]):
                self.copy(job.block_ids, job.rows, to_host=to_host)
        for to_host in directions:
            self._streams[to_host].synchronize()

    def close(self) -> None:
        pass


class Plain(_OnStreams):
    """The limit: one contiguous copy of as many bytes, from and to like memory."""

    def __init__(self, layout: BlockLayout, pool: torch.Tensor) -> None:
        super().__init__(layout, pool)
        most = pool.numel() // 2
        self._on_device = torch.zeros(most, dtype=torch.uint8, device=layout.device)
        # Each direction has memory of its own, of the pool itself.
        self._on_host = pool.view(-1)

    def copy(
        self, block_ids: Sequence[int], rows: Sequence[int], *, to_host: bool
    ) -> None:
        num_bytes = len(rows) * self._layout.bytes_per_block
        on_device = self._on_device[:num_bytes]
        on_host = self._on_host[-num_bytes:] if to_host else self._on_host[:num_bytes]
        target, source = (on_host, on_device) if to_host else (on_device, on_host)
        target.copy_(source, non_blocking=True)


class Naive(_OnStreams):
    """A copy for each block and layer."""

    def copy(
        self, block_ids: Sequence[int], rows: Sequence[int], *, to_host: bool
    ) -> None:
        for segment in self._layout.segments:
            end = segment.offset + segment.num_bytes
            host = self._pool[:, segment.offset : end].view(self._layout.word)
            for block, row in zip(block_ids, rows, strict=True):
                ends = (host[row], segment.view[block])
                target, source = ends if to_host else ends[::-1]
                target.copy_(source, non_blocking=True)


class _SwapBlocks(_OnStreams):
    """vLLM's kernel for this, with a pool for each layer, as it wants it."""

    def __init__(
        self, layout: BlockLayout, pool: torch.Tensor, swap: Callable[..., None]
    ) -> None:
        super().__init__(layout, pool)
        self._swap = swap
        flat, rows = pool.view(-1), pool.shape[0]
        self._hosts = [
            flat[s.offset * rows : (s.offset + s.num_bytes) * rows].view(rows, -1)
            for s in layout.segments
        ]

    def copy(
        self, block_ids: Sequence[int], rows: Sequence[int], *, to_host: bool
    ) -> None:
        ids = (block_ids, rows) if to_host else (rows, block_ids)
        mapping = torch.tensor(list(zip(*ids, strict=True)), dtype=torch.int64)
        for segment, host in zip(self._layout.segments, self._hosts, strict=True):
            device = segment.view.view(torch.uint8)
            ends = (device, host) if to_host else (host, device)
            self._swap(*ends, segment.num_bytes, mapping)


class _SwapBlocksBatch(_OnStreams):
    """vLLM's call that hands the driver all copies at once, which it offloads with."""

    def __init__(
        self, layout: BlockLayout, pool: torch.Tensor, swap: Callable[..., None]
    ) -> None:
        super().__init__(layout, pool)
        self._swap = swap
        self._starts = torch.tensor(
            [[s.view.data_ptr(), pool.data_ptr() + s.offset] for s in layout.segments]
        ).unsqueeze(2)
        self._steps = torch.tensor(
            [[s.view.stride(0) * s.view.element_size()] for s in layout.segments]
        )
        self._sizes = torch.tensor([[s.num_bytes] for s in layout.segments])

    def copy(
        self, block_ids: Sequence[int], rows: Sequence[int], *, to_host: bool
    ) -> None:
        blocks, places = torch.tensor(block_ids), torch.tensor(rows)
        device = (self._starts[:, 0] + blocks * self._steps).flatten()
        host = (self._starts[:, 1] + places * self._pool.stride(0)).flatten()
        sizes = self._sizes.expand(-1, len(rows)).flatten()
        self._swap(*((device, host) if to_host else (host, device)), sizes)


def vllm_rivals(layout: BlockLayout, pool: torch.Tensor) -> dict[str, Rival]:
    """Returns vLLM's own ways, by name; those that this installation has."""
    found: dict[str, Rival] = {}
    kinds = {"swap_blocks": _SwapBlocks, "swap_blocks_batch": _SwapBlocksBatch}
    for name, kind in kinds.items():
        try:
            from vllm import _custom_ops

            rival = kind(layout, pool, getattr(_custom_ops, name))
            rival.run(TransferJob(0, "", (0,), (0,)), (True, False))
            found[name] = rival
        except Exception as error:  # noqa: BLE001 - its arguments differ by release
            print(f"no {name} to compare with: {error!r}")
    return found


class NullCuda:
    """Stands in for `torch.cuda` with streams and events that do nothing."""

    class Event:
        """Has always passed."""

        def __init__(self, blocking: bool = False) -> None:
            self.blocking = blocking

        def record(self, stream: object) -> None:
            """Does nothing."""

        def synchronize(self) -> None:
            """Does nothing."""

        def query(self) -> bool:
            """Returns True."""
            return True

    class Stream:
        """Has nothing to wait for."""

        def __init__(self, priority: int = 0) -> None:
            self.priority = priority

        def wait_event(self, event: object) -> None:
            """Does nothing."""

        def synchronize(self) -> None:
            """Does nothing."""

    def __init__(self) -> None:
        self._stream = self.Stream()

    def set_device(self, device: object) -> None:
        """Does nothing."""

    def current_stream(self) -> Stream:
        """Returns the one stream."""
        return self._stream

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        """Returns a context that does nothing."""
        return contextlib.nullcontext()
