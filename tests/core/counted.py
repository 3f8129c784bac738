"""Counts the work of a call in executed lines, which no other load can change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import vllm_ctx_offload.core

_FOLDER = str(Path(vllm_ctx_offload.core.__file__).parent)


def count_lines(call: Callable[[], object]) -> int:
    """Returns how many lines of the core `call` executes, loops counted each time."""
    num_lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(_FOLDER):
            return None
        num_lines += event == "line"
        return trace

    before = sys.gettrace()  # the coverage measurement, perhaps
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines
