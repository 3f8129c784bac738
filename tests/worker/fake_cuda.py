"""A device that runs what was enqueued late, in any order that the waits allow.

Tensors stay on the CPU. While a `FakeCuda` is active it holds back every operation
that writes a tensor and puts it in the queue of the current stream, as a GPU does; what
only makes views runs at once. `advance` then runs queued operations in an order that
the seed draws, so a missing wait shows up as wrong bytes for some seed. Beside that,
every operation is told to a `Checker`, which needs no luck.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worker.happens_before import Checker, Clock, Range, join

aten = torch.ops.aten


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
    return [tensor[number] for number in index.tolist()]


# What each operation that is held back reads and what it writes, of its arguments.
_ACCESSES: dict[Any, Callable[..., tuple[list[Any], list[Any]]]] = {
    aten.copy_.default: lambda to, source, *_, **__: ([source], [to]),
    aten.fill_.Scalar: lambda to, *_: ([], [to]),
    aten.index_copy_.default: lambda to, _, index, source: (
        [index, source],
        _rows(to, index),
    ),
    aten.index_select.out: lambda source, _, index, out: (
        [index, *_rows(source, index)],
        [out],
    ),
    aten._foreach_copy_.default: lambda to, source, *_: (list(source), list(to)),
}


class Moment:
    """One recording of an event."""

    def __init__(self, clock: Clock) -> None:
        self.passed = False
        self.clock = clock


class FakeStream:
    """A queue of operations, recordings and waits."""

    def __init__(self, name: str, gpu: FakeCuda, *, deaf: bool) -> None:
        self.name = name
        self.gpu = gpu
        self.queue: deque[Callable[[], None] | Moment | tuple[Moment]] = deque()
        self.deaf = deaf  # ignores waits, to show that they are needed
        self.clock: Clock = {}

    def wait_event(self, event: FakeEvent) -> None:
        if event.moment is not None and not self.deaf:
            self.queue.append((event.moment,))
            join(self.clock, event.moment.clock)

    def synchronize(self) -> None:
        self.gpu.num_synchronized += 1
        while self.queue:
            self.gpu.run_towards(self)
        join(self.gpu.host.clock, self.clock)

    @property
    def stuck(self) -> bool:
        """Whether its head waits for another stream."""
        head = self.queue[0]
        return isinstance(head, tuple) and not head[0].passed

    def tick(self) -> Clock:
        """Returns the clock of an operation that is enqueued now."""
        join(self.clock, self.gpu.host.clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return dict(self.clock)

    def run_one(self) -> None:
        item = self.queue.popleft()
        if isinstance(item, Moment):
            item.passed = True
        elif not isinstance(item, tuple):
            item()


class FakeEvent:
    """Stands for its last recording, as CUDA's events do."""

    gpu: FakeCuda

    def __init__(self, blocking: bool = False) -> None:
        self.moment: Moment | None = None
        self.gpu.num_events += 1

    def record(self, stream: FakeStream) -> None:
        self.moment = Moment(dict(stream.clock))
        stream.queue.append(self.moment)
        if self.gpu.eager:
            self.gpu.drain()

    def query(self) -> bool:
        if self.moment is None:
            return True
        if self.moment.passed:
            join(self.gpu.host.clock, self.moment.clock)
        return self.moment.passed

    def synchronize(self) -> None:
        # A launching thread may wait; the model's may not.
        self.gpu.num_synchronized += self.gpu.host is self.gpu.model
        if self.moment is not None:
            self.gpu.run_until(self.moment)
            join(self.gpu.host.clock, self.moment.clock)


class Host:
    """A thread of the host, as an actor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}

    def tick(self) -> Clock:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return dict(self.clock)


class FakeCuda(TorchDispatchMode):
    """Stands in for `torch.cuda`, and for the device behind it.

    Args:
        seed: of the order in which queued operations run.
        deaf: the name of a stream that ignores waits.
        granule: see `Checker`.
        eager: runs everything at once; what is left is the checker.
    """

    def __init__(
        self, seed: int, *, deaf: str = "", granule: int = 1, eager: bool = False
    ) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._deaf = deaf
        self.eager = eager
        self.checker = Checker(granule)
        self.Event = type("Event", (FakeEvent,), {"gpu": self})
        self.host = self.model = Host("model")
        self.compute = FakeStream("compute", self, deaf=deaf == "compute")
        self.streams = [self.compute]
        self._current = [self.compute]
        self._pins: list[Range] = []
        self.num_events = self.num_allocated = self.num_synchronized = 0
        self.most_queued = 0  # in a stream at once
        # Drawn once a device: a stream that is far slower than the others is the
        # likeliest to betray a missing wait.
        self._slow = self._rng.choice(["compute", "stores", "loads", "copies", ""])

    def set_device(self, device: object) -> None:
        pass

    def Stream(self, priority: int = 0) -> FakeStream:  # noqa: N802 - torch's name
        direction = "loads" if priority < 0 else "stores"
        # A lane makes the stream of its kernels first.
        seen = Counter(stream.name.split(":")[0] for stream in self.streams)
        name = f"{direction}:{'copies' if seen[direction] else 'kernels'}"
        stream = FakeStream(name, self, deaf=name == self._deaf)
        self.streams.append(stream)
        return stream

    def current_stream(self) -> FakeStream:
        return self._current[-1]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    @contextlib.contextmanager
    def on(self, host: Host) -> Iterator[None]:
        """Inside, another thread of the host acts."""
        before, self.host = self.host, host
        try:
            yield
        finally:
            self.host = before

    def on_host(
        self,
        what: str,
        *,
        reads: list[torch.Tensor] | None = None,
        writes: list[torch.Tensor] | None = None,
    ) -> None:
        """Tells what the current thread of the host reads and writes."""
        clock = self.host.tick()
        self.checker.access(
            what, self.host.name, clock, reads=reads or (), writes=writes or ()
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.num_allocated += func.overloadpacket.__name__.startswith("empty")
        if func not in _ACCESSES:
            return func(*args, **kwargs)
        self._refuse_spans(args)
        stream = self.current_stream()
        clock = stream.tick()
        what = f"{func.overloadpacket.__name__} on {stream.name}"

        def run() -> None:
            # Only now is the content of an index known.
            reads, writes = _ACCESSES[func](*args, **kwargs)
            self.checker.access(what, stream.name, clock, reads=reads, writes=writes)
            func(*args, **kwargs)

        # Host data that a pageable copy would have read by now is not modelled: the
        # code under test never changes a source after the call.
        stream.queue.append(run)
        self.most_queued = max(self.most_queued, len(stream.queue))
        if self.eager:
            self.drain()
        batched = func is aten._foreach_copy_.default
        return None if batched else kwargs.get("out", args[0])

    def pin(self, pool: torch.Tensor, rows_per_pin: int) -> None:
        """Pins some rows a call, as `HostPool` does."""
        self._pins += [
            (part.data_ptr(), part.data_ptr() + part.nbytes)
            for part in pool.split(rows_per_pin)
        ]

    def _refuse_spans(self, args: Any) -> None:
        """Fails as CUDA does for host memory that no single call has pinned."""
        for tensor in tree_leaves(args):
            if isinstance(tensor, torch.Tensor):
                start = tensor.data_ptr()
                for low, high in self._pins:
                    if low <= start < high < start + tensor.nbytes:
                        raise RuntimeError("CUDA error: invalid argument")

    def advance(self, num_steps: int) -> None:
        """Runs up to so many queued items, in an order that the waits allow."""
        with _switched_off():
            for _ in range(num_steps):
                ready = [s for s in self.streams if s.queue and not s.stuck]
                if not ready:
                    assert not any(s.queue for s in self.streams), "streams deadlock"
                    return
                quick = [s for s in ready if not self._slow or self._slow not in s.name]
                if quick and self._rng.random() < 0.95:
                    ready = quick
                self._rng.choice(ready).run_one()

    def run_towards(self, stream: FakeStream) -> None:
        """Runs one item of a stream, and before it only what that waits for."""
        with _switched_off():
            if not stream.stuck:
                stream.run_one()
                return
            (moment,) = stream.queue[0]  # type: ignore[misc]
            self.run_until(moment)

    def run_until(self, moment: Moment) -> None:
        """Runs what an event waits for, and no more of other streams than needed."""
        while not moment.passed:
            (source,) = (s for s in self.streams if moment in s.queue)
            self.run_towards(source)

    def drain(self) -> None:
        """Runs all that is queued."""
        while any(stream.queue for stream in self.streams):
            self.advance(1000)


@contextlib.contextmanager
def _switched_off() -> Iterator[None]:
    # In inference mode, as the code that enqueued the operations may have been.
    with torch.utils._python_dispatch._disable_current_modes(), torch.inference_mode():
        yield
