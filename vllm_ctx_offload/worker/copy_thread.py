"""What a copy thread does first, so that it stays out of the model's way."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from pathlib import Path
from typing import Final

import torch

from vllm_ctx_offload.worker.numa import process_cores

__all__ = ["leave_the_models_cores", "work_alone"]

logger = logging.getLogger(__name__)

_OPENMP: Final = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


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


def work_alone() -> bool:
    """Makes torch use this thread alone for what this thread asks of it.

    The number of OpenMP threads is a property of the thread that asks. Setting it by
    `torch.set_num_threads` would also set the default of threads to come, which are the
    model's, so the OpenMP runtime is asked itself. Returns whether it worked; if not,
    copies have to be small enough that torch does not share them out.
    """
    torch.get_num_threads()  # torch sets this thread's number once, at its first use
    for path in _openmp_runtimes():
        try:
            ctypes.CDLL(path).omp_set_num_threads(1)
        except (OSError, AttributeError) as error:
            logger.debug("%s was not asked for one thread: %s", path, error)
    return torch.get_num_threads() == 1


def _openmp_runtimes() -> list[str]:
    """Returns the OpenMP libraries that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return []
    found = (_OPENMP.search(line) for line in maps.splitlines())
    return sorted({match.group() for match in found if match})
