"""The memory plan: what the configuration means for one model on one engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vllm_ctx_offload.config import OffloadConfig, check_accounts
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import default_pool_bytes, format_bytes

__all__ = ["GroupShape", "ModelShape", "OffloadPlan", "resolve_plan"]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How far back the layers of one KV cache group look. At most one field is set."""

    window: int | None = None  # tokens that the next one attends to, itself included
    stretch: int | None = None  # attention begins anew every so many tokens

    @property
    def looks_at_all(self) -> bool:
        return self.window is None and self.stretch is None

    def first_needed(self, num_tokens: int) -> int:
        """Returns the first token whose KV is read when `num_tokens` are computed."""
        if self.window is not None:
            return max(num_tokens - self.window + 1, 0)
        if self.stretch is not None:
            return num_tokens // self.stretch * self.stretch
        return 0


_ONE_GROUP: Final = (GroupShape(),)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What vLLM decided about the KV cache of the model, for one engine."""

    tokens_per_block: int  # of one device block, over all ranks that split it
    tokens_per_hash: int  # covered by one block hash; divides tokens_per_block
    bytes_per_block: int  # on one worker, all layers
    num_device_blocks: int
    num_workers: int  # of one engine; each holds its part of every block
    num_engines: int = 1  # data-parallel engines that share this host's memory
    # Blocks of all groups come from one pool and are as large as each other.
    groups: tuple[GroupShape, ...] = _ONE_GROUP
    draft_lookahead: int = 0  # tokens after it that the KV of a token depends on


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """Sizes that the scheduler side and every worker agree on."""

    tokens_per_block: int
    blocks_per_chunk: int
    hashes_per_chunk: int
    bytes_per_block: int  # on one worker
    num_workers: int
    num_slots: int  # chunks that fit; the same on every worker
    groups: tuple[GroupShape, ...] = _ONE_GROUP
    draft_lookahead: int = 0  # tokens after it that the KV of a token depends on

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk

    @property
    def dropped_tokens(self) -> int:
        """The end of a hit that is not loaded: its drafts are another text's, maybe."""
        return self.tokens_per_block if self.draft_lookahead else 0

    @property
    def bytes_per_chunk(self) -> int:
        """Of one chunk over all workers."""
        return self.bytes_per_block * self.blocks_per_chunk * self.num_workers

    @property
    def num_rows(self) -> int:
        """Blocks that fit in one worker's pool."""
        return self.num_slots * self.blocks_per_chunk

    @property
    def bytes_per_worker(self) -> int:
        return self.num_rows * self.bytes_per_block

    @property
    def total_bytes(self) -> int:
        return self.bytes_per_worker * self.num_workers

    def describe(self, pin: bool) -> str:
        """Returns the plan as one line for the log; `pin`: whether workers try to."""
        num_tokens = self.num_slots * self.tokens_per_chunk // len(self.groups)
        groups = f" in {len(self.groups)} groups" if len(self.groups) > 1 else ""
        return (
            f"chunks of {self.tokens_per_chunk} tokens{groups} "
            f"({format_bytes(self.bytes_per_chunk)}), {self.num_slots} slots for "
            f"{num_tokens} tokens, "
            f"{format_bytes(self.bytes_per_worker)} of host memory on each of "
            f"{self.num_workers} worker(s), {format_bytes(self.total_bytes)} in all, "
            f"{'pinned' if pin else 'not pinned'}"
        )


def resolve_plan(config: OffloadConfig, shape: ModelShape) -> OffloadPlan:
    """Returns the memory plan of a configuration for a model.

    Raises:
        ConfigError: the chunk size does not fit the blocks, the pool holds no chunk,
            or the tenants' accounts do not fit the pool.
    """
    blocks_per_chunk = _blocks_per_chunk(config, shape.tokens_per_block)
    pool_bytes = config.cpu_bytes_to_use
    if pool_bytes is None:
        pool_bytes = default_pool_bytes() // shape.num_engines
    bytes_per_chunk = shape.bytes_per_block * blocks_per_chunk * shape.num_workers
    num_slots = pool_bytes // bytes_per_chunk
    if num_slots < 1:
        raise ConfigError(
            f"kv_connector_extra_config: cpu_bytes_to_use = {pool_bytes} bytes hold no "
            f"chunk, because one of {blocks_per_chunk} block(s) takes "
            f"{bytes_per_chunk} bytes over {shape.num_workers} worker(s); give at "
            "least that, and many times that to be of use."
        )
    check_accounts(config, pool_bytes, bytes_per_chunk)
    hashes_per_block = shape.tokens_per_block // shape.tokens_per_hash
    return OffloadPlan(
        tokens_per_block=shape.tokens_per_block,
        blocks_per_chunk=blocks_per_chunk,
        hashes_per_chunk=hashes_per_block * blocks_per_chunk,
        bytes_per_block=shape.bytes_per_block,
        num_workers=shape.num_workers,
        num_slots=num_slots,
        groups=shape.groups,
        draft_lookahead=shape.draft_lookahead,
    )


def _blocks_per_chunk(config: OffloadConfig, tokens_per_block: int) -> int:
    if config.block_size is None:
        return config.blocks_per_chunk or 1
    blocks, rest = divmod(config.block_size, tokens_per_block)
    if rest:
        raise ConfigError(
            f"kv_connector_extra_config: block_size = {config.block_size} tokens is no "
            f"multiple of the device's block of {tokens_per_block} tokens; use "
            f"{(blocks + 1) * tokens_per_block}, or blocks_per_chunk."
        )
    return blocks
