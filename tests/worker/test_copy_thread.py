"""A copy thread keeps to itself: its cores, and its number of OpenMP threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_ctx_offload.worker import copy_thread, numa
from vllm_ctx_offload.worker.copy_thread import leave_the_models_cores, work_alone

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="no affinity on this system"
)


def in_thread(call: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_working_alone_changes_this_thread_and_no_other() -> None:
    before = torch.get_num_threads()

    def alone() -> tuple[bool, int]:
        return work_alone(), torch.get_num_threads()

    worked, count = in_thread(alone)  # type: ignore[misc]
    assert worked == (count == 1)
    assert torch.get_num_threads() == before
    # The default of threads to come is the model's.
    assert in_thread(torch.get_num_threads) == before


def test_without_an_openmp_library_it_says_that_it_is_not_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_thread, "_openmp_runtimes", list)
    before = torch.get_num_threads()
    assert in_thread(work_alone) == (before == 1)


@pytest.mark.parametrize("path", ["/nowhere/libgomp.so.1", None])
def test_a_library_that_cannot_be_asked_is_left_out(
    path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second one is loaded, but has no such function.
    libc = next(
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if "/libc.so" in line or "/libc-" in line or "ld-musl" in line
    )
    monkeypatch.setattr(copy_thread, "_openmp_runtimes", lambda: [path or libc])
    before = torch.get_num_threads()
    assert in_thread(work_alone) == (before == 1)


@needs_affinity
def test_a_thread_started_from_a_bound_one_leaves_its_core() -> None:
    cores = os.sched_getaffinity(0)

    def bound() -> object:
        os.sched_setaffinity(0, {min(cores)})

        def copy() -> set[int]:
            leave_the_models_cores()
            return os.sched_getaffinity(0)

        return in_thread(copy)

    assert in_thread(bound) == cores


def test_where_cores_are_not_known_the_thread_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(copy_thread, "process_cores", set)
    leave_the_models_cores()
    monkeypatch.setattr(copy_thread, "process_cores", lambda: {10_000})
    leave_the_models_cores()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two nodes of four cores, of which this process may use cores 1 to 6."""
    for node, cores in enumerate(["0-3", "4,5-7"]):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cores}\n", encoding="ascii")
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    monkeypatch.setattr(numa, "_PCI", tmp_path)
    monkeypatch.setattr(numa, "process_cores", lambda: {1, 2, 3, 4, 5, 6})
    return tmp_path


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({2}, (0, {1, 2, 3})),
        ({4, 6}, (1, {4, 5, 6})),
        ({3, 4}, (None, {1, 2, 3, 4, 5, 6})),
        ({99}, (None, {1, 2, 3, 4, 5, 6})),
    ],
)
@pytest.mark.usefixtures("machine")
def test_on_the_cpu_memory_is_near_where_the_thread_is_bound(
    own: set[int],
    expected: tuple[int | None, set[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda _: own, raising=False)
    assert numa.cores_near(torch.device("cpu")) == expected


class Properties:
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0x3B, 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1\n", (1, {4, 5, 6})),
        ("-1\n", (None, {1, 2, 3, 4, 5, 6})),  # the firmware does not say
        ("7\n", (None, {1, 2, 3, 4, 5, 6})),  # no such node
        (None, (None, {1, 2, 3, 4, 5, 6})),
    ],
)
def test_for_a_gpu_memory_is_near_its_slot(
    text: str | None,
    expected: tuple[int | None, set[int]],
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    if text is not None:
        slot = machine / "0000:3b:00.0"
        slot.mkdir()
        (slot / "numa_node").write_text(text, encoding="ascii")
    assert numa.cores_near(torch.device("cuda", 0)) == expected


def test_where_the_process_is_not_listed_no_core_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(*args: object) -> None:
        raise OSError("no such thing here")

    monkeypatch.setattr(numa.os, "sched_getaffinity", absent, raising=False)
    assert numa.process_cores() == set()
    assert numa.cores_near(torch.device("cpu")) == (None, set())
