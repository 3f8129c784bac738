"""The command `vllm-ctx-offload`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vllm_ctx_offload import __version__
from vllm_ctx_offload.cli.doctor import run_doctor

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vllm-ctx-offload", description="Tools for the vLLM KV offloading plugin."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="check vLLM, the plugin, memory, and a configuration"
    )
    doctor.add_argument(
        "--extra-config",
        metavar="JSON",
        help="the value of kv_connector_extra_config to check",
    )
    doctor.set_defaults(run=lambda args: run_doctor(args.extra_config))
    args = parser.parse_args(argv)
    exit_code: int = args.run(args)
    return exit_code
