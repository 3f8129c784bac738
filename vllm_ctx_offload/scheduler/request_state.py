"""What the scheduler side knows of one request, and how that may change."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from vllm_ctx_offload.context import ReqContext
from vllm_ctx_offload.scheduler.chain import ChainShape

__all__ = [
    "NULL_BLOCK",
    "Lease",
    "LookupAnswer",
    "RequestOffloadState",
    "RequestReading",
    "RequestView",
    "Status",
    "make_key_prefix",
    "split_key",
]


class RequestView(Protocol):
    """The attributes of a vLLM request that decisions are made from; read only."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens that are known, without drafts or placeholders."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV was scheduled; runs ahead under async scheduling."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the full blocks of known tokens; may lag behind."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


class RequestReading(NamedTuple):
    """What a request says in another way from release to release."""

    make_context: Callable[[Any], ReqContext]
    skips_loads: Callable[[Any], bool]  # vLLM would not take what is loaded for it


class Status(enum.Enum):
    """Where a request is in its life, as far as its blocks are concerned."""

    WAITING = enum.auto()  # owns no block table that it computes into
    LOADING = enum.auto()  # owns blocks; a load job fills some of them
    RUNNING = enum.auto()  # owns blocks; was scheduled with them
    FINISHED = enum.auto()  # no state is kept; transfers may still be under way


_TRANSITIONS: Final[Mapping[Status, frozenset[Status]]] = {
    Status.WAITING: frozenset({Status.LOADING, Status.RUNNING, Status.FINISHED}),
    # LOADING to WAITING: the load ended, well or not.
    Status.LOADING: frozenset({Status.WAITING, Status.FINISHED}),
    # RUNNING to RUNNING: the next step, or preempted and resumed between two.
    Status.RUNNING: frozenset({Status.WAITING, Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class Lease(NamedTuple):
    """Chunks that a positive lookup answer pinned for the request."""

    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    places: tuple[int, ...]  # of the keys in the request's chain
    start_token: int  # the local hit: loading begins here, maybe inside a chunk
    num_tokens: int  # that were promised past it

    def is_on(
        self, keys: Sequence[bytes], num_local_tokens: int, num_tokens: int
    ) -> bool:
        """Whether it is on just what was found.

        While there are no free blocks, vLLM asks for the same request in every step.
        """
        return (
            self.start_token == num_local_tokens
            and self.num_tokens == num_tokens
            and self.keys[-1] == keys[self.places[-1]]
        )


class LookupAnswer(NamedTuple):
    """A lookup's figures, counted only once the request is admitted with them."""

    lookup_tokens: int
    hit_tokens: int
    skip_reason: str | None  # why nothing was looked up


@dataclass(slots=True)
class RequestOffloadState:
    """One live request."""

    request: RequestView
    req_context: ReqContext  # built once, when the request was first seen
    key_prefixes: tuple[bytes, ...]  # of each group: namespace and group, framed
    status: Status = Status.WAITING
    # Head first, in whole spans; see ChainShape.
    keys: list[bytes] = field(default_factory=list)
    # The block table of each group; NULL_BLOCK where its layers need none any more, and
    # wherever a recurrent one may still write.
    block_ids: list[list[int]] = field(default_factory=list)
    num_offered: int = 0  # spans when the chain was last offered
    # Tokens whose KV in the current blocks must not be stored: it was computed before
    # a reset of the cache.
    store_barrier: bool = False
    lease: Lease | None = None
    answer: LookupAnswer | None = None
    # Past which groups that look at everything can't go on from the last lookup.
    shared_tokens: int = 0
    load_job_id: int | None = None  # of the load that LOADING waits for
    loading_tokens: int = 0  # that it brings
    load_failed: bool = False  # since it last had no blocks; it is computed then
    stepped_back: bool = False  # after that failure; see LoadPlanner.lookup
    wait_began: float | None = None  # for a chunk being stored, since it was admitted
    waited_s: float | None = None  # how long, once it was answered
    # Figures of the receipt, in tokens.
    lookup_tokens: int = 0
    loaded_tokens: int = 0
    stored_tokens: int = 0
    rejected_tokens: int = 0
    rejected_reason: str | None = None

    def move_to(self, status: Status) -> None:
        """Changes the status. Raises AssertionError on an illegal transition."""
        assert status in _TRANSITIONS[self.status], f"{self.status} -> {status}"
        self.status = status

    def leave_blocks(self) -> None:
        """The running request was preempted: its blocks are others' from now on."""
        self.move_to(Status.WAITING)
        self.block_ids = []
        self.num_offered = 0
        self.store_barrier = False
        self.load_failed = self.stepped_back = False

    def chain(self, num_spans: int, shape: ChainShape) -> list[bytes]:
        """Returns the keys of the first spans, as many of `num_spans` as are hashed.

        The key of a chunk is the hash at its end: hashes are chained, so it stands for
        everything before it too.
        """
        hashes, per_span = self.request.block_hashes, shape.hashes_per_span
        num_spans = min(num_spans, len(hashes) // per_span)
        num_known = len(self.keys) // shape.keys_per_span
        if num_known and not self._is_current(hashes, num_known * per_span - 1):
            # A streaming-input session replaced tokens that were hashed already.
            self.keys = []
            self.num_offered = num_known = 0
        prefixes = self.key_prefixes
        for start in range(num_known * per_span, num_spans * per_span, per_span):
            self.keys.extend(
                [
                    prefixes[group] + hashes[start + offset]
                    for group, offset in shape.hash_columns
                ]
            )
        return self.keys[: num_spans * shape.keys_per_span]

    def _is_current(self, hashes: Sequence[bytes], end: int) -> bool:
        if end >= len(hashes):
            return False
        return self.keys[-1] == self.key_prefixes[-1] + hashes[end]


# vLLM's block 0 belongs to nobody; it stands where a table has a hole.
NULL_BLOCK: Final = 0


def make_key_prefix(namespace: bytes, group: int) -> bytes:
    """Returns the part of a key before the hash.

    Framed by length, so that no choice of names can make two prefixes alike.
    """
    return len(namespace).to_bytes(2, "big") + namespace + bytes([group])


def split_key(key: bytes) -> tuple[int, bytes]:
    """Returns the group and the block hash of a chunk's key."""
    start = 2 + int.from_bytes(key[:2], "big")
    return key[start], key[start + 1 :]
