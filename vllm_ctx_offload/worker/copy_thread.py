"""What a copy thread does first, so that it stays out of the model's way."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from vllm_ctx_offload.worker.numa import process_cores

__all__ = ["give_way_to_the_model", "leave_the_models_cores"]

logger = logging.getLogger(__name__)

# The kernel then gives a thread of the model nine times as much of a core that both
# want. Not the most that there is: a fence waits for stores.
_NICENESS: Final = 10


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


def give_way_to_the_model() -> None:
    """Lowers the priority of this thread alone; what idles it may still use all of."""
    thread = threading.get_native_id()
    try:
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, own + _NICENESS)
    except (AttributeError, OSError) as error:
        logger.debug("The copy thread keeps its priority: %s", error)
