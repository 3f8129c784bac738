"""The host memory that chunks are stored in."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import torch

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import available_memory, format_bytes

__all__ = ["HostPool"]

logger = logging.getLogger(__name__)

# One cudaHostRegister call on hundreds of GiB holds the driver's lock for minutes.
_PIN_PIECE_BYTES = 64 * 1024**3
_PORTABLE = 1  # cudaHostRegisterPortable


class HostPool:
    """A fixed number of rows, each the bytes of one block over all layers.

    Rows of one chunk are neighbours, so a chunk is one contiguous range. The memory is
    anonymous, so it goes away with the process, and touched here, so that it lies near
    this worker and a lack of it shows at the start.

    Attributes:
        rows: uint8 tensor [num_rows, bytes_per_row] on the CPU, zeroed.
        pinned: whether a CUDA device may copy to and from it asynchronously.
    """

    def __init__(self, num_rows: int, bytes_per_row: int, pin: bool) -> None:
        num_bytes = num_rows * bytes_per_row
        _check_memory(num_bytes)
        began = time.monotonic()
        # Not torch's pinned allocator: it rounds up to a power of two.
        self.rows = torch.empty((num_rows, bytes_per_row), dtype=torch.uint8)
        self.rows.fill_(0)
        self._pinned_pieces: list[int] = []
        self.pinned = pin and self._pin(num_bytes)
        logger.info(
            "Host pool of %s %s in %.1f s.",
            format_bytes(num_bytes),
            "pinned" if self.pinned else "ready",
            time.monotonic() - began,
        )

    def _pin(self, num_bytes: int) -> bool:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        base = self.rows.data_ptr()
        for start in range(0, num_bytes, _PIN_PIECE_BYTES):
            size = min(_PIN_PIECE_BYTES, num_bytes - start)
            error = int(cudart.cudaHostRegister(base + start, size, _PORTABLE))
            if error:
                logger.warning(
                    "Pinning host memory failed with CUDA error %d after %s: transfers "
                    "will be slower; raise the memlock limit (ulimit -l).",
                    error,
                    format_bytes(start),
                )
                self._unpin()
                _forget_cuda_error()
                return False
            self._pinned_pieces.append(base + start)
        return True

    def _unpin(self) -> None:
        if not self._pinned_pieces:
            return
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        while self._pinned_pieces:
            cudart.cudaHostUnregister(self._pinned_pieces.pop())

    def close(self) -> None:
        """Gives the memory back. No copy may be under way."""
        self._unpin()
        self.rows = self.rows.new_empty((0, 0))


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
