"""Fixtures of the worker tests: both backends over any layout, on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from worker.fake_cuda import ImmediateCuda

from vllm_ctx_offload.worker.cpu_transfer import CpuTransfer
from vllm_ctx_offload.worker.cuda_transfer import CudaTransfer
from vllm_ctx_offload.worker.kv_layout import BlockLayout
from vllm_ctx_offload.worker.transfer import Transfer

MakeTransfer = Callable[[BlockLayout, torch.Tensor], Transfer]


@pytest.fixture(params=["cpu", "cuda"])
def make_transfer(request: pytest.FixtureRequest) -> Iterator[MakeTransfer]:
    """Makes a backend and closes it afterwards.

    The scratch of the CUDA one holds three blocks, so that jobs go in pieces.
    """
    made: list[Transfer] = []

    def make(layout: BlockLayout, pool: torch.Tensor) -> Transfer:
        if request.param == "cpu":
            made.append(CpuTransfer(layout, pool))
        else:
            scratch_bytes = 3 * layout.bytes_per_block
            made.append(
                CudaTransfer(
                    layout,
                    pool,
                    pinned=False,
                    cuda=ImmediateCuda(),
                    scratch_bytes=scratch_bytes,
                )
            )
        return made[-1]

    yield make
    for transfer in made:
        transfer.close()
