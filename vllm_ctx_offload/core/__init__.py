"""Which chunks are kept: slots, tenants, eviction order and the offloading manager."""

from vllm_ctx_offload.core.host_memory import ChunkState, HostMemoryManager
from vllm_ctx_offload.core.manager import LookupResult, OffloadingManager, StoreGrant
from vllm_ctx_offload.core.policy import PolicyConfig, policy_of
from vllm_ctx_offload.core.reuse import ReuseFilter, filtered
from vllm_ctx_offload.core.tenants import AccountTerms, account_terms

__all__ = [
    "AccountTerms",
    "ChunkState",
    "HostMemoryManager",
    "LookupResult",
    "OffloadingManager",
    "PolicyConfig",
    "ReuseFilter",
    "StoreGrant",
    "account_terms",
    "filtered",
    "policy_of",
]
