"""`kv_connector_extra_config`, validated once into frozen records.

Every fault stops the start of the engine with one sentence (`ConfigError`): what is
wrong, the rule, and what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.policy_file import read_policy_file, unknown_key

__all__ = [
    "DEFAULT_PRIORITY",
    "DEFAULT_TENANT",
    "OffloadConfig",
    "Size",
    "TenantConfig",
    "check_kv_role",
    "fault_at",
    "parse_config",
]

DEFAULT_PRIORITY: Final = 35
DEFAULT_TENANT: Final = "default"
WILDCARD_TENANT: Final = "*"
_WHERE: Final = "kv_connector_extra_config"
_UNITS: Final = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
# No more digits than a size needs: Python refuses to read numbers of thousands.
_NUMBER: Final = r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*"
_SIZE: Final = re.compile(_NUMBER + r"([a-z]*)\s*", re.IGNORECASE)
_SHARE: Final = re.compile(_NUMBER + r"%\s*")
_MAX_BYTES: Final = 2**63 - 1
_SIZE_FIX: Final = 'use a number of bytes or text such as "8GiB"'
_FLAG_FIX: Final = "use true or false"
_SHARE_FIX: Final = 'use a share of the pool such as "25%"'


class Size(NamedTuple):
    """A number of bytes, or a share of the pool when `share` is set."""

    num_bytes: int
    share: float | None = None  # 0 to 1

    @property
    def is_nothing(self) -> bool:
        """Whether it was written as 0, not merely rounded to it."""
        return not self.num_bytes and not self.share

    def resolve(self, pool_bytes: int) -> int:
        """Returns the size in bytes for a pool of `pool_bytes`."""
        if self.share is None:
            return self.num_bytes
        # As it was written: 29 % of 100 are 29, not 28.999999999999996.
        return int(Fraction(str(self.share)) * pool_bytes)


def _parse_bytes(value: object) -> int:
    size: float = -1
    if isinstance(value, int | float) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        factor = _UNITS.get(match.group(2).lower())
        if factor is not None:
            exact = Fraction(match.group(1)) * factor
            # Less than a byte is no way to write 0.
            size = int(exact) if exact >= 1 or not exact else -1
    if 0 <= size <= _MAX_BYTES and size == int(size):
        return int(size)
    raise PydanticCustomError("size", f"is not a size; {_SIZE_FIX}")


def _parse_share(value: object) -> Size:
    if isinstance(value, str) and (match := _SHARE.fullmatch(value)):
        percent = float(match.group(1))
        if percent <= 100:
            return Size(0, percent / 100)
    raise PydanticCustomError("share", f"is not a share of the pool; {_SHARE_FIX}")


def _parse_size_or_share(value: object) -> Size:
    if isinstance(value, Size):
        return value
    if isinstance(value, str) and "%" in value:
        return _parse_share(value)
    try:
        return Size(_parse_bytes(value))
    except PydanticCustomError as error:
        raise PydanticCustomError(
            "size", f"is neither a size nor a share; {_SIZE_FIX}, or {_SHARE_FIX}"
        ) from error


Bytes = Annotated[int, BeforeValidator(_parse_bytes)]
Share = Annotated[
    Size, BeforeValidator(lambda v: v if isinstance(v, Size) else _parse_share(v))
]
SizeOrShare = Annotated[Size, BeforeValidator(_parse_size_or_share)]
_STRICT: Final = ConfigDict(frozen=True, extra="forbid", strict=True)


class TenantConfig(BaseModel):
    """One tenant's account. The description of a field is the fix in its error."""

    model_config = _STRICT

    reserved: SizeOrShare = Size(0)
    limit: SizeOrShare | None = None  # None: the whole pool
    # Bounded, so that no ratio of sizes and weights overflows.
    weight: float = Field(
        1.0, ge=1e-6, le=1e9, description="use a weight above 0, as 1"
    )
    max_priority: int = Field(100, ge=0, le=100, description="use 0 to 100")
    max_ttl_s: float = Field(3600.0, gt=0, description="use seconds above 0, as 3600")
    isolation: Literal["private", "shared"] = Field(
        "private", description='use "shared" to let tenants hit each other\'s chunks'
    )
    store: bool = Field(True, description=_FLAG_FIX)
    load: bool = Field(True, description=_FLAG_FIX)

    @property
    def base_priority(self) -> int:
        """Of chunks about which nothing is said."""
        return min(DEFAULT_PRIORITY, self.max_priority)


class OffloadConfig(BaseModel):
    """All keys of `kv_connector_extra_config`."""

    model_config = _STRICT

    cpu_bytes_to_use: Bytes | None = None  # None: a share of the available memory
    block_size: int | None = Field(None, gt=0, description="use tokens, as 256")
    blocks_per_chunk: int | None = Field(None, gt=0, description="use 1 or more")
    offload_prompt_only: bool = Field(True, description=_FLAG_FIX)
    store_threshold: int = Field(0, ge=0, description="use 0 for no reuse filter")
    # Bounded, because some of the memory for them is taken at the start.
    max_tracker_size: int = Field(
        64_000, gt=0, le=100_000_000, description="use 1 or more keys, as 64000"
    )
    eviction_policy: Literal["ctx", "lru"] = Field(
        "ctx", description='use "lru" to ignore every hint and tenant'
    )
    tenants: dict[str, TenantConfig] = Field(
        default_factory=dict,
        description='use names with their fields, as {"acme": {"reserved": "4GiB"}}',
    )
    policy_file: str | None = Field(
        None, description="use the path of a YAML or JSON file"
    )
    tenant_from: tuple[Literal["kv_transfer_params", "cache_salt", "lora"], ...] = (
        Field(
            ("kv_transfer_params",),
            description='use a list such as ["kv_transfer_params"]',
        )
    )
    max_protected: Share = Size(0, 0.3)
    reset_with_device_cache: bool = Field(False, description=_FLAG_FIX)
    load_wait_ms: float = Field(50.0, ge=0, le=60_000, description="use 0 to 60000")

    @model_validator(mode="before")
    @classmethod
    def _lists_become_tuples(cls, values: Any) -> Any:
        # JSON has no tuples, and strict validation takes no lists for them.
        if isinstance(values, dict) and isinstance(values.get("tenant_from"), list):
            return {**values, "tenant_from": tuple(values["tenant_from"])}
        return values

    def tenant(self, name: str) -> TenantConfig:
        """Returns the account that requests of tenant `name` are held to.

        A name that is not declared gets what "*" says, or else what `default` does.
        """
        for declared in (name, WILDCARD_TENANT, DEFAULT_TENANT):
            if account := self.tenants.get(declared):
                return account
        return _UNDECLARED


# Without a "*" there is nobody to isolate: plain vLLM behaviour, one shared cache.
_UNDECLARED: Final = TenantConfig(isolation="shared")


def check_kv_role(role: str | None) -> None:
    """Checks the one setting beside the extra config that is ours to check.

    Raises:
        ConfigError: it is another role than the connector has.
    """
    if role != "kv_both":
        raise ConfigError(
            f"kv_transfer_config: kv_role = '{role}', but this connector both stores "
            "and loads; set it to 'kv_both'."
        )


def parse_config(extra_config: Mapping[str, Any]) -> OffloadConfig:
    """Returns the validated configuration.

    Raises:
        ConfigError: on the first fault, with the sentence to show the operator.
    """
    values = dict(extra_config)
    origin = dict.fromkeys(values, _WHERE)
    if isinstance(path := values.get("policy_file"), str):
        policy = read_policy_file(Path(path))
        values.update(policy)
        origin.update(dict.fromkeys(policy, path))
    try:
        config = OffloadConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0], origin)) from None
    _check_combinations(config)
    return config


# What pydantic says in Python's words, in those of JSON and YAML.
_RULES: Final = {
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}


def _sentence(error: ErrorDetails, origin: Mapping[str, str]) -> str:
    location = [str(part) for part in error["loc"]]
    if location[2:] == ["[key]"] and error["type"] == "string_type":
        location.pop()  # the name of a tenant is at fault, not its account
    is_unknown = error["type"] in ("extra_forbidden", "invalid_key")
    if error["type"] == "string_unicode" and location != ["policy_file"]:
        # A key with a lone surrogate, of which pydantic tells only where it stands.
        location.append(error["input"])
        is_unknown = True
    where = origin.get(location[0], _WHERE)
    in_account = location[0] == "tenants" and len(location) > 2
    fields = (TenantConfig if in_account else OffloadConfig).model_fields
    if is_unknown:
        parents = ".".join(location[:-1])
        place = f"{where}: {parents}" if parents else where
        return unknown_key(place, location[-1], tuple(fields))
    rule = _RULES.get(error["type"], error["msg"].replace("Input should be", "must be"))
    field = fields.get(location[2 if in_account else 0])
    fix = f"; {field.description}" if field and field.description else ""
    key = ".".join(location)
    return f"{where}: '{key}' = {_shown(error['input'])} {rule}{fix}."


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except (ValueError, RecursionError):  # a number of thousands of digits; too deep
        return f"{type(value).__name__} too long to show"


def fault_at(config: OffloadConfig, key: str, text: str) -> ConfigError:
    """Returns the error that names where `key` was given: the policy file wins."""
    path = config.policy_file
    in_file = path and key in read_policy_file(Path(path))
    return ConfigError(f"{path if in_file else _WHERE}: {text}")


def _check_combinations(config: OffloadConfig) -> None:
    if config.block_size is not None and config.blocks_per_chunk is not None:
        raise ConfigError(
            f"{_WHERE}: block_size = {config.block_size} and blocks_per_chunk = "
            f"{config.blocks_per_chunk} both set the chunk size; give only one."
        )
    if not config.tenant_from:
        text = "tenant_from is empty, so no request could have a tenant; leave it out "
        raise fault_at(config, "tenant_from", text + 'or give ["kv_transfer_params"].')
    for name in config.tenants:
        if not 1 <= len(name) <= 128:
            text = f"tenants holds the name '{name:.20}' of {len(name)} characters; "
            raise fault_at(config, "tenants", text + "use 1 to 128.")
        if not name.isprintable():
            odd = next(char for char in name if not char.isprintable())
            text = (
                f"tenants holds the name '{name:.20}' with the character "
                f"U+{ord(odd):04X}, which not every metric, log and terminal can "
                "carry; use printable characters."
            )
            raise fault_at(config, "tenants", text)
    _check_one_default_account(config)


def _check_one_default_account(config: OffloadConfig) -> None:
    """What "*" says of sizes would be ignored where `default` has an account."""
    if not {WILDCARD_TENANT, DEFAULT_TENANT} <= config.tenants.keys():
        return
    for key in ("reserved", "limit", "weight"):
        if key in config.tenants[WILDCARD_TENANT].model_fields_set:
            text = (
                f"tenants.{WILDCARD_TENANT}.{key} has no effect, because undeclared "
                f"tenants share the account of '{DEFAULT_TENANT}', which is declared "
                f"too; set {key} there."
            )
            raise fault_at(config, "tenants", text)
