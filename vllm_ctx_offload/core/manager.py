"""The interface of offloading managers: the life cycle of chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Sequence
from typing import NamedTuple

from vllm_ctx_offload.context import ReqContext

__all__ = ["LookupResult", "OffloadingManager", "StoreGrant"]


class LookupResult(NamedTuple):
    """What a lookup found, from the first key on."""

    num_ready: int  # length of the leading run that can be loaded now
    pending: bool  # the run ends at a chunk that is being stored right now


class StoreGrant(NamedTuple):
    """The chunks of a chain that the caller now has to copy to the host."""

    indices: tuple[int, ...]  # into the keys that were offered, ascending
    slots: tuple[int, ...]  # where each of them goes
    num_rejected: int = 0  # absent keys that found no place
    reason: str | None = None  # why they found none


class OffloadingManager(ABC):
    """Life cycle of the offloaded chunks; every method takes the request's context.

    A chunk is absent, being stored, or ready. `prepare_store` makes it "being stored"
    and pinned, `complete_store` ready (or absent again). `prepare_load` pins ready
    chunks until `complete_load`. A pinned chunk is never evicted. Keys are opaque and
    unique per namespace; a list of keys is always one prefix chain, head first.

    Calls come from one thread. A failed call changes nothing. Completions may come
    after `on_request_finished`, and after `reset` or `remove` of their keys.
    """

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], req_context: ReqContext) -> LookupResult:
        """Returns the leading run of `keys` that is ready. Changes nothing."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes], req_context: ReqContext) -> None:
        """Marks the resident ones of `keys`, a chain from its head, as used now."""

    @abstractmethod
    def prepare_load(
        self, keys: Sequence[bytes], req_context: ReqContext
    ) -> tuple[int, ...]:
        """Pins `keys`, which the last lookup found ready; returns their slots.

        Raises:
            KeyError: one of them is not ready; none is pinned then.
        """

    @abstractmethod
    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Unpins keys that `prepare_load` pinned, once for each time."""

    @abstractmethod
    def prepare_store(
        self,
        keys: Sequence[bytes],
        req_context: ReqContext,
        *,
        holes: Container[int] = (),
    ) -> StoreGrant:
        """Makes room for the absent ones of `keys`, a chain from its head.

        `holes` are the places of keys that can't be stored now: none is granted.
        What finds no place is cut from the chain's tail. Counts as a use of the
        chain, whose own chunks are never evicted for it.
        """

    @abstractmethod
    def complete_store(
        self,
        keys: Collection[bytes],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        """Ends a store: the granted `keys` become ready, or absent if it failed."""

    @abstractmethod
    def remove(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Makes `keys` unfindable at once; pinned ones keep their slot until unpinned.

        For chunks whose content can't be trusted, such as after a failed load.
        """

    @abstractmethod
    def reset(self) -> None:
        """Removes every chunk, in the way of `remove`."""

    def on_new_request(self, req_context: ReqContext) -> None:
        """A request was added to the scheduler."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """A request ended; its stores and loads may still be under way."""
