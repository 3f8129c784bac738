"""Finds accesses to the same bytes that no wait orders, whatever order they ran in.

Every stream, and every thread of the host, is an actor with a vector clock. An access
is told with the clock that its actor had when it was enqueued. Two accesses of which
one writes have to be ordered: the later one's clock has to know of the earlier one.
So one schedule is enough to see a missing wait on its path, where a comparison of bytes
needs the unlucky one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

import torch

Clock = dict[str, int]
# An address range, in granules.
Range = tuple[int, int]


class HazardError(BaseException):
    """Two accesses to the same bytes that nothing orders.

    No `Exception`, which the code under test would take for a failed copy.
    """


def join(clock: Clock, other: Clock) -> None:
    """Lets a clock know all that another one knows."""
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time


class Checker:
    """The last accesses to every granule of the watched memory.

    `granule` divides the address and the length of every access.
    """

    def __init__(self, granule: int = 1) -> None:
        self._granule = granule
        self._watched: list[Range] = []
        self._written: dict[int, tuple[str, int, str]] = {}
        self._read: dict[int, dict[str, tuple[int, str]]] = {}
        self.num_accesses = 0

    def watch(self, *tensors: torch.Tensor) -> None:
        """Adds memory; other memory may be freed and reused, so it is left out."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start = storage.data_ptr() // self._granule
            end = -(-(storage.data_ptr() + storage.nbytes()) // self._granule)
            self._watched.append((start, end))

    def access(
        self,
        what: str,
        actor: str,
        clock: Clock,
        *,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
    ) -> None:
        """Checks an access against all before it; `clock` is the actor's at its start.

        Accesses are told in an order that the waits allow.
        """
        self.num_accesses += 1
        time = clock.get(actor, 0)
        for granule in self._granules(reads):
            self._after_write(granule, clock, what)
            self._read.setdefault(granule, {})[actor] = (time, what)
        for granule in self._granules(writes):
            self._after_write(granule, clock, what)
            for reader, (read_at, by) in self._read.pop(granule, {}).items():
                if clock.get(reader, 0) < read_at:
                    self._found(f"{what} overwrites what {by} may still read")
            self._written[granule] = (actor, time, what)

    def _after_write(self, granule: int, clock: Clock, what: str) -> None:
        writer, written_at, by = self._written.get(granule, ("", 0, ""))
        if clock.get(writer, 0) < written_at:
            self._found(f"{what} meets what {by} may still write")

    def _found(self, message: str) -> NoReturn:
        raise HazardError(message)

    def _granules(self, tensors: Iterable[torch.Tensor]) -> Iterator[int]:
        for tensor in tensors:
            for start, end in _ranges(tensor):
                first, last = start // self._granule, -(-end // self._granule)
                if any(low <= first < high for low, high in self._watched):
                    yield from range(first, last)


def _ranges(tensor: torch.Tensor) -> Iterator[Range]:
    """Yields the byte ranges of a tensor of any strides."""
    if tensor.is_contiguous():
        yield tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    elif tensor.dim() == 1:
        size = tensor.element_size()
        for index in range(tensor.shape[0]):
            address = tensor.data_ptr() + index * tensor.stride(0) * size
            yield address, address + size
    else:
        for part in tensor.unbind(0):
            yield from _ranges(part)
