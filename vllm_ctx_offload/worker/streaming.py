"""The compiled part of copies on the CPU: scattered pages, past the caches.

A plain `memcpy` of a page first reads the lines that it writes into the caches and
throws out what the model has there; only for far larger copies does the C library use
stores that do neither. Here every page is written with such non-temporal stores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from vllm_ctx_offload.errors import ConfigError

__all__ = ["LINE_BYTES", "page_copier"]

# Bytes of one store: a line of the caches, by which its target has to be aligned.
LINE_BYTES: Final = 64


@functools.cache
def page_copier() -> Callable[..., None]:
    """Compiles, on first use, `copy(to, from_, sizes, at, of)`.

    It copies each page j of each block i: `sizes[j]` bytes from address
    `from_[j, 0] + from_[j, 1] * of[i]` to `to[j, 0] + to[j, 1] * at[i]`. All arguments
    are int64 arrays. It runs on the calling thread and without Python's lock; when it
    returns every thread sees what it wrote.

    Raises:
        ConfigError: numba, which vLLM depends on, can't be imported.
    """
    try:
        from numba import njit, types

        _show_no_attributes()
    except ImportError as error:
        raise ConfigError(
            "CtxOffloadConnector: numba, which copies on the CPU are compiled with and "
            f"every vLLM depends on, can't be imported ({error}); reinstall vLLM, or "
            "run 'pip install numba'."
        ) from None
    memcpy, stream, fence = _memory_operations()

    def copy(to: Any, from_: Any, sizes: Any, at: Any, of: Any) -> None:
        for i in range(at.size):
            for j in range(sizes.size):
                target = to[j, 0] + to[j, 1] * at[i]
                source = from_[j, 0] + from_[j, 1] * of[i]
                head = min(-target % LINE_BYTES, sizes[j])
                lines = (sizes[j] - head) // LINE_BYTES * LINE_BYTES
                tail = head + lines
                memcpy(target, source, head)
                stream(target + head, source + head, lines)
                memcpy(target + tail, source + tail, sizes[j] - tail)
        fence()

    number = types.int64
    ends, numbers = number[:, ::1], number[::1]
    signature = types.void(ends, ends, numbers, numbers, numbers)
    compiled: Callable[..., None] = njit(signature, nogil=True)(copy)
    return compiled


def _show_no_attributes() -> None:
    """Lets the next engine of this process start, on vLLM before 0.34.

    Its CPU platform looks for kernels in the attributes of all that any module holds.
    One object of llvmlite invents every attribute that it is asked for, and keeps it in
    a table; what it invents for `__dict__` is no dictionary.
    """
    from llvmlite.binding import ffi

    if not isinstance(vars(ffi.lib), Mapping):
        ffi.lib._fntab["__dict__"] = {}  # noqa: SLF001 - there is no public way in


def _memory_operations() -> tuple[Any, Any, Any]:
    """Returns what compiled code does to memory: `memcpy`, `stream` and `fence`."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    move = types.void(types.int64, types.int64, types.int64)

    @intrinsic
    def memcpy(_: Any, _target: Any, _source: Any, _count: Any) -> Any:
        """Copies any number of bytes, wherever they begin."""

        def emit(_: Any, builder: Any, __: Any, arguments: Any) -> None:
            to, from_, count = arguments
            byte = ir.IntType(8).as_pointer()
            ends = (builder.inttoptr(end, byte) for end in (to, from_))
            cgutils.raw_memcpy(builder, *ends, count, 1)

        return move, emit

    @intrinsic
    def stream(_: Any, _target: Any, _source: Any, _count: Any) -> Any:
        """Copies whole lines to a target that is aligned; the source need not be."""

        def emit(_: Any, builder: Any, __: Any, arguments: Any) -> None:
            to, from_, count = arguments
            word = ir.IntType(64)
            line = ir.VectorType(word, LINE_BYTES // 8).as_pointer()
            hint = builder.module.add_metadata([ir.IntType(32)(1)])
            every = word(LINE_BYTES)
            with cgutils.for_range_slice(builder, word(0), count, every) as (offset, _):
                ends = (builder.add(end, offset) for end in (to, from_))
                target, source = (builder.inttoptr(end, line) for end in ends)
                store = builder.store(builder.load(source, align=1), target, LINE_BYTES)
                store.set_metadata("nontemporal", hint)

        return move, emit

    @intrinsic
    def fence(_: Any) -> Any:
        """Orders such stores, which nothing else orders, before what follows."""

        def emit(_: Any, builder: Any, __: Any, ___: Any) -> None:
            builder.fence("seq_cst")

        return types.void(), emit

    return memcpy, stream, fence
