"""vLLM's own offloading managers, called as its scheduler calls them, to compare with.

For `simulate` alone: it imports vLLM when asked to, and the connector never does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["VLLM_POLICIES", "VllmManager", "vllm_has_managers"]

VLLM_POLICIES: Final = ("lru", "arc")


def vllm_has_managers() -> bool:
    """Returns whether vLLM is installed and has the managers where they are known."""
    try:
        _import_vllm()
    except ImportError:
        return False
    return True


def _import_vllm() -> tuple[Any, Any]:
    # vLLM's log goes to the standard output, which may be somebody's JSON.
    with contextlib.redirect_stdout(sys.stderr):
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    return base, CPUOffloadingManager


class _OffloadKeys(dict[bytes, bytes]):
    """vLLM's key for one of ours, made once. It reads a group off the last bytes."""

    def __missing__(self, key: bytes) -> bytes:
        made = self[key] = key + bytes(4)
        return made


class VllmManager:
    """`CPUOffloadingManager` with one of vLLM's policies and a pool of its own."""

    def __init__(self, policy: str, num_chunks: int) -> None:
        self._base, manager_class = _import_vllm()
        # By position: the first one is called num_blocks in 0.27, num_chunks in 0.32.
        self._manager = manager_class(num_chunks, policy)
        # Later releases order a request's keys at its end, earlier ones when touched.
        own_end = manager_class.on_request_finished
        self._touches = own_end is self._base.OffloadingManager.on_request_finished
        self._offload_keys = _OffloadKeys()

    def serve(self, request_id: str, chain: Sequence[bytes]) -> int:
        """Loads and stores one request's chain; returns how many chunks it hit."""
        manager = self._manager
        context = self._base.ReqContext(req_id=request_id)
        hit = self._base.LookupResult.HIT
        keys = [self._offload_keys[key] for key in chain]
        manager.on_new_request(context)
        num_hits = 0
        while num_hits < len(keys) and manager.lookup(keys[num_hits], context) is hit:
            num_hits += 1
        if self._touches:
            manager.touch(keys, context)
        if num_hits:
            manager.prepare_load(keys[:num_hits], context)
            manager.complete_load(keys[:num_hits], context)
        if num_hits < len(keys):
            stored = manager.prepare_store(keys[num_hits:], context)
            if stored is not None:  # None: there is no room for the chain as a whole
                manager.complete_store(stored.keys_to_store, context)
        manager.on_request_finished(context)
        return num_hits
