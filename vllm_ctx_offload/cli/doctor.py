"""`vllm-ctx-offload doctor`: is this machine, and this configuration, sound?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_ctx_offload.cli.doctor_findings import Finding, Level
from vllm_ctx_offload.cli.doctor_machine import (
    check_groups,
    check_memlock,
    check_memory,
    check_numa,
    check_plugin,
    check_torch,
    check_vllm,
    default_block_size,
    is_cpu_build,
)
from vllm_ctx_offload.cli.doctor_model import (
    KvOptions,
    KvShape,
    UnknownShapeError,
    kv_shape,
    read_model,
)
from vllm_ctx_offload.cli.doctor_plan import (
    Engines,
    check_config,
    check_role,
    check_room,
    make_plan,
    plan_as_json,
    plan_as_text,
    read_extra_config,
)
from vllm_ctx_offload.config import OffloadConfig
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import default_pool_bytes
from vllm_ctx_offload.plan import OffloadPlan
from vllm_ctx_offload.text import printable

__all__ = ["add_doctor", "run_doctor"]


def add_doctor(commands: Any) -> None:
    """Adds the command and its arguments to the subparsers `commands`."""
    parser = commands.add_parser(
        "doctor",
        help="check vLLM, the plugin, memory, and a configuration",
        description="Checks what is installed, the machine, and a configuration; with "
        "--model, prints the memory plan that the engine will have. Exit status: 0 if "
        "nothing is at fault (warnings do not count), 1 otherwise.",
    )
    parser.add_argument(
        "--extra-config",
        metavar="JSON|@FILE",
        help="kv_connector_extra_config, or the whole --kv-transfer-config",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER|config.json",
        help="the model's configuration of Hugging Face, on this machine",
    )
    options = parser.add_argument_group("as given to vllm serve")
    for name in ("--tensor-parallel-size", "--data-parallel-size"):
        options.add_argument(name, type=_positive, default=1, metavar="N")
    options.add_argument(
        "--block-size",
        type=_positive,
        metavar="N",
        help="tokens of a device block (default: what vLLM mostly takes)",
    )
    for name in ("--dtype", "--kv-cache-dtype"):
        options.add_argument(name, default="auto", metavar="TYPE")
    options.add_argument("--disable-hybrid-kv-cache-manager", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_doctor)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def run_doctor(args: argparse.Namespace) -> int:
    """Prints what was found; returns 0 when nothing is at fault and 1 otherwise."""
    findings = [*check_vllm(), *check_torch(), *check_plugin(), *check_memory()]
    config = _config(args, findings)
    model = _model(args, findings)
    plan = None
    pool_bytes = default_pool_bytes()
    bytes_per_worker = pool_bytes // args.tensor_parallel_size
    if config is not None:
        pool_bytes = config.cpu_bytes_to_use or pool_bytes
        bytes_per_worker = pool_bytes // args.tensor_parallel_size
        resolved = _plan(args, config, model, findings) if model else None
        if resolved is not None and model is not None:
            bytes_per_worker = resolved.bytes_per_worker
            pool_bytes = resolved.total_bytes * args.data_parallel_size
            plan = plan_as_json(config, model, resolved)
        findings += check_room(pool_bytes)
    findings += check_memlock(not is_cpu_build(), bytes_per_worker)
    findings += check_numa(bytes_per_worker)
    _print(findings, plan, as_json=args.json)
    return int(any(finding.level is Level.FAULT for finding in findings))


def _config(args: argparse.Namespace, findings: list[Finding]) -> OffloadConfig | None:
    try:
        values = read_extra_config(args.extra_config or "{}")
    except ConfigError as error:
        findings.append(Finding(Level.FAULT, "config", str(error)))
        return None
    findings += check_role(args.extra_config or "{}")
    config, faults = check_config(values)
    findings += (Finding(Level.FAULT, "config", fault) for fault in faults)
    if config is not None and args.extra_config is not None:
        findings.append(
            Finding(
                Level.OK, "config", "every value of the extra config is valid by itself"
            )
        )
    return config


def _model(args: argparse.Namespace, findings: list[Finding]) -> KvShape | None:
    if args.model is None:
        return None
    options = KvOptions(
        args.tensor_parallel_size,
        args.dtype,
        args.kv_cache_dtype,
        hybrid_manager=not args.disable_hybrid_kv_cache_manager,
    )
    try:
        return kv_shape(read_model(args.model), options)
    except ConfigError as error:
        findings.append(Finding(Level.FAULT, "model", str(error)))
    except UnknownShapeError as error:
        findings.append(Finding(Level.WARN, "model", str(error)))
    return None


def _plan(
    args: argparse.Namespace,
    config: OffloadConfig,
    model: KvShape,
    findings: list[Finding],
) -> OffloadPlan | None:
    block = args.block_size
    if block is None:
        block = default_block_size()
        if is_cpu_build() and model.kind != "MLA":
            block = 128
        text = (
            f"device blocks of {block} tokens assumed; attention backends can take "
            "others, so compare with the plan in vLLM's log, or give --block-size"
        )
        findings.append(Finding(Level.OK, "model", text))
    findings += check_groups(model.groups)
    engines = Engines(block, args.tensor_parallel_size, args.data_parallel_size)
    plan, faults = make_plan(config, model, engines)
    findings += (Finding(Level.FAULT, "config", fault) for fault in faults)
    return plan


def _print(
    findings: list[Finding], plan: dict[str, Any] | None, *, as_json: bool
) -> None:
    if as_json:
        found = [
            {"level": f.level.name.lower(), "topic": f.topic, "text": f.text}
            for f in findings
        ]
        print(json.dumps({"findings": found, "plan": plan}, indent=2))
        return
    for finding in findings:
        text = printable(finding.text)
        print(f"{finding.level.value:<6}{finding.topic:<9}{text}")
    if plan is not None:
        print()
        for line in plan_as_text(plan):
            print(line)
