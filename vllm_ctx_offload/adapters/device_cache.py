"""Whether vLLM has reset the device's prefix cache, of which it tells no connector."""

from __future__ import annotations

from typing import Any

from vllm_ctx_offload.errors import ConfigError

__all__ = ["DeviceCacheWatch", "check_hook", "watch_resets"]


class DeviceCacheWatch:
    """Sees each successful reset of a block pool's prefix cache, however late it looks.

    It keeps an entry in the pool's table of cached blocks, under a key that is no hash
    and so is never looked up, evicted or filled. A reset, which empties the table or
    puts another one in its place, is all that takes it out. So nothing that happens
    between a reset and the next look, such as the table filling up again, hides it.
    """

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool
        # Of its own: another connector's watch puts its mark back when it looks.
        self._mark = b"the mark of vllm_ctx_offload, no hash of a block: %d" % id(self)
        self._put_mark()

    def _put_mark(self) -> None:
        table = self._pool.cached_block_hash_to_block
        table.insert(self._mark, self._pool.null_block)

    def saw_reset(self) -> bool:
        """Returns whether the cache was reset since the last call."""
        table = self._pool.cached_block_hash_to_block
        if table.get_one_block(self._mark) is not None:
            return False
        self._put_mark()
        return True


def check_hook(connector_base: type) -> None:
    """Checks that vLLM hands its block pool to connectors.

    Raises:
        ConfigError: no reset could be seen.
    """
    if not hasattr(connector_base, "bind_gpu_block_pool"):
        raise _refusal()


def watch_resets(block_pool: Any) -> DeviceCacheWatch:
    """Returns a watch on a block pool that is not in use yet, having tried it out.

    Releases 0.27.1 to 0.33 replace the table at a reset, 0.34 empties it; what another
    one does shows here, not when old KV is served.

    Raises:
        ConfigError: a reset would not be seen.
    """
    try:
        watch = DeviceCacheWatch(block_pool)
        is_seen = block_pool.reset_prefix_cache() and watch.saw_reset()
        is_seen = is_seen and not watch.saw_reset()
    except (AttributeError, TypeError):
        # The pool's table is another one than is known here.
        raise _refusal() from None
    if not is_seen:
        raise _refusal()
    return watch


def _refusal() -> ConfigError:
    return ConfigError(
        "kv_connector_extra_config: reset_with_device_cache = true, but this vLLM does "
        "not let a connector see that the device's prefix cache was reset; leave it "
        "out, and reset with reset_connector=True after every change of weights."
    )
