"""`kv_connector_extra_config`: every key, its default and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
from config_errors import WHERE, sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_ctx_offload.config import (
    OffloadConfig,
    Size,
    TenantConfig,
    parse_config,
)
from vllm_ctx_offload.core import account_terms
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.plan import check_accounts

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
        "reset_with_device_cache": False,
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
        ({"*": {"load": False}, "default": {}}, "default", TenantConfig()),
        ({"*": {"load": False}, "default": {}}, "stranger", TenantConfig(load=False)),
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


@pytest.mark.parametrize("percent", range(101))
def test_a_share_of_a_hundred_chunks_is_that_many_chunks(percent: int) -> None:
    """Multiplied as floats, 29 % of 100 would be 28."""
    config = parse_config({"max_protected": f"{percent}%"})
    assert config.max_protected.resolve(100) == percent


POOL = 1_000
CHUNK = 10


@pytest.mark.parametrize(
    "tenants",
    [
        {},
        {"acme": {"reserved": 600}, "zeta": {"reserved": "40%"}},
        {"acme": {"reserved": "50%", "limit": 500}},
        {"acme": {"reserved": POOL}},
        {"acme": {"reserved": CHUNK}},
        {"acme": {"reserved": "1%"}},
        {"acme": {"reserved": 0}, "zeta": {"reserved": "0%"}},
        {"acme": {"limit": CHUNK}},
        {"acme": {"limit": 0, "store": False}},
        {"acme": {"limit": 10_000}},
        {"*": {"reserved": "100%", "limit": "100%"}},
        {f"t{index}": {"reserved": "10%"} for index in range(10)},
    ],
)
def test_accounts_that_fit_the_pool_pass(tenants: dict[str, Any]) -> None:
    check_accounts(parse_config({"tenants": tenants}), POOL, CHUNK)


def account_error(tenants: dict[str, Any], pool_bytes: int = POOL) -> str:
    """Returns the error for a pool of 1,000 bytes in chunks of 10."""
    config = parse_config({"tenants": tenants})
    with pytest.raises(ConfigError) as raised:
        check_accounts(config, pool_bytes, CHUNK)
    return str(raised.value)


@pytest.mark.parametrize(
    ("tenants", "excess", "most", "size"),
    [
        ({"acme": {"reserved": 601}, "zeta": {"reserved": "40%"}}, 1, "acme", 601),
        ({"acme": {"reserved": "40%"}, "*": {"reserved": "61%"}}, 10, "*", 610),
        ({"acme": {"reserved": 1_001}}, 1, "acme", 1001),
    ],
)
def test_reservations_that_do_not_fit_together_are_told(
    tenants: dict[str, Any], excess: int, most: str, size: int
) -> None:
    assert account_error(tenants) == (
        f"{WHERE}: the tenants reserve {excess} B more than the pool's 1000 B, "
        f"'{most}' the most with {size} B; lower them or raise cpu_bytes_to_use."
    )


@pytest.mark.parametrize(
    ("account", "limit", "reserved"),
    [
        ({"reserved": "50%", "limit": 499}, 499, 500),
        ({"reserved": 1_001, "limit": "100%"}, 1_000, 1_001),
        ({"reserved": 10, "limit": 9, "store": False}, 9, 10),
    ],
)
def test_a_limit_below_the_reservation_is_told(
    account: dict[str, Any], limit: int, reserved: int
) -> None:
    assert account_error({"acme": account}) == (
        f"{WHERE}: tenant 'acme' has limit = {limit} B, {reserved - limit} B below its "
        "reservation; raise the limit or lower the reservation."
    )


@pytest.mark.parametrize("tenant", ["acme", "*", "default"])
@pytest.mark.parametrize(("limit", "num_bytes"), [(0, 0), (9, 9), ("0.9%", 9)])
def test_a_limit_below_one_chunk_is_told(
    tenant: str, limit: int | str, num_bytes: int
) -> None:
    assert account_error({tenant: {"limit": limit}}) == (
        f"{WHERE}: tenant '{tenant}' has limit = {num_bytes} B, {10 - num_bytes} B "
        "below one chunk; raise it, or set store to false."
    )


@pytest.mark.parametrize("tenant", ["acme", "*", "default"])
@pytest.mark.parametrize(
    ("reserved", "num_bytes"), [(1, 1), (9, 9), ("0.9%", 9), ("0.01%", 0)]
)
@pytest.mark.parametrize("more", [{}, {"store": False}, {"limit": "50%"}])
def test_a_reservation_below_one_chunk_is_told(
    tenant: str, reserved: int | str, num_bytes: int, more: dict[str, Any]
) -> None:
    """It would reserve nothing."""
    assert account_error({tenant: {"reserved": reserved, **more}}) == (
        f"{WHERE}: tenant '{tenant}' has reserved = {num_bytes} B, {10 - num_bytes} B "
        "below one chunk, so nothing would be reserved; raise it, or leave it out."
    )


@pytest.mark.parametrize(("share", "num_bytes"), [("0.9%", 9), ("0.01%", 0)])
def test_a_budget_below_one_chunk_is_told(share: str, num_bytes: int) -> None:
    config = parse_config({"max_protected": share})
    with pytest.raises(ConfigError) as raised:
        check_accounts(config, POOL, CHUNK)
    assert str(raised.value) == (
        f"{WHERE}: max_protected = {num_bytes} B of this pool, {10 - num_bytes} B "
        'below one chunk, so nothing could be protected; raise it, or give "0%".'
    )


@pytest.mark.parametrize("extra", [{}, {"max_protected": "0%"}])
def test_a_budget_that_nobody_set_or_that_is_none_passes(extra: dict[str, Any]) -> None:
    """30 % of three chunks is none."""
    check_accounts(parse_config(extra), 3 * CHUNK, CHUNK)


@pytest.mark.parametrize("text", ["0.9B", "0.0000001KiB", "0.5"])
def test_a_size_of_less_than_a_byte_is_told(text: str) -> None:
    assert "is not a size" in sentence({"cpu_bytes_to_use": text})
    told = sentence({"tenants": {"acme": {"reserved": text}}})
    assert "is neither a size nor a share" in told
    assert parse_config({"cpu_bytes_to_use": "0.0GiB"}).cpu_bytes_to_use == 0


def test_a_limit_in_percent_is_one_of_whole_chunks() -> None:
    """34 % of 29 bytes would be nearly a chunk, but of the two that fit it is 6."""
    assert "has limit = 6 B, 4 B below one chunk" in account_error(
        {"acme": {"limit": "34%"}}, pool_bytes=29
    )


@settings(deadline=None)
@given(
    pool_bytes=st.integers(1, 5_000),
    chunk_bytes=st.integers(1, 300),
    sizes=st.lists(
        st.tuples(*[st.integers(0, 5_000) | st.integers(0, 100).map("{}%".format)] * 2),
        min_size=1,
        max_size=4,
    ),
)
def test_what_passes_gives_accounts_that_fit_the_slots(
    pool_bytes: int, chunk_bytes: int, sizes: list[tuple[int | str, int | str]]
) -> None:
    tenants = {
        f"t{index}": {"reserved": reserved, "limit": limit}
        for index, (reserved, limit) in enumerate(sizes)
    }
    config = parse_config({"tenants": tenants})
    num_slots = pool_bytes // chunk_bytes
    try:
        check_accounts(config, pool_bytes, chunk_bytes)
    except ConfigError:
        return
    terms = account_terms(config, num_slots, chunk_bytes)
    for name, tenant in config.tenants.items():
        assert bool(terms[name].reserved) is not tenant.reserved.is_nothing
    assert sum(account.reserved for account in terms.values()) <= num_slots
    for account in terms.values():
        assert account.limit is None or max(account.reserved, 1) <= account.limit


@pytest.mark.parametrize("key", ["reserved", "limit", "weight"])
def test_sizes_of_the_wildcard_beside_a_declared_default_are_told(key: str) -> None:
    value = {"reserved": "1%", "limit": "9%", "weight": 1}[key]
    tenants = {"*": {key: value}, "default": {}}
    assert sentence({"tenants": tenants}) == (
        f"{WHERE}: tenants.*.{key} has no effect, because undeclared tenants share the "
        f"account of 'default', which is declared too; set {key} there."
    )


def test_what_else_the_wildcard_says_holds_beside_a_declared_default() -> None:
    wildcard = {"max_priority": 5, "max_ttl_s": 9, "isolation": "shared", "load": False}
    config = parse_config({"tenants": {"*": wildcard, "default": {"limit": "9%"}}})
    assert config.tenant("stranger") == TenantConfig(**wildcard)
