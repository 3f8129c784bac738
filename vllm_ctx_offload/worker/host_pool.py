"""The host memory that chunks are stored in."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import available_memory, format_bytes
from vllm_ctx_offload.worker.numa import cores_near

__all__ = ["HostPool"]

logger = logging.getLogger(__name__)

# One cudaHostRegister call on hundreds of GiB holds the driver's lock for minutes, and
# from 512 GiB on some drivers refuse it.
_PIN_PIECE_BYTES = 64 * 1024**3
_PORTABLE = 1  # cudaHostRegisterPortable
# Touched by one call. With pages of 4 KiB and up it writes at most 16,384 elements, too
# few for torch to share them out to the model's threads.
_TOUCH_PIECE_BYTES: Final = 64 * 1024**2
_MAX_TOUCH_THREADS: Final = 16


class HostPool:
    """A fixed number of rows, each the bytes of one block over all layers.

    Rows of one chunk are neighbours, so a chunk is one contiguous range. The memory is
    anonymous, so it goes away with the process, in huge pages where the kernel has
    them, and touched here, from the worker's own NUMA node, so that it lies near and a
    lack of it shows at the start.

    Attributes:
        rows: uint8 tensor [num_rows, bytes_per_row] on the CPU, zeroed.
        pinned_rows: how many rows were pinned at once, so that a CUDA device may copy
            to and from them asynchronously; a copy may not span two such pieces. 0:
            the pool is not pinned.

    Raises:
        ConfigError: there is less memory than asked for.
    """

    def __init__(
        self, num_rows: int, bytes_per_row: int, device: torch.device | str = "cpu"
    ) -> None:
        device = torch.device(device)
        num_bytes = num_rows * bytes_per_row
        _check_memory(num_bytes)
        began = time.monotonic()
        self._memory = _map(num_bytes)
        self.rows = torch.frombuffer(self._memory, dtype=torch.uint8).view(
            num_rows, bytes_per_row
        )
        node, cores = cores_near(device)
        _touch(self.rows.view(-1), cores)
        touched = time.monotonic()
        self._pinned_pieces: list[int] = []
        self.pinned_rows = 0
        if device.type == "cuda":
            self._pin(num_bytes, _rows_per_pin(bytes_per_row))
        pinned = f"pinned in {time.monotonic() - touched:.1f} s"
        logger.info(
            "Host pool of %s on %s: touched in %.1f s, %s.",
            format_bytes(num_bytes),
            "any NUMA node" if node is None else f"NUMA node {node}",
            touched - began,
            pinned if self.pinned else "not pinned",
        )

    @property
    def pinned(self) -> bool:
        return self.pinned_rows > 0

    def _pin(self, num_bytes: int, rows_per_pin: int) -> None:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        base = self.rows.data_ptr()
        piece_bytes = rows_per_pin * self.rows.shape[1]
        for start in range(0, num_bytes, piece_bytes):
            size = min(piece_bytes, num_bytes - start)
            error = int(cudart.cudaHostRegister(base + start, size, _PORTABLE))
            if error:
                logger.warning(
                    "Pinning host memory failed with CUDA error %d after %s of %s, "
                    "with a memlock limit of %s: transfers will be slower; raise that "
                    "limit (ulimit -l, or --ulimit memlock=-1 of a container).",
                    error,
                    format_bytes(start),
                    format_bytes(num_bytes),
                    _memlock_limit(),
                )
                self._unpin()
                _forget_cuda_error()
                return
            self._pinned_pieces.append(base + start)
        self.pinned_rows = rows_per_pin

    def _unpin(self) -> None:
        if not self._pinned_pieces:
            return
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        while self._pinned_pieces:
            cudart.cudaHostUnregister(self._pinned_pieces.pop())

    def close(self) -> None:
        """Gives the memory back. No copy may be under way. May be called twice."""
        self._unpin()
        self.rows = self.rows.new_empty((0, 0))
        # Also if somebody still holds a view, such as a copy thread that hangs.
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)


def _map(num_bytes: int) -> mmap.mmap:
    """Returns private memory, zeroed by the kernel, of exactly this size.

    Not torch's pinned allocator: it rounds up to a power of two.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"kv_connector_extra_config: cpu_bytes_to_use asks for "
            f"{format_bytes(num_bytes)} on this worker, but the system refused it "
            f"({error.strerror}); lower cpu_bytes_to_use or raise the limit on address "
            "space (ulimit -v)."
        ) from error
    # A kernel without huge pages says so by an error.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Linux copies pinned pages for a child at once, which with all of the pool would
    # take minutes and as much memory again; no child needs it.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _rows_per_pin(bytes_per_row: int) -> int:
    """Returns how many rows to pin at once: whole rows that end with a page."""
    rows = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, bytes_per_row)
    return rows * max(_PIN_PIECE_BYTES // (rows * bytes_per_row), 1)


def _touch(memory: torch.Tensor, cores: Collection[int]) -> None:
    """Writes a byte of every page, from these cores, in parallel."""

    def bind() -> None:
        if cores:
            with contextlib.suppress(OSError, AttributeError):
                os.sched_setaffinity(0, cores)

    # Threads do not inherit the mode in which vLLM may have the worker made.
    @torch.inference_mode()
    def touch(start: int) -> None:
        memory[start : start + _TOUCH_PIECE_BYTES : mmap.PAGESIZE].zero_()

    num_threads = min(max(len(cores), 1), _MAX_TOUCH_THREADS)
    with ThreadPoolExecutor(num_threads, "ctx-offload-touch", bind) as threads:
        for _ in threads.map(touch, range(0, memory.numel(), _TOUCH_PIECE_BYTES)):
            pass


def _memlock_limit() -> str:
    try:
        import resource
    except ImportError:
        return "unknown size"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "no size" if limit == resource.RLIM_INFINITY else format_bytes(limit)


def _forget_cuda_error() -> None:
    """Takes the error that CUDA keeps of the failed call.

    Otherwise torch finds it after the next kernel it launches and blames that one.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _check_memory(num_bytes: int) -> None:
    available_bytes, source = available_memory()
    if num_bytes > available_bytes:
        raise ConfigError(
            f"kv_connector_extra_config: cpu_bytes_to_use asks for "
            f"{format_bytes(num_bytes)} on this worker, but {source} has only "
            f"{format_bytes(available_bytes)} left; lower cpu_bytes_to_use or raise "
            "that limit."
        )
