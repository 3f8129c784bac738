"""The memory plan: what the configuration means for one model on one engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_ctx_offload import __version__
from vllm_ctx_offload.config import OffloadConfig, fault_at
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import default_pool_bytes, format_bytes
from vllm_ctx_offload.messages import Terms, difference

__all__ = [
    "GroupShape",
    "ModelShape",
    "OffloadPlan",
    "check_accounts",
    "check_workers",
    "loads_fail_whole",
    "resolve_plan",
]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The blocks of one KV cache group, and how far back its layers look.

    At most one field but the first is set.
    """

    tokens_per_block: int  # over all ranks that split a block
    window: int | None = None  # tokens that the next one attends to, itself included
    stretch: int | None = None  # attention begins anew every so many tokens
    # The layers keep a state instead of tokens: a block holds the one at its end.
    recurrent: bool = False

    @property
    def looks_at_all(self) -> bool:
        return self.window is None and self.stretch is None and not self.recurrent

    def __str__(self) -> str:
        kind = "windowed" if self.window or self.stretch else "all"
        return f"{'recurrent' if self.recurrent else kind} {self.tokens_per_block}"

    def first_needed(self, num_tokens: int) -> int:
        """Returns the first token whose KV is read when `num_tokens` are computed."""
        if self.recurrent:
            return max(num_tokens - 1, 0)
        if self.window is not None:
            return max(num_tokens - self.window + 1, 0)
        if self.stretch is not None:
            return num_tokens // self.stretch * self.stretch
        return 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What vLLM decided about the KV cache of the model, for one engine."""

    # Blocks of all groups come from one pool and are as many bytes as each other.
    groups: tuple[GroupShape, ...]
    tokens_per_hash: int  # covered by one block hash; divides every group's block
    bytes_per_block: int  # on one worker, all layers
    num_device_blocks: int
    num_workers: int  # of one engine; each holds its part of every block
    num_engines: int = 1  # data-parallel engines that share this host's memory
    # vLLM writes to new blocks before the worker's hooks are called in a step.
    writes_early: bool = False
    draft_lookahead: int = 0  # tokens after it that the KV of a token depends on
    max_request_tokens: int | None = None  # of prompt and answer; None: not known
    drafts_in_hash: bool = False  # a block's hash covers those tokens too


# Without slots, so that what every step asks for is worked out once.
@dataclass(frozen=True)
class OffloadPlan:
    """Sizes that the scheduler side and every worker agree on.

    A chunk is `blocks_per_chunk` blocks of one group, so chunks of different groups may
    hold different numbers of tokens. A *span* is the fewest tokens after which chunks
    of all groups end: hits end there, and chains are made of whole spans.
    """

    groups: tuple[GroupShape, ...]
    blocks_per_chunk: int
    tokens_per_hash: int
    bytes_per_block: int  # on one worker
    num_workers: int
    num_slots: int  # chunks that fit; the same on every worker
    writes_early: bool = False  # see ModelShape
    draft_lookahead: int = 0  # see ModelShape
    drafts_in_hash: bool = False  # see ModelShape

    def tokens_per_chunk(self, group: int) -> int:
        return self.groups[group].tokens_per_block * self.blocks_per_chunk

    @cached_property
    def tokens_per_span(self) -> int:
        return _scheduler_block(self.groups) * self.blocks_per_chunk

    @cached_property
    def chunks_per_span(self) -> tuple[int, ...]:
        """Of each group."""
        span = _scheduler_block(self.groups)
        return tuple(span // group.tokens_per_block for group in self.groups)

    @cached_property
    def dropped_tokens(self) -> int:
        """The end of a hit that is not loaded: its drafts are another text's, maybe.

        A block, as in vLLM. But where a group may lack the begin of a chunk, only the
        end of one will do.
        """
        if not self.draft_lookahead or self.drafts_in_hash:
            return 0
        if all(group.looks_at_all for group in self.groups):
            return _scheduler_block(self.groups)
        return self.tokens_per_span

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

    @property
    def loads_fail_whole(self) -> bool:
        """See the function."""
        return loads_fail_whole(self.groups)

    @cached_property
    def terms(self) -> Terms:
        """What a worker goes by, to be compared before anything is copied."""
        return {
            "release": __version__,
            "num_slots": self.num_slots,
            "blocks_per_chunk": self.blocks_per_chunk,
            "bytes_per_block": self.bytes_per_block,
            "num_workers": self.num_workers,
            "groups": ", ".join(map(str, self.groups)),
            "writes_early": self.writes_early,
        }

    def worth_in_tokens(self, num_chunks: int) -> int:
        """Returns the tokens that chunks of all groups together stand for."""
        return num_chunks * self.tokens_per_span // sum(self.chunks_per_span)

    def describe(self, pin: bool) -> str:
        """Returns the plan as one line for the log; `pin`: whether workers try to."""
        sizes = {self.tokens_per_chunk(group) for group in range(len(self.groups))}
        groups = f" in {len(self.groups)} groups" if len(self.groups) > 1 else ""
        return (
            f"chunks of {' or '.join(map(str, sorted(sizes)))} tokens{groups} "
            f"({format_bytes(self.bytes_per_chunk)}), {self.num_slots} slots for "
            f"{self.worth_in_tokens(self.num_slots)} tokens, "
            f"{format_bytes(self.bytes_per_worker)} of host memory on each of "
            f"{self.num_workers} worker(s), {format_bytes(self.total_bytes)} in all, "
            f"{'pinned' if pin else 'not pinned'}"
        )


def loads_fail_whole(groups: Sequence[GroupShape]) -> bool:
    """Whether there is no going on from the first block that a load did not bring.

    Tables of several groups have no such block in common, and before that of a window
    or a state there may be none.
    """
    return len(groups) > 1 or not groups[0].looks_at_all


def _scheduler_block(groups: tuple[GroupShape, ...]) -> int:
    """Returns the tokens after which blocks of all groups end, as vLLM calls them."""
    return math.lcm(*(group.tokens_per_block for group in groups))


def resolve_plan(config: OffloadConfig, shape: ModelShape) -> OffloadPlan:
    """Returns the memory plan of a configuration for a model.

    Raises:
        ConfigError: the chunk size does not fit the blocks, the pool holds no chunk,
            or the tenants' accounts do not fit the pool.
    """
    blocks_per_chunk = _blocks_per_chunk(config, _scheduler_block(shape.groups))
    _check_chunk_fills(config, shape, blocks_per_chunk)
    pool_bytes = config.cpu_bytes_to_use
    if pool_bytes is None:
        pool_bytes = default_pool_bytes() // shape.num_engines
    bytes_per_chunk = shape.bytes_per_block * blocks_per_chunk * shape.num_workers
    num_slots = pool_bytes // bytes_per_chunk
    if num_slots < 1:
        raise ConfigError(
            f"kv_connector_extra_config: cpu_bytes_to_use = {format_bytes(pool_bytes)} "
            f"holds no chunk, because one of {blocks_per_chunk} block(s) takes "
            f"{format_bytes(bytes_per_chunk)} over {shape.num_workers} worker(s); give "
            f"at least {bytes_per_chunk} bytes, and many times that to be of use."
        )
    check_accounts(config, pool_bytes, bytes_per_chunk)
    return OffloadPlan(
        groups=shape.groups,
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_hash=shape.tokens_per_hash,
        bytes_per_block=shape.bytes_per_block,
        num_workers=shape.num_workers,
        num_slots=num_slots,
        writes_early=shape.writes_early,
        draft_lookahead=shape.draft_lookahead,
        drafts_in_hash=shape.drafts_in_hash,
    )


def check_workers(plan: OffloadPlan, workers: Mapping[int, Terms]) -> None:
    """Checks that all workers, by their rank, came to the scheduler side's plan.

    Raises:
        ConfigError: naming the first that did not, and what differs.
    """
    for rank, terms in sorted(workers.items()):
        if found := difference(plan.terms, terms):
            raise ConfigError(
                f"CtxOffloadConnector: worker {rank} has another plan ({found}); set "
                "cpu_bytes_to_use, whose default is a share of each host's memory, "
                "and give all hosts the same configuration and the same release of "
                "vllm-ctx-offload."
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


def _check_chunk_fills(
    config: OffloadConfig, shape: ModelShape, blocks_per_chunk: int
) -> None:
    """A chunk longer than any request would never be stored, without a word."""
    tokens = _scheduler_block(shape.groups) * blocks_per_chunk
    most = shape.max_request_tokens
    if blocks_per_chunk > 1 and most is not None and tokens > most:
        key = "block_size" if config.blocks_per_chunk is None else "blocks_per_chunk"
        raise ConfigError(
            f"kv_connector_extra_config: {key} = {getattr(config, key)} makes chunks "
            f"of {tokens} tokens, but no request is longer than {most} "
            "(--max-model-len), so none would ever be stored; lower it."
        )


def check_accounts(config: OffloadConfig, pool_bytes: int, chunk_bytes: int) -> None:
    """Checks sizes that are parts of the pool against one of `pool_bytes`.

    What was asked for is never rounded to nothing.

    Raises:
        ConfigError: naming the key or the tenant, the values and the fix.
    """
    # Accounts count whole chunks, so a share is one of the whole chunks that fit.
    usable_bytes = pool_bytes - pool_bytes % chunk_bytes
    _check_max_protected(config, usable_bytes, chunk_bytes)
    for name, tenant in config.tenants.items():
        reserved = tenant.reserved.resolve(usable_bytes)
        if reserved < chunk_bytes and not tenant.reserved.is_nothing:
            text = (
                f"tenant '{name}' has reserved = {format_bytes(reserved)}, "
                f"{format_bytes(chunk_bytes - reserved)} below one chunk, so nothing "
                "would be reserved; raise it, or leave it out."
            )
            raise fault_at(config, "tenants", text)
        if tenant.limit is None:
            continue
        limit = tenant.limit.resolve(usable_bytes)
        text = f"tenant '{name}' has limit = {format_bytes(limit)}, "
        if limit < reserved:
            text += (
                f"{format_bytes(reserved - limit)} below its reservation; raise the "
                "limit or lower the reservation."
            )
            raise fault_at(config, "tenants", text)
        if limit < chunk_bytes and tenant.store:
            text += (
                f"{format_bytes(chunk_bytes - limit)} below one chunk; raise it, or "
                "set store to false."
            )
            raise fault_at(config, "tenants", text)
    sizes = {n: t.reserved.resolve(pool_bytes) for n, t in config.tenants.items()}
    if (excess := sum(sizes.values()) - pool_bytes) > 0:
        name = max(sizes, key=sizes.__getitem__)
        text = (
            f"the tenants reserve {format_bytes(excess)} more than the pool's "
            f"{format_bytes(pool_bytes)}, '{name}' the most with "
            f"{format_bytes(sizes[name])}; lower them or raise cpu_bytes_to_use."
        )
        raise fault_at(config, "tenants", text)


def _check_max_protected(
    config: OffloadConfig, usable_bytes: int, chunk_bytes: int
) -> None:
    """The default is nobody's wish: of a pool of three chunks it protects none."""
    share = config.max_protected
    protected = share.resolve(usable_bytes)
    was_given = "max_protected" in config.model_fields_set
    if was_given and protected < chunk_bytes and not share.is_nothing:
        text = (
            f"max_protected = {format_bytes(protected)} of this pool, "
            f"{format_bytes(chunk_bytes - protected)} below one chunk, so nothing "
            'could be protected; raise it, or give "0%".'
        )
        raise fault_at(config, "max_protected", text)
