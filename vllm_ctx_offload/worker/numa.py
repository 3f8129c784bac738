"""Which cores a worker should use, and which are near its memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["cores_near", "leave_the_models_cores", "process_cores"]

logger = logging.getLogger(__name__)

_NODES: Final = Path("/sys/devices/system/node")
_PCI: Final = Path("/sys/bus/pci/devices")


def process_cores() -> set[int]:
    """Returns the cores that this process may use; empty where that is not known.

    A thread may be bound to one of them, and new threads inherit that. Threads from
    before the binding still have what the process was started with.
    """
    try:
        threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
        return set().union(*(os.sched_getaffinity(thread) for thread in threads))
    except (AttributeError, OSError):
        return set()


def leave_the_models_cores() -> None:
    """Lets this thread run wherever the process may.

    vLLM binds the model's thread to one core, and new threads inherit that; here the
    copies would compete with the model while other cores idle. The choice among the
    cores is the kernel's: one that idles for this process may be another worker's.
    """
    cores = process_cores()
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.debug("The copy thread keeps its cores: %s", error)


def cores_near(device: torch.device) -> tuple[int | None, set[int]]:
    """Returns the NUMA node of a worker and the cores on it that it may use.

    Of a GPU it is the node of its PCI slot; on the CPU it is that of the cores which
    the calling thread is bound to. None, and all cores, where it is not known, where
    the cores lie on several nodes, or where the process may use none of the node.
    """
    allowed = process_cores()
    node = _node_of_gpu(device) if device.type == "cuda" else _node_of_thread()
    near = _cores_of(node) & allowed if node is not None else set()
    return (node, near) if near else (None, allowed)


def _node_of_gpu(device: torch.device) -> int | None:
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        slot = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
            f":{properties.pci_device_id:02x}.0"
        )
        node = int((_PCI / slot / "numa_node").read_text(encoding="ascii"))
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not say


def _node_of_thread() -> int | None:
    try:
        own = os.sched_getaffinity(0)
    except (AttributeError, OSError):
        return None
    nodes = [
        number
        for path in _NODES.glob("node[0-9]*")
        if own & _cores_of(number := int(path.name.removeprefix("node")))
    ]
    return nodes[0] if len(nodes) == 1 else None


def _cores_of(node: int) -> set[int]:
    try:
        text = (_NODES / f"node{node}" / "cpulist").read_text(encoding="ascii")
    except OSError:
        return set()
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):  # such as "0-3,8-11"
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
