"""The exceptions of this package."""

from __future__ import annotations

from vllm_ctx_offload.text import printable

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """A configuration that cannot work; it stops the start of the engine.

    The message is one sentence that names the key, its value, the rule it breaks
    and the fix, because it is all an operator sees. Names, values and paths in it are
    somebody else's text, so it is one line whatever they hold.
    """

    def __init__(self, message: str) -> None:
        """Takes the sentence; see `printable` for what is escaped in it."""
        super().__init__(printable(message))
