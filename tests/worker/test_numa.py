"""A copy thread leaves the model's core, and memory is near the cores that use it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_ctx_offload.worker import numa
from vllm_ctx_offload.worker.numa import leave_the_models_cores

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="no affinity on this system"
)


def in_thread(call: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


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
    monkeypatch.setattr(numa, "process_cores", set)
    leave_the_models_cores()
    monkeypatch.setattr(numa, "process_cores", lambda: {10_000})
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
