"""A device that runs what was enqueued late, in any order that the waits allow.

Tensors stay on the CPU. While a `FakeCuda` is active it holds back every operation
that writes a tensor and puts it in the queue of the current stream, as a GPU does; what
only makes views runs at once. `advance` then runs queued operations in an order that
the seed draws, so a missing wait shows up as wrong bytes for some seed.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_HELD_BACK = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.index_copy_.default,
    torch.ops.aten.index_select.out,
}


class Moment:
    """One recording of an event."""

    def __init__(self) -> None:
        self.passed = False


class FakeStream:
    """A queue of operations, recordings and waits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], None] | Moment | tuple[Moment]] = deque()
        self.gpu: FakeCuda
        self.deaf = False  # ignores waits, to show that they are needed

    def wait_event(self, event: FakeEvent) -> None:
        if event.moment is not None and not self.deaf:
            self.queue.append((event.moment,))

    def synchronize(self) -> None:
        while self.queue:
            self.gpu.run_towards(self)

    @property
    def stuck(self) -> bool:
        """Whether its head waits for another stream."""
        head = self.queue[0]
        return isinstance(head, tuple) and not head[0].passed

    def run_one(self) -> None:
        item = self.queue.popleft()
        if isinstance(item, Moment):
            item.passed = True
        elif not isinstance(item, tuple):
            item()


class FakeEvent:
    """Stands for its last recording, as CUDA's events do."""

    def __init__(self) -> None:
        self.moment: Moment | None = None

    def record(self, stream: FakeStream) -> None:
        self.moment = Moment()
        stream.queue.append(self.moment)

    def query(self) -> bool:
        return self.moment is None or self.moment.passed


class FakeCuda(TorchDispatchMode):
    """Stands in for `torch.cuda`, and for the device behind it."""

    Event = FakeEvent

    def __init__(self, seed: int, *, deaf: str = "") -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._deaf = deaf
        self.compute = self._made(FakeStream("compute"))
        self.streams = [self.compute]
        self._current = [self.compute]
        # Drawn once a device: a stream that is far slower than the others is the
        # likeliest to betray a missing wait.
        self._slow = self._rng.choice(["compute", "stores", "loads", ""])

    def _made(self, stream: FakeStream) -> FakeStream:
        stream.gpu = self
        stream.deaf = stream.name == self._deaf
        return stream

    def Stream(self, priority: int = 0) -> FakeStream:  # noqa: N802 - torch's name
        stream = self._made(FakeStream("loads" if priority < 0 else "stores"))
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

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HELD_BACK:
            return func(*args, **kwargs)
        # Host data that a pageable copy would have read by now is not modelled: the
        # code under test never changes a source after the call.
        self.current_stream().queue.append(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])

    def advance(self, num_steps: int) -> None:
        """Runs up to so many queued items, in an order that the waits allow."""
        with _switched_off():
            for _ in range(num_steps):
                ready = [s for s in self.streams if s.queue and not s.stuck]
                if not ready:
                    assert not any(s.queue for s in self.streams), "streams deadlock"
                    return
                quick = [s for s in ready if s.name != self._slow]
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
            (source,) = (s for s in self.streams if moment in s.queue)
            while not moment.passed:
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


class ImmediateCuda:
    """Stands in for `torch.cuda` where order is not the question: all runs at once."""

    class Event:
        """Has always passed."""

        def record(self, stream: object) -> None:
            pass

        def query(self) -> bool:
            return True

    class Stream:
        """Has nothing to wait for."""

        def __init__(self, priority: int = 0) -> None:
            self.priority = priority

        def wait_event(self, event: object) -> None:
            pass

        def synchronize(self) -> None:
            pass

    def __init__(self) -> None:
        self._stream = self.Stream()

    def current_stream(self) -> Stream:
        return self._stream

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
