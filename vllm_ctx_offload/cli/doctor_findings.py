"""What `vllm-ctx-offload doctor` finds: one line each, with a level."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Finding", "Level"]


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"  # works, but worse than it could, or the doctor can't tell
    FAULT = "FAULT"  # stops the start, or keeps the connector from being used


class Finding(NamedTuple):
    """One line of the report."""

    level: Level
    topic: str
    text: str  # a fault or warning also says what to do
