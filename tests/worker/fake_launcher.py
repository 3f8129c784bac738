"""Launching threads that a test drives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from worker.fake_cuda import FakeCuda, Host
from worker.happens_before import Clock, join


class LateLauncher:
    """A launching thread that comes to its calls when the test says so.

    Its accesses are an actor's of their own: they come after those of the model's
    thread up to the submission, not after later ones.
    """

    def __init__(self, gpu: FakeCuda, name: str, begin: Callable[[], None]) -> None:
        self._gpu = gpu
        self._host = Host(name)
        self._calls: deque[tuple[Callable[[], None], Clock]] = deque()
        self.closed = False
        begin()

    def start(self, call: Callable[[], None]) -> None:
        self._calls.append((call, dict(self._gpu.model.clock)))
        if self.closed:
            self.run(1)

    def run(self, count: int) -> None:
        """Makes up to so many of the calls."""
        for _ in range(min(count, len(self._calls))):
            call, clock = self._calls.popleft()
            join(self._host.clock, clock)
            with self._gpu.on(self._host):
                call()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.run(1)
        join(self._gpu.model.clock, self._host.clock)

    def close(self) -> None:
        self.run(len(self._calls))
        self.closed = True


class InlineLauncher:
    """Makes each call at once."""

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        begin()

    def start(self, call: Callable[[], None]) -> None:
        call()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        assert is_so()

    def close(self) -> None:
        pass
