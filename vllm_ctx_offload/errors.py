"""The exceptions of this package."""

from __future__ import annotations

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """A configuration that cannot work; it stops the start of the engine.

    The message is one sentence that names the key, its value, the rule it breaks
    and the fix, because it is all an operator sees.
    """
