"""`policy_file`: the same keys from a file, in YAML or JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_errors import WHERE, sentence

from vllm_ctx_offload.config import (
    OffloadConfig,
    Size,
    TenantConfig,
    parse_config,
)
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.plan import check_accounts
from vllm_ctx_offload.text import printable

POLICY = {
    "tenants": {"acme": {"reserved": "4GiB", "weight": 2}, "*": {"load": False}},
    "tenant_from": ["lora"],
    "max_protected": "10%",
    "reset_with_device_cache": True,
    "load_wait_ms": 5,
}
AS_YAML = """
tenants:
  acme: {reserved: 4GiB, weight: 2}
  "*":
    load: false
tenant_from: [lora]
max_protected: 10%
reset_with_device_cache: true
load_wait_ms: 5
"""


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "policy"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize("text", [AS_YAML, json.dumps(POLICY)], ids=["yaml", "json"])
def test_yaml_and_json_are_read(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    assert parse_config({"policy_file": path}) == OffloadConfig(
        policy_file=path,
        tenants={
            "acme": TenantConfig(reserved=Size(4 * 1024**3), weight=2.0),
            "*": TenantConfig(load=False),
        },
        tenant_from=("lora",),
        max_protected=Size(0, 0.1),
        reset_with_device_cache=True,
        load_wait_ms=5.0,
    )


def test_the_file_wins_over_inline_values_and_leaves_the_others(tmp_path: Path) -> None:
    path = write(tmp_path, "load_wait_ms: 5\ntenants: {zeta: {}}")
    inline = {"load_wait_ms": 7, "max_protected": "1%", "tenants": {"acme": {}}}
    config = parse_config({**inline, "policy_file": path, "store_threshold": 2})
    assert config == OffloadConfig(
        policy_file=path,
        load_wait_ms=5.0,
        max_protected=Size(0, 0.01),
        tenants={"zeta": TenantConfig()},
        store_threshold=2,
    )


def test_an_error_in_the_file_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "load_wait_ms: -1")
    assert sentence({"policy_file": path}) == (
        f"{path}: 'load_wait_ms' = -1 must be greater than or equal to 0; use 0 to "
        "60000."
    )


LONG = "x" * 129
KEYS = "tenants, tenant_from, max_protected, reset_with_device_cache, load_wait_ms"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("tenant_from: []", "tenant_from is empty, so no request"),
        (
            f"tenants: {{{LONG}: {{}}}}",
            "tenants holds the name 'xxxxxxxxxxxxxxxxxxxx' of 129 characters; use",
        ),
        (
            'tenants: {"a\\u2028b": {}}',
            "tenants holds the name 'a\\u2028b' with the cha",
        ),
        ("tenants: {'*': {weight: 2}, default: {}}", "tenants.*.weight has no effect"),
        ("tenants: {acme: {weight: 0}}", "'tenants.acme.weight' = 0 must be greater"),
        ("tenants: {acme: {reservd: 1}}", "tenants.acme: unknown key 'reservd'; did "),
        ("tenants: {acme: }", "'tenants.acme' = None must be a mapping; use names"),
    ],
)
def test_every_fault_of_the_file_names_the_file(
    tmp_path: Path, text: str, rest: str
) -> None:
    path = write(tmp_path, text)
    assert sentence({"policy_file": path}).startswith(f"{path}: {rest}")


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("{acme: {reserved: 101}}", "the tenants reserve 1 B more than the pool's"),
        ("{acme: {reserved: 4}}", "tenant 'acme' has reserved = 4 B, 1 B below one ch"),
        ("{acme: {limit: 4}}", "tenant 'acme' has limit = 4 B, 1 B below one chunk"),
        (
            "{acme: {reserved: 9, limit: 8}}",
            "tenant 'acme' has limit = 8 B, 1 B below its",
        ),
    ],
)
def test_accounts_of_the_file_that_do_not_fit_name_the_file(
    tmp_path: Path, text: str, rest: str
) -> None:
    path = write(tmp_path, f"tenants: {text}")
    config = parse_config({"policy_file": path})
    with pytest.raises(ConfigError) as raised:
        check_accounts(config, pool_bytes=100, chunk_bytes=5)
    assert str(raised.value).startswith(f"{path}: {rest}")


def test_a_budget_of_the_file_that_does_not_fit_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "max_protected: 1%")
    config = parse_config({"policy_file": path})
    with pytest.raises(ConfigError) as raised:
        check_accounts(config, pool_bytes=100, chunk_bytes=5)
    assert str(raised.value).startswith(f"{path}: max_protected = 1 B of this pool, ")


def test_inline_accounts_beside_a_file_name_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, "load_wait_ms: 1")
    text = sentence({"policy_file": path, "tenants": {LONG: {}}})
    assert text.startswith(f"{WHERE}: tenants holds the name ")
    accounts = {"acme": {"reserved": 101}}
    config = parse_config({"policy_file": path, "tenants": accounts})
    with pytest.raises(ConfigError, match=f"^{WHERE}: the tenants reserve 1 B more"):
        check_accounts(config, pool_bytes=100, chunk_bytes=5)


@pytest.mark.parametrize(
    "text",
    [
        "tenants: {acme: {weight: 1}, acme: {weight: 2}}",
        "tenants:\n  a: {}\n  acme: {}\n  'acme': {}",
        '{"tenants": {"x": {}}, "acme": 1, "acme": 1}',
        "tenants: {x: {acme: 1, acme: 1}}",
    ],
)
def test_a_name_that_is_declared_twice_is_an_error(tmp_path: Path, text: str) -> None:
    """YAML would silently take the last."""
    path = write(tmp_path, text)
    text = sentence({"policy_file": path})
    assert text.startswith(f"policy_file '{path}' can't be read (the key 'acme' occurs")


def test_an_inline_error_beside_a_file_names_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, "load_wait_ms: 1")
    text = sentence({"policy_file": path, "store_threshold": -1})
    assert text.startswith(f"{WHERE}: 'store_threshold' = -1 ")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("tenant", "did you mean 'tenants'?"),
        ("1", f"remove it, or use {KEYS}."),
        ("cpu_bytes_to_use", f"remove it, or use {KEYS}."),
    ],
)
def test_unknown_keys_of_the_file_are_errors(
    tmp_path: Path, key: str, hint: str
) -> None:
    """CASES 42: keys that only the inline configuration takes are unknown here."""
    path = write(tmp_path, f"{key}: 5")
    assert sentence({"policy_file": path}) == f"{path}: unknown key '{key}'; {hint}"


@pytest.mark.parametrize("text", ["", "[]", "tenants", "5", "null", "# nothing"])
def test_a_file_without_a_mapping_is_an_error(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    assert sentence({"policy_file": path}) == (
        f"policy_file '{path}' holds no mapping; start it with 'tenants:'."
    )


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\xff",
        "a: 2001-99-99",
        "[" * 1_000,
    ],
    ids=["utf-8", "date", "deep"],
)
def test_a_file_that_can_not_be_parsed_is_an_error(
    tmp_path: Path, text: str | bytes
) -> None:
    path = write(tmp_path, text)
    text = sentence({"policy_file": path})
    assert text.startswith(f"policy_file '{path}' can't be read (")
    assert text.endswith(
        "; give the path of a YAML or JSON file that every vLLM process can read."
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tenants: {", "line 1, column 11: expected the node content, but found "),
        ("a: b: c", "line 1, column 5: mapping values are not allowed here)"),
        ("tenants:\n  *: {}", "line 2, column 4: expected alphabetic or numeric "),
        ("tenants:\n  a: {x: 1\n  b: {}", "line 3, column 4: expected ',' or '}',"),
        ("!!python/object:os.system {}", "line 1, column 1: could not determine a "),
    ],
)
def test_a_fault_of_yaml_is_told_by_its_line(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = write(tmp_path, text)
    text = sentence({"policy_file": path})
    assert text.startswith(f"policy_file '{path}' can't be read ({reason}")
    fix = 'mend that line, or the one before; names such as "*" need quotes.'
    assert text.endswith(f"); {fix}")
    assert "\n" not in text


@pytest.mark.parametrize("path", ["", "\0", "nowhere/policy.yaml", "x" * 5_000])
def test_a_file_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        parse_config({"policy_file": path})
    start = f"policy_file '{printable(str(Path(path)))}' can't be read ("
    assert str(raised.value).startswith(start)
