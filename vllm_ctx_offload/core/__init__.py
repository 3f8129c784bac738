"""Which chunks are kept: slots, eviction order and the offloading manager."""

from vllm_ctx_offload.core.manager import (
    HostMemoryManager,
    LookupResult,
    OffloadingManager,
    StoreGrant,
)
from vllm_ctx_offload.core.reuse import ReuseFilter

__all__ = [
    "HostMemoryManager",
    "LookupResult",
    "OffloadingManager",
    "ReuseFilter",
    "StoreGrant",
]
