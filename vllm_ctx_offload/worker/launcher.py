"""Where the launches of a direction run: on a thread beside the model's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["LaunchThread", "Launcher"]


class Launcher(Protocol):
    """Makes calls one after the other, in the order in which they were given."""

    def start(self, call: Callable[[], None]) -> None:
        """Has the call made; it must not raise. After `close`: at once, here."""

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Returns when `is_so`, which a call given before brings about."""

    def close(self) -> None:
        """Returns when all calls have been made. May be called twice."""


class LaunchThread:
    """A launcher with a thread of its own.

    A job of thousands of blocks takes thousands of launches, and a launch waits while
    the driver's queue is full; the model's thread has to do with neither.
    """

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        """`begin` is called first, on the thread."""
        self._begin = begin
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = False
        # A daemon: a driver that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], None]) -> None:
        with self._changed:
            if not self._closing:
                self._calls.append(call)
                self._changed.notify_all()
                return
        self._thread.join()
        call()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(is_so)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # The thread does not inherit the mode in which vLLM may have made the caches, and
    # outside of it such tensors cannot be written. Others can be inside it.
    @torch.inference_mode()
    def _run(self) -> None:
        self._begin()
        while (call := self._next()) is not None:
            call()
            with self._changed:
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or bool(self._calls))
            return self._calls.popleft() if self._calls else None
