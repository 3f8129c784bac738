"""`kv_connector_extra_config`: every key, its default and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
from config_errors import WHERE
from pydantic import ValidationError

from vllm_ctx_offload.config import (
    OffloadConfig,
    Size,
    TenantConfig,
    check_accounts,
    inert_keys,
    parse_config,
)
from vllm_ctx_offload.errors import ConfigError

GIB = 1024**3


def test_nothing_configured_gives_the_documented_defaults() -> None:
    config = parse_config({})
    assert config.model_dump() == {
        "cpu_bytes_to_use": None,
        "block_size": None,
        "blocks_per_chunk": None,
        "offload_prompt_only": True,
        "store_threshold": 0,
        "max_tracker_size": 64_000,
        "eviction_policy": "ctx",
        "tenants": {},
        "policy_file": None,
        "tenant_from": ("kv_transfer_params",),
        "max_protected": Size(0, 0.3),
        "load_wait_ms": 50.0,
    }
    assert config == OffloadConfig()


def test_a_tenant_has_the_documented_defaults() -> None:
    (tenant,) = parse_config({"tenants": {"acme": {}}}).tenants.values()
    assert tenant.model_dump() == {
        "reserved": Size(0),
        "limit": None,
        "weight": 1.0,
        "max_priority": 100,
        "max_ttl_s": 3600.0,
        "isolation": "private",
        "store": True,
        "load": True,
    }


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("cpu_bytes_to_use", 0, 0),
        ("cpu_bytes_to_use", 4 * GIB, 4 * GIB),
        ("cpu_bytes_to_use", 4e9, 4_000_000_000),
        ("cpu_bytes_to_use", "8GiB", 8 * GIB),
        ("cpu_bytes_to_use", " 1.5 gib ", 3 * GIB // 2),
        ("cpu_bytes_to_use", "2MB", 2_000_000),
        ("cpu_bytes_to_use", "3 KiB", 3_072),
        ("cpu_bytes_to_use", "1TiB", 1024**4),
        ("cpu_bytes_to_use", "17", 17),
        ("cpu_bytes_to_use", "17B", 17),
        ("cpu_bytes_to_use", "9007199254740993", 2**53 + 1),
        ("cpu_bytes_to_use", 2**63 - 1, 2**63 - 1),
        ("block_size", 256, 256),
        ("blocks_per_chunk", 1, 1),
        ("offload_prompt_only", False, False),
        ("store_threshold", 2, 2),
        ("max_tracker_size", 1, 1),
        ("eviction_policy", "lru", "lru"),
        ("tenant_from", ["lora", "cache_salt"], ("lora", "cache_salt")),
        ("max_protected", "0%", Size(0, 0.0)),
        ("max_protected", " 12.5 % ", Size(0, 0.125)),
        ("max_protected", "100%", Size(0, 1.0)),
        ("load_wait_ms", 0, 0.0),
        ("load_wait_ms", 60_000, 60_000.0),
    ],
)
def test_a_valid_value_is_taken(key: str, value: Any, parsed: Any) -> None:
    assert parse_config({key: value}) == OffloadConfig(**{key: parsed})
    assert getattr(parse_config({key: value}), key) == parsed


@pytest.mark.parametrize(
    ("field", "value", "parsed"),
    [
        ("reserved", "4GiB", Size(4 * GIB)),
        ("reserved", 1_000, Size(1_000)),
        ("reserved", "25%", Size(0, 0.25)),
        ("limit", "20%", Size(0, 0.2)),
        ("limit", None, None),
        ("weight", 2, 2.0),
        ("max_priority", 0, 0),
        ("max_ttl_s", 0.5, 0.5),
        ("isolation", "shared", "shared"),
        ("store", False, False),
        ("load", False, False),
    ],
)
def test_a_valid_tenant_field_is_taken(field: str, value: Any, parsed: Any) -> None:
    config = parse_config({"tenants": {"acme": {field: value}}})
    assert config.tenants == {"acme": TenantConfig(**{field: parsed})}


def test_a_configuration_can_not_be_changed_and_leaves_its_source_alone() -> None:
    given = {"tenants": {"acme": {}}, "tenant_from": ["lora"]}
    config = parse_config(given)
    assert given == {"tenants": {"acme": {}}, "tenant_from": ["lora"]}
    with pytest.raises(ValidationError, match="frozen"):
        config.block_size = 5
    assert config.block_size is None


@pytest.mark.parametrize(
    ("tenants", "name", "expected"),
    [
        ({}, "default", TenantConfig(isolation="shared")),
        ({}, "stranger", TenantConfig(isolation="shared")),
        ({"acme": {"weight": 2}}, "acme", TenantConfig(weight=2)),
        ({"acme": {"weight": 2}}, "stranger", TenantConfig(isolation="shared")),
        ({"*": {"weight": 3}}, "default", TenantConfig(weight=3)),
        ({"*": {"weight": 3}, "acme": {}}, "acme", TenantConfig()),
        ({"*": {"weight": 3}, "default": {}}, "default", TenantConfig()),
        ({"*": {"weight": 3}, "default": {}}, "stranger", TenantConfig(weight=3)),
        ({"default": {"weight": 4}}, "stranger", TenantConfig(weight=4)),
    ],
)
def test_a_tenant_is_held_to_its_own_account_or_the_wildcards(
    tenants: dict[str, Any], name: str, expected: TenantConfig
) -> None:
    assert parse_config({"tenants": tenants}).tenant(name) == expected


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [(Size(7), 7), (Size(0, 0.25), 250), (Size(0, 0.0), 0), (Size(0, 1.0), 1_000)],
)
def test_a_size_is_bytes_or_a_share_of_the_pool(size: Size, num_bytes: int) -> None:
    assert size.resolve(1_000) == num_bytes


@pytest.mark.parametrize(
    "tenants",
    [
        {},
        {"acme": {"reserved": 600}, "zeta": {"reserved": "40%"}},
        {"acme": {"reserved": "50%", "limit": 500}},
        {"acme": {"limit": 0}},
        {"acme": {"limit": 10_000}},
    ],
)
def test_accounts_that_fit_the_pool_pass(tenants: dict[str, Any]) -> None:
    check_accounts(parse_config({"tenants": tenants}), 1_000)


def account_error(tenants: dict[str, Any]) -> str:
    """Returns the error for a pool of 1,000 bytes."""
    config = parse_config({"tenants": tenants})
    with pytest.raises(ConfigError) as raised:
        check_accounts(config, 1_000)
    return str(raised.value)


def test_reservations_that_do_not_fit_together_are_told() -> None:
    text = account_error({"acme": {"reserved": 601}, "zeta": {"reserved": "40%"}})
    assert text == (
        f"{WHERE}: the tenants reserve 1001 bytes together, more than the pool of 1000 "
        "bytes; lower them or raise cpu_bytes_to_use."
    )


@pytest.mark.parametrize(
    ("account", "limit", "reserved"),
    [
        ({"reserved": "50%", "limit": 499}, 499, 500),
        ({"reserved": 1_001}, 1_000, 1_001),
    ],
)
def test_a_limit_below_the_reservation_is_told(
    account: dict[str, Any], limit: int, reserved: int
) -> None:
    assert account_error({"acme": account}) == (
        f"{WHERE}: tenant 'acme' has limit = {limit} bytes below reserved = {reserved} "
        "bytes; raise the limit or lower the reservation."
    )


@pytest.mark.parametrize(
    ("extra_config", "expected"),
    [
        ({}, ()),
        ({"eviction_policy": "lru", "store_threshold": 2, "load_wait_ms": 5}, ()),
        ({"tenants": {"a": {"isolation": "shared", "store": False}}}, ()),
        ({"eviction_policy": "ctx"}, ("eviction_policy",)),
        ({"max_protected": "30%"}, ("max_protected",)),
        (
            {"tenants": {"a": {"weight": 1, "limit": "5%"}, "b": {"reserved": 1}}},
            ("tenants.a.limit", "tenants.a.weight", "tenants.b.reserved"),
        ),
    ],
)
def test_keys_without_effect_yet_are_named_where_they_are_given(
    extra_config: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert inert_keys(parse_config(extra_config)) == expected
