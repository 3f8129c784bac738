"""`kv_connector_extra_config`: every key given wrongly, and what an operator reads."""

from __future__ import annotations

from typing import Any

import pytest
from config_errors import WHERE, sentence

from vllm_ctx_offload.config import OffloadConfig, TenantConfig, parse_config

HUGE = 2**20000


def name_of(value: object) -> str | None:
    """Python refuses to print numbers of thousands of digits, as in a test's name."""
    return "huge" if isinstance(value, int) and value.bit_length() > 9_000 else None


SIZE_RULE = 'is not a size; use a number of bytes or text such as "8GiB".'
SHARE_RULE = 'is not a share of the pool; use a share of the pool such as "25%".'
INT_RULE = "must be a valid integer"
MAPPING_RULE = (
    'must be a mapping; use names with their fields, as {"acme": {"reserved": "4GiB"}}.'
)
FLAG_RULE = "must be a valid boolean; use true or false."


@pytest.mark.parametrize(
    ("key", "value", "shown", "rule"),
    [
        *[
            ("cpu_bytes_to_use", value, repr(value), SIZE_RULE)
            for value in (-1, "-1", 1.5, True, [], {}, "8XB", "GiB", "", "1e9", "25%")
        ],
        ("cpu_bytes_to_use", float("nan"), "nan", SIZE_RULE),
        ("cpu_bytes_to_use", float("inf"), "inf", SIZE_RULE),
        ("cpu_bytes_to_use", 2**63, str(2**63), SIZE_RULE),
        ("cpu_bytes_to_use", HUGE, "int too long to show", SIZE_RULE),
        ("cpu_bytes_to_use", "9" * 5_000, "'" + "9" * 79, SIZE_RULE),
        ("block_size", 0, "0", "must be greater than 0; use tokens, as 256."),
        *[
            ("block_size", value, repr(value), f"{INT_RULE}; use tokens, as 256.")
            for value in ("16", 16.0, True, [])
        ],
        ("blocks_per_chunk", 0, "0", "must be greater than 0; use 1 or more."),
        ("blocks_per_chunk", "1", "'1'", f"{INT_RULE}; use 1 or more."),
        *[
            (key, value, repr(value), FLAG_RULE)
            for key in ("offload_prompt_only", "reset_with_device_cache")
            for value in ("yes", 1, None)
        ],
        (
            *("store_threshold", -1, "-1"),
            "must be greater than or equal to 0; use 0 for no reuse filter.",
        ),
        (
            *("max_tracker_size", 0, "0"),
            "must be greater than 0; use 1 or more keys, as 64000.",
        ),
        (
            *("max_tracker_size", 10**12, "1000000000000"),
            "must be less than or equal to 100000000; use 1 or more keys, as 64000.",
        ),
        *[
            (
                *("eviction_policy", value, repr(value)),
                "must be 'ctx' or 'lru'; use \"lru\" to ignore every hint and tenant.",
            )
            for value in ("lruu", "LRU", None, 1)
        ],
        *[
            ("tenants", value, repr(value), MAPPING_RULE)
            for value in (None, [], "acme")
        ],
        (
            *("policy_file", 5, "5"),
            "must be text; use the path of a YAML or JSON file.",
        ),
        *[
            (
                *("tenant_from", value, repr(value)),
                'must be a list; use a list such as ["kv_transfer_params"].',
            )
            for value in ("lora", None, {})
        ],
        *[
            ("max_protected", value, repr(value), SHARE_RULE)
            for value in (0.3, 30, "30", "101%", "-1%", None, "8GiB", "9" * 30 + "%")
        ],
        *[
            (
                *("load_wait_ms", value, repr(value)),
                "must be greater than or equal to 0; use 0 to 60000.",
            )
            for value in (-1, float("-inf"))
        ],
        *[
            (
                *("load_wait_ms", value, repr(value)),
                "must be less than or equal to 60000; use 0 to 60000.",
            )
            for value in (60_001, float("inf"), float("nan"))
        ],
        ("load_wait_ms", "50", "'50'", "must be a valid number; use 0 to 60000."),
    ],
    ids=name_of,
)
def test_a_bad_value_is_told_with_its_rule_and_the_fix(
    key: str, value: Any, shown: str, rule: str
) -> None:
    """CASES 42 for the policy's name."""
    assert sentence({key: value}) == f"{WHERE}: '{key}' = {shown} {rule}"


ISOLATION_RULE = (
    "must be 'private' or 'shared'; use \"shared\" to let tenants hit each other's "
    "chunks."
)
WEIGHT_RULE = "must be greater than or equal to 0.000001; use a weight above 0, as 1."
EITHER_RULE = (
    'is neither a size nor a share; use a number of bytes or text such as "8GiB", or '
    'use a share of the pool such as "25%".'
)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *[("reserved", value, EITHER_RULE) for value in (None, -1, "x", True, [])],
        *[("limit", value, EITHER_RULE) for value in (-1, "lots", 0.5)],
        *[(key, "101%", SHARE_RULE) for key in ("reserved", "limit")],
        (
            *("weight", float("inf")),
            "must be less than or equal to 1000000000; use a weight above 0, as 1.",
        ),
        *[("weight", value, WEIGHT_RULE) for value in (0, -1, 5e-324)],
        ("weight", "1", "must be a valid number; use a weight above 0, as 1."),
        ("max_priority", 101, "must be less than or equal to 100; use 0 to 100."),
        ("max_priority", -1, "must be greater than or equal to 0; use 0 to 100."),
        ("max_priority", 5.5, f"{INT_RULE}; use 0 to 100."),
        ("max_ttl_s", 0, "must be greater than 0; use seconds above 0, as 3600."),
        (
            *("max_ttl_s", float("nan")),
            "must be greater than 0; use seconds above 0, as 3600.",
        ),
        ("isolation", "privat", ISOLATION_RULE),
        ("store", "no", FLAG_RULE),
        ("load", 0, FLAG_RULE),
    ],
)
@pytest.mark.parametrize("tenant", ["acme", "*", "functional", "a.b", "[key]"])
def test_a_bad_tenant_field_is_told_with_the_tenants_name(
    tenant: str, field: str, value: Any, rule: str
) -> None:
    text = sentence({"tenants": {tenant: {field: value}}})
    assert text == f"{WHERE}: 'tenants.{tenant}.{field}' = {value!r} {rule}"


@pytest.mark.parametrize("tenant", ["acme", "[key]"])
@pytest.mark.parametrize("account", [None, [], "shared", 1])
def test_an_account_that_is_no_mapping_is_told(tenant: str, account: Any) -> None:
    assert sentence({"tenants": {tenant: account}}) == (
        f"{WHERE}: 'tenants.{tenant}' = {account!r} must be a mapping; use names with "
        'their fields, as {"acme": {"reserved": "4GiB"}}.'
    )


def test_a_tenants_name_that_is_no_text_is_told() -> None:
    assert sentence({"tenants": {1: {}}}) == (
        f"{WHERE}: 'tenants.1' = 1 must be text; use names with their fields, as "
        '{"acme": {"reserved": "4GiB"}}.'
    )


@pytest.mark.parametrize("name", ["", "x" * 129])
def test_a_tenants_name_has_1_to_128_characters(name: str) -> None:
    parse_config({"tenants": {"x": {}, "x" * 128: {}}})
    assert sentence({"tenants": {name: {}}}) == (
        f"{WHERE}: tenants holds the name '{name[:20]}' of {len(name)} characters; "
        "use 1 to 128."
    )


@pytest.mark.parametrize(
    ("name", "shown", "code"),
    [
        ("a\u2028b", "a\\u2028b", "2028"),
        ("a\u2029", "a\\u2029", "2029"),
        ("\x85", "\\x85", "0085"),
        ("x\ny", "x\\ny", "000A"),
        ("\x0b\x0c", "\\x0b\\x0c", "000B"),
        ("\x1b[31m", "\\x1b[31m", "001B"),
        ("\ud800", "\\ud800", "D800"),
        ("\u202eemca", "\\u202eemca", "202E"),
        ("a\u200b", "a\\u200b", "200B"),
        ("\U000e0041", "\\U000e0041", "E0041"),
    ],
)
def test_a_tenants_name_is_printable(name: str, shown: str, code: str) -> None:
    assert sentence({"tenants": {"acme": {}, name: {}}}) == (
        f"{WHERE}: tenants holds the name '{shown}' with the character U+{code}, which "
        "not every metric, log and terminal can carry; use printable characters."
    )


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("tenantz", "tenants"),
        ("store_treshold", "store_threshold"),
        ("evictionpolicy", "eviction_policy"),
        ("cpu_bytes", "cpu_bytes_to_use"),
        ("blocks_per_chunks", "blocks_per_chunk"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_name(
    key: str, nearest: str
) -> None:
    """CASES 42."""
    text = sentence({key: "anything"})
    assert text == f"{WHERE}: unknown key '{key}'; did you mean '{nearest}'?"


@pytest.mark.parametrize("key", ["zzz", 1])
def test_an_unknown_key_like_no_other_is_an_error_with_all_names(key: Any) -> None:
    """CASES 42."""
    names = ", ".join(OffloadConfig.model_fields)
    text = sentence({key: 1})
    assert text == f"{WHERE}: unknown key '{key}'; remove it, or use {names}."


@pytest.mark.parametrize("key", ["reservd", "re.served"])
def test_an_unknown_tenant_field_is_an_error_with_the_nearest_name(key: str) -> None:
    """CASES 42."""
    assert sentence({"tenants": {"a.b": {key: 1}}}) == (
        f"{WHERE}: tenants.a.b: unknown key '{key}'; did you mean 'reserved'?"
    )


def test_an_unknown_tenant_field_like_no_other_is_an_error_with_all_names() -> None:
    names = ", ".join(TenantConfig.model_fields)
    assert sentence({"tenants": {"acme": {"[key]": 1}}}) == (
        f"{WHERE}: tenants.acme: unknown key '[key]'; remove it, or use {names}."
    )


def test_a_source_that_is_unknown_is_told_with_the_known_ones() -> None:
    """CASES 42."""
    assert sentence({"tenant_from": ["lora", "salt"]}) == (
        f"{WHERE}: 'tenant_from.1' = 'salt' must be 'kv_transfer_params', "
        "'cache_salt' or 'lora'; use a list such as [\"kv_transfer_params\"]."
    )


def test_no_source_at_all_is_an_error() -> None:
    assert sentence({"tenant_from": []}) == (
        f"{WHERE}: tenant_from is empty, so no request could have a tenant; leave it "
        'out or give ["kv_transfer_params"].'
    )


def test_two_chunk_sizes_are_an_error() -> None:
    assert sentence({"block_size": 64, "blocks_per_chunk": 2}) == (
        f"{WHERE}: block_size = 64 and blocks_per_chunk = 2 both set the chunk size; "
        "give only one."
    )
