"""The doctor's look at a configuration: every fault, and the memory plan."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vllm_ctx_offload import CONNECTOR_NAME
from vllm_ctx_offload.cli.doctor_findings import Finding, Level
from vllm_ctx_offload.cli.doctor_model import KvShape
from vllm_ctx_offload.config import OffloadConfig, check_kv_role, parse_config
from vllm_ctx_offload.core import account_terms
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.memory import available_memory, format_bytes
from vllm_ctx_offload.plan import ModelShape, OffloadPlan, resolve_plan

__all__ = [
    "Engines",
    "check_config",
    "check_role",
    "check_room",
    "make_plan",
    "plan_as_json",
    "plan_as_text",
    "read_extra_config",
    "read_json",
]

_INLINE = "kv_connector_extra_config"


class Engines(NamedTuple):
    """How the engines of this host are cut up."""

    tokens_per_block: int
    num_workers: int  # of one engine
    num_engines: int = 1


def read_json(text: str) -> Any:
    """Returns what `--extra-config` holds: a JSON text, or `@FILE` with one.

    Raises:
        ConfigError: it can't be read.
    """
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--extra-config: {text[1:]} can't be read ({error})."
            ) from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--extra-config is no JSON: {error}.") from None


def read_extra_config(text: str) -> dict[str, Any]:
    """Returns the mapping in a JSON text, or in the file that `@FILE` names.

    A whole kv_transfer_config is accepted too, and its extra config returned.

    Raises:
        ConfigError: there is no such mapping in it.
    """
    values = read_json(text)
    if isinstance(values, dict) and "kv_connector" in values:
        if values["kv_connector"] != CONNECTOR_NAME:
            raise ConfigError(
                f"--extra-config: kv_connector = '{values['kv_connector']}', not "
                f"'{CONNECTOR_NAME}'; of a MultiConnector give the part that is ours."
            )
        values = values.get(_INLINE, {})
    if not isinstance(values, dict):
        raise ConfigError("--extra-config is no JSON object; write '{...}'.")
    return values


# ---- faults


def check_role(text: str) -> Iterator[Finding]:
    """Has a whole kv_transfer_config the role that the connector needs?"""
    values = read_json(text)
    if "kv_connector" in values:
        try:
            check_kv_role(values.get("kv_role"))
        except ConfigError as error:
            yield Finding(Level.FAULT, "config", str(error))


def check_config(values: Mapping[str, Any]) -> tuple[OffloadConfig | None, list[str]]:
    """Returns (the configuration if it is valid, every fault).

    The parser stops at the first fault, as the engine does. So that one look finds
    them all, each setting is tried on its own, and what is sound together.
    """
    faults: list[str] = []
    sound = copy.deepcopy(dict(values))
    for where in _settings(values):
        if fault := _fault_of(_alone(values, where)):
            faults.append(fault)
            _take_out(sound, where)
    path = values.get("policy_file")
    if isinstance(path, str) and _fault_of({"policy_file": path}):
        faults += _faults_in_file(path)
    try:
        config = parse_config(values)
    except ConfigError as error:
        together = _fault_of(sound)
        return None, _once([*faults, str(error), *([together] if together else [])])
    return config, []


def _settings(values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each setting, those of tenants field by field."""
    for key, value in values.items():
        if key != "tenants" or not isinstance(value, dict):
            yield (key,)
            continue
        for name, account in value.items():
            if not isinstance(account, dict):
                yield key, name
                continue
            for field in account:
                yield key, name, field


def _alone(values: Mapping[str, Any], where: tuple[Any, ...]) -> dict[str, Any]:
    """Returns a configuration that holds nothing else."""
    key, *inner = where
    value = values[key]
    return {key: _alone(value, tuple(inner)) if inner else value}


def _take_out(values: dict[str, Any], where: tuple[Any, ...]) -> None:
    for key in where[:-1]:
        values = values[key]
    del values[where[-1]]


def _fault_of(values: Mapping[str, Any]) -> str | None:
    try:
        parse_config(values)
    except ConfigError as error:
        return str(error)
    return None


def _faults_in_file(path: str) -> list[str]:
    try:
        policy = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []  # which the parser says too, and better
    if not isinstance(policy, dict):
        return []
    policy.pop("policy_file", None)
    faults = [_fault_of(_alone(policy, where)) for where in _settings(policy)]
    return [fault.replace(_INLINE, path, 1) for fault in faults if fault]


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


# ---- the plan


def make_plan(
    config: OffloadConfig, shape: KvShape, engines: Engines
) -> tuple[OffloadPlan | None, list[str]]:
    """Returns (the plan of one engine, if there is one; every fault)."""
    size = engines.tokens_per_block
    groups = [dataclasses.replace(g, tokens_per_block=size) for g in shape.groups]
    model = ModelShape(
        groups=tuple(groups),
        tokens_per_hash=size,
        bytes_per_block=shape.group_bytes_per_token * size,
        num_device_blocks=1,  # the plan does not depend on it
        num_workers=engines.num_workers,
        num_engines=engines.num_engines,
    )
    faults = []
    # One tenant at a time, because only the first fault of all would be said.
    for name, account in config.tenants.items():
        alone = config.model_copy(update={"tenants": {name: account}})
        try:
            resolve_plan(alone, model)
        except ConfigError as error:
            faults.append(str(error))
    try:
        plan = resolve_plan(config, model)
    except ConfigError as error:
        return None, _once([*faults, str(error)])
    return plan, []


def check_room(pool_bytes: int) -> Iterator[Finding]:
    """Is there memory for the pools of all engines of this host?"""
    available_bytes, source = available_memory()
    size, rest = format_bytes(pool_bytes), format_bytes(available_bytes)
    if pool_bytes > available_bytes:
        yield Finding(
            Level.FAULT,
            "memory",
            f"the pool takes {size}, but {source} has only {rest} left; lower "
            "cpu_bytes_to_use, or raise that limit.",
        )
    elif pool_bytes > available_bytes * 0.9:
        yield Finding(
            Level.WARN,
            "memory",
            f"the pool takes {size} of the {rest} that {source} has left; vLLM itself "
            "needs host memory too, so lower cpu_bytes_to_use, or raise that limit.",
        )


def plan_as_json(
    config: OffloadConfig, shape: KvShape, plan: OffloadPlan
) -> dict[str, Any]:
    """Returns the plan and the tenants' terms, all of one engine."""
    terms = account_terms(config, plan.num_slots, plan.bytes_per_chunk)
    return {
        "attention": shape.kind,
        "num_layers": shape.num_layers,
        "num_groups": len(plan.groups),
        "num_workers": plan.num_workers,
        "bytes_per_token_per_worker": shape.bytes_per_token,
        "bytes_per_token": shape.bytes_per_token * plan.num_workers,
        "tokens_per_block": plan.groups[0].tokens_per_block,
        "blocks_per_chunk": plan.blocks_per_chunk,
        "tokens_per_chunk": plan.tokens_per_span,
        "bytes_per_chunk": plan.bytes_per_chunk,
        "num_slots": plan.num_slots,
        # Of each token there is a chunk in every group.
        "tokens_that_fit": plan.worth_in_tokens(plan.num_slots),
        "bytes_per_worker": plan.bytes_per_worker,
        "total_bytes": plan.total_bytes,
        "max_protected_chunks": config.max_protected.resolve(plan.num_slots),
        "tenants": {
            name: {
                "reserved_chunks": account.reserved,
                "reserved_bytes": account.reserved * plan.bytes_per_chunk,
                "limit_chunks": account.limit,
                "limit_bytes": None
                if account.limit is None
                else account.limit * plan.bytes_per_chunk,
                "weight": account.weight,
            }
            for name, account in terms.items()
        },
    }


def plan_as_text(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of what `plan_as_json` returned."""
    workers = plan["num_workers"]
    layers = f"{plan['attention']}, {plan['num_layers']} layers"
    if plan["num_groups"] > 1:
        layers += f" in {plan['num_groups']} groups"
    yield f"Memory plan of one engine ({layers})"
    rows = [
        ("KV per token", _sized(plan["bytes_per_token"])),
        ("block", f"{plan['tokens_per_block']} tokens"),
        (
            "chunk",
            f"{plan['blocks_per_chunk']} block(s), {plan['tokens_per_chunk']} tokens, "
            + _sized(plan["bytes_per_chunk"]),
        ),
        ("slots", f"{plan['num_slots']}, for {plan['tokens_that_fit']} tokens"),
        ("host memory", _sized(plan["total_bytes"])),
        ("on each worker", f"{_sized(plan['bytes_per_worker'])}, {workers} worker(s)"),
        ("max_protected", f"{plan['max_protected_chunks']} chunks"),
    ]
    for name, text in rows:
        yield f"  {name:<16}{text}"
    yield f"  {'tenant':<20}{'reserved':>24}{'limit':>24}{'weight':>10}"
    for name, account in plan["tenants"].items():
        reserved = _cell(account["reserved_chunks"], account["reserved_bytes"])
        limit = _cell(account["limit_chunks"], account["limit_bytes"])
        yield f"  {name:<20}{reserved:>24}{limit:>24}{account['weight']:>10g}"


def _sized(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({format_bytes(num_bytes)})"


def _cell(chunks: int | None, num_bytes: int | None) -> str:
    if chunks is None or num_bytes is None:
        return "the whole pool"
    return f"{chunks} chunks, {format_bytes(num_bytes)}"
