"""The command `vllm-ctx-offload`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from vllm_ctx_offload import __version__
from vllm_ctx_offload.cli.doctor import add_doctor
from vllm_ctx_offload.cli.simulate import add_simulate
from vllm_ctx_offload.cli.top import add_top

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vllm-ctx-offload", description="Tools for the vLLM KV offloading plugin."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_doctor(commands)
    add_simulate(commands)
    add_top(commands)
    args = parser.parse_args(argv)
    try:
        exit_code: int = args.run(args)
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python would complain at its end too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return exit_code
