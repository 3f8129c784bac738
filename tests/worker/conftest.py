"""Fixtures of the worker tests: both backends over any layout, on CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from worker.fake_cuda import FakeCuda
from worker.fake_launcher import InlineLauncher

from vllm_ctx_offload.worker.cpu_transfer import CpuTransfer
from vllm_ctx_offload.worker.cuda_transfer import CudaTransfer, DeviceTerms
from vllm_ctx_offload.worker.kv_layout import BlockLayout
from vllm_ctx_offload.worker.paths import Path
from vllm_ctx_offload.worker.transfer import Transfer

MakeTransfer = Callable[[BlockLayout, torch.Tensor], Transfer]


@pytest.fixture(params=["cpu", "staged", "direct"])
def make_transfer(request: pytest.FixtureRequest) -> Iterator[MakeTransfer]:
    """Makes a backend and closes it afterwards.

    That of CUDA by each of its paths, on a device that checks what orders every access.
    Each half of its scratch holds two blocks, so that jobs go in pieces.
    """
    with contextlib.ExitStack() as stack:

        def make(layout: BlockLayout, pool: torch.Tensor) -> Transfer:
            transfer: Transfer
            if request.param == "cpu":
                transfer = CpuTransfer(layout, pool)
            else:
                transfer = checked_cuda(layout, pool, Path(request.param), stack)
            stack.callback(transfer.close)
            return transfer

        yield make


def checked_cuda(
    layout: BlockLayout,
    pool: torch.Tensor,
    path: Path,
    stack: contextlib.ExitStack,
) -> CudaTransfer:
    gpu = FakeCuda(0, granule=layout.word.itemsize, eager=True)
    terms = DeviceTerms(gpu, 0, 4 * layout.bytes_per_block, path)
    transfer = CudaTransfer(layout, pool, terms, InlineLauncher)
    gpu.checker.watch(pool, *(segment.view for segment in layout.segments))
    for lane in (transfer._stores, transfer._loads):
        gpu.checker.watch(*(half.scratch for half in lane._halves))

    def has_checked() -> None:
        assert gpu.checker.num_accesses > 0

    stack.callback(has_checked)
    stack.enter_context(gpu)
    return transfer
