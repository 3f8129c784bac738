"""The launching thread: order, waiting, the device it begins on, and its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from vllm_ctx_offload.worker.launcher import LaunchThread

PATIENCE_S = 60.0


class Driver:
    """Calls that take until they are let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.made: list[object] = []
        self.may = threading.Event()

    def begin(self) -> None:
        self.begun.append(threading.current_thread().name)

    def call(self, number: int) -> None:
        assert self.may.wait(PATIENCE_S)
        self.made.append((number, threading.current_thread().name))


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def launcher(driver: Driver) -> Iterator[LaunchThread]:
    made = LaunchThread("launching", driver.begin)
    yield made
    driver.may.set()
    made.close()
    made.close()
    assert driver.begun == ["launching"]


def test_calls_are_made_in_order_on_the_thread_and_nobody_waits(
    driver: Driver, launcher: LaunchThread
) -> None:
    for number in range(3):
        launcher.start(lambda number=number: driver.call(number))  # type: ignore[misc]
    assert driver.made == []
    driver.may.set()
    launcher.wait_until(lambda: len(driver.made) == 3)
    assert driver.made == [(number, "launching") for number in range(3)]


def test_what_is_so_already_is_not_waited_for(launcher: LaunchThread) -> None:
    launcher.wait_until(lambda: True)


def test_closing_makes_the_calls_that_were_given(
    driver: Driver, launcher: LaunchThread
) -> None:
    for number in range(3):
        launcher.start(lambda number=number: driver.call(number))  # type: ignore[misc]
    driver.may.set()
    launcher.close()
    assert len(driver.made) == 3


def test_after_the_end_a_call_is_made_at_once(
    driver: Driver, launcher: LaunchThread
) -> None:
    launcher.close()
    driver.may.set()
    launcher.start(lambda: driver.call(1))
    assert driver.made == [(1, threading.current_thread().name)]


def test_calls_can_write_caches_made_in_inference_mode(launcher: LaunchThread) -> None:
    with torch.inference_mode():
        cache = torch.zeros(4)
    launcher.start(lambda: cache.fill_(1))  # type: ignore[arg-type,return-value]
    launcher.close()
    assert bool(cache.all())
