"""Proves at the start that blocks come back from the host as they left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import torch

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker.kv_layout import block_axis
from vllm_ctx_offload.worker.transfer import JobResult, Transfer

__all__ = ["prove_layout"]

# Job ids of the scheduler start at 0.
_STORE_ID: Final = -2
_LOAD_ID: Final = -1
_WAIT_S: Final = 30.0


# vLLM may have made the caches in this mode, and outside of it they cannot be written.
@torch.inference_mode()
def prove_layout(
    transfer: Transfer, kv_caches: Mapping[str, torch.Tensor], num_blocks: int
) -> None:
    """Sends one block to the host and back into another, and compares them.

    The comparison reads the tensors along their block dimension, as the model does, so
    it does not trust the byte ranges that it checks. The blocks used are restored.

    Raises:
        ConfigError: a layer's block came back changed, or another block was touched.
    """
    if num_blocks < 4:
        return
    source, target, witness = num_blocks - 1, num_blocks - 2, 0
    caches = {name: _Blocks(name, t, num_blocks) for name, t in kv_caches.items()}
    saved = {
        name: [blocks[i].clone() for i in (source, target, witness)]
        for name, blocks in caches.items()
    }
    for seed, blocks in enumerate(caches.values()):
        blocks.fill(source, seed)
    _run(transfer, TransferJob(_STORE_ID, "", (source,), (0,)), to_host=True)
    _run(transfer, TransferJob(_LOAD_ID, "", (target,), (0,)), to_host=False)
    wrong = [
        name
        for name, blocks in caches.items()
        if not _equal(blocks[source], blocks[target])
        or not _equal(blocks[witness], saved[name][2])
    ]
    for name, blocks in caches.items():
        for index, content in zip((source, target, witness), saved[name], strict=True):
            blocks[index].copy_(content)
    if wrong:
        raise ConfigError(
            f"CtxOffloadConnector: a block of layer '{wrong[0]}' did not survive the "
            "way to the host and back, so its memory layout is not understood; please "
            "report this model, and serve it without the connector until then."
        )


class _Blocks:
    """The blocks of one layer, by index."""

    def __init__(self, name: str, tensor: torch.Tensor, num_blocks: int) -> None:
        self._tensor = tensor
        self._axis = block_axis(name, tensor, num_blocks)
        self._per_block = tensor.shape[self._axis] // num_blocks

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._per_block
        return self._tensor.narrow(self._axis, start, self._per_block)

    def fill(self, index: int, seed: int) -> None:
        block = self[index]
        generator = torch.Generator().manual_seed(seed)
        # 0 to 100 is exact in every type that a cache can have, fp8 included, up to
        # rounding that source and target share.
        values = torch.randint(0, 101, block.shape, generator=generator)
        block.copy_(values.to(torch.float32).to(block.dtype))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # As bytes: unused blocks may hold NaN, and not every dtype of a cache compares.
    return torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(block: torch.Tensor) -> torch.Tensor:
    return block.contiguous().flatten().view(torch.uint8)


def _run(transfer: Transfer, job: TransferJob, *, to_host: bool) -> None:
    transfer.submit(job, to_host=to_host)
    results: list[JobResult] = []
    deadline = time.monotonic() + _WAIT_S
    while not results and time.monotonic() < deadline:
        results = transfer.poll(_WAIT_S)
    if not results or not results[0].ok:
        raise ConfigError(
            "CtxOffloadConnector: the first copy between the KV cache and host memory "
            f"failed or took over {_WAIT_S:.0f} s (an error is logged above); serve "
            "without the connector."
        )
