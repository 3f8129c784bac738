"""What a copy thread does first, so that it stays out of the model's way."""

from __future__ import annotations

import logging
import os

from vllm_ctx_offload.worker.numa import process_cores

__all__ = ["leave_the_models_cores"]

logger = logging.getLogger(__name__)


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
