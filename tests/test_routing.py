"""Which tenant a request belongs to, and which keys it can hit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers import make_req_context
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ctx_offload.config import OffloadConfig, parse_config
from vllm_ctx_offload.context import build_req_context
from vllm_ctx_offload.scheduler.request_state import make_key_prefix

TWO = {"acme": {}, "open": {"isolation": "shared"}}
SHARED = {"isolation": "shared"}
PRIVATE_REST = {**TWO, "*": {"isolation": "private"}}


@pytest.mark.parametrize(
    ("tenants", "name", "expected"),
    [
        ({}, None, ("default", b"")),
        ({}, "acme", ("default", b"")),
        (TWO, None, ("default", b"")),
        (TWO, "acme", ("acme", b"acme")),
        (TWO, "open", ("open", b"")),
        (TWO, "stranger", ("default", b"")),
        (TWO, "default", ("default", b"")),
        (TWO, "*", ("default", b"")),
        (PRIVATE_REST, "acme", ("acme", b"acme")),
        (PRIVATE_REST, None, ("default", b"default")),
        (PRIVATE_REST, "default", ("default", b"default")),
        (PRIVATE_REST, "stranger", ("default", b"stranger")),
        (PRIVATE_REST, "*", ("default", b"*")),
        (PRIVATE_REST, "\ud800", ("default", b"\xed\xa0\x80")),
        ({"default": {}}, None, ("default", b"default")),
        ({"default": {}}, "stranger", ("default", b"stranger")),
        ({**PRIVATE_REST, "default": SHARED}, None, ("default", b"")),
        ({**PRIVATE_REST, "default": SHARED}, "stranger", ("default", b"stranger")),
        ({"ümlaut": {}}, "ümlaut", ("ümlaut", "ümlaut".encode())),
    ],
)
def test_a_request_belongs_to_a_declared_tenant_or_to_default(
    tenants: dict[str, Any], name: str | None, expected: tuple[str, bytes]
) -> None:
    context = make_req_context(config=parse_config({"tenants": tenants}), tenant=name)
    assert (context.tenant, context.namespace) == expected
    assert context.rejected == ()


def test_the_wildcard_caps_undeclared_tenants() -> None:
    config = parse_config({"tenants": {"*": {"max_priority": 10, "load": False}}})
    hints = make_req_context(config=config, tenant="stranger", priority=50).hints
    assert (hints.priority, hints.load) == (10, False)


SOURCES = ["kv_transfer_params", "cache_salt", "lora"]


@pytest.mark.parametrize(
    ("tenant_from", "expected"),
    [
        (["kv_transfer_params"], "by_params"),
        (["cache_salt"], "by_salt"),
        (["lora"], "by_lora"),
        (["lora", "cache_salt"], "by_lora"),
        (SOURCES, "by_params"),
    ],
)
def test_the_first_source_in_the_configured_order_names_the_tenant(
    tenant_from: list[str], expected: str
) -> None:
    tenants = {name: {} for name in ("by_params", "by_salt", "by_lora")}
    config = parse_config({"tenants": tenants, "tenant_from": tenant_from})
    context = build_req_context(
        config,
        "req",
        {"ctx": {"tenant": "by_params"}},
        cache_salt="by_salt",
        lora_name="by_lora",
    )
    assert (context.tenant, context.namespace) == (expected, expected.encode())


@pytest.mark.parametrize("bad", [None, "", "x" * 129, 5])
def test_a_source_without_a_good_name_is_passed_over(bad: Any) -> None:
    config = parse_config({"tenants": {"salty": {}}, "tenant_from": SOURCES})
    params = {"ctx": {"tenant": bad}}
    context = build_req_context(config, "req", params, cache_salt="salty")
    assert context.tenant == "salty"
    assert len(context.rejected) == (bad is not None)


def test_a_source_that_is_not_configured_is_not_looked_at() -> None:
    context = build_req_context(
        parse_config({"tenants": TWO}), "req", None, cache_salt="acme", lora_name="acme"
    )
    assert context == build_req_context(OffloadConfig(), "req", None)


NAMESPACES = st.binary(max_size=8) | st.sampled_from(
    [b"", b"\0", b"\0\0", b"\0\x01", b"a", b"a\0", b"a\0\0", b"\0\x01a\0", b":", b"/"]
)
HASHES = st.binary(max_size=8)


@settings(deadline=None)
@given(
    one=st.tuples(NAMESPACES, st.integers(0, 3), HASHES),
    other=st.tuples(NAMESPACES, st.integers(0, 3), HASHES),
)
def test_keys_are_equal_only_where_namespace_group_and_hash_are(
    one: tuple[bytes, int, bytes], other: tuple[bytes, int, bytes]
) -> None:
    """CASES 29."""
    keys = [make_key_prefix(ns, group) + hash_ for ns, group, hash_ in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"ab", b"c"), (b"a", b"bc")),
        ((b"", b"\0\x01a\0"), (b"a", b"")),
        ((b"a", b"\0b"), (b"a\0", b"b")),
        ((b"acme", b""), (b"", b"acme")),
        ((b"a" * 255, b""), (b"a" * 256, b"")),
        ((b"a" * 512, b"x"), (b"a" * 511, b"ax")),
    ],
)
def test_no_choice_of_names_makes_two_prefixes_alike(
    one: tuple[bytes, bytes], other: tuple[bytes, bytes]
) -> None:
    """CASES 29: nor is one ever the beginning of the other."""
    first, second = (make_key_prefix(ns, 0) for ns, _ in (one, other))
    assert first + one[1] != second + other[1]
    assert not first.startswith(second)
    assert not second.startswith(first)


LOOKALIKES = [
    *("default", "default\0", "\0default", "Default", " default", "default "),
    *("*", "**", "acme", "acme/", "acme:x", "acme\0x", "acme\nx", "a", "a\0", "\0"),
    *("\0\x04acme", "\0\0", ".", "..", "/", "b''", "None", "null", "0", "61"),
    *("\xe9", "e\u0301", "\u212b", "\xc5", "A\u030a", "\u0430cme", "\u200bacme"),
    *("\U0001f4be", "\ud83d\udcbe", "\ud83d", "\udcbe", "\xff", "\u0100"),
    *("x" * 127, "x" * 128, "\U0001f4be" * 127, "\U0001f4be" * 128, "\0" * 128),
]


@pytest.mark.parametrize("wildcard", [True, False], ids=["undeclared", "declared"])
def test_names_that_look_alike_have_namespaces_of_their_own(wildcard: bool) -> None:
    """CASES 29: separators, NUL, unicode forms, the longest names, `default`.

    A name that is not printable can only be an undeclared one.
    """
    declared = [name for name in LOOKALIKES if name != "*" and name.isprintable()]
    names = ["*"] if wildcard else declared
    config = parse_config({"tenants": {name: {} for name in names}})
    asked = LOOKALIKES if wildcard else names
    namespaces = [make_req_context(config=config, tenant=n).namespace for n in asked]
    assert len(set(namespaces)) == len(set(asked)) == len(asked)
    prefixes = [make_key_prefix(namespace, 0) for namespace in namespaces]
    for one, other in itertools.permutations(prefixes, 2):
        assert not one.startswith(other)


@pytest.mark.parametrize("source", ["kv_transfer_params", "cache_salt", "lora"])
def test_a_name_is_the_same_tenant_wherever_it_comes_from(source: str) -> None:
    config = parse_config({"tenants": {"acme": {}}, "tenant_from": [source]})
    context = build_req_context(
        config, "r", {"ctx": {"tenant": "acme"}}, cache_salt="acme", lora_name="acme"
    )
    assert (context.tenant, context.namespace) == ("acme", b"acme")


@pytest.mark.parametrize("name", ["x" * 129, "\U0001f4be" * 129, "default" * 100])
def test_a_name_that_is_too_long_is_no_tenant_and_never_cut_to_another(
    name: str,
) -> None:
    """It gets what a request without a name gets, not what its first part would."""
    tenants = {name[:128]: {}, "*": {}}
    context = make_req_context(config=parse_config({"tenants": tenants}), tenant=name)
    assert (context.tenant, context.namespace) == ("default", b"default")
    assert [tuple(hint) for hint in context.rejected] == [("tenant", "length")]


@pytest.mark.parametrize("shared", ["acme", "default", "*"])
def test_a_private_tenant_is_apart_from_the_shared_namespace(shared: str) -> None:
    config = parse_config({"tenants": {"zeta": {}, shared: SHARED}})
    asked = "stranger" if shared == "*" else shared
    assert make_req_context(config=config, tenant=asked).namespace == b""
    assert make_req_context(config=config, tenant="zeta").namespace == b"zeta"


NAMES = st.text(st.characters(), min_size=1, max_size=128)


@settings(deadline=None)
@given(one=NAMES, other=NAMES)
def test_private_tenants_of_different_names_never_share_a_namespace(
    one: str, other: str
) -> None:
    """CASES 29, with lone surrogates and every plane."""
    config = parse_config({"tenants": {"*": {"isolation": "private"}}})
    namespaces = {
        make_req_context(config=config, tenant=n).namespace for n in (one, other)
    }
    assert len(namespaces) == len({one, other})
    assert b"" not in namespaces
    for namespace in namespaces:
        assert make_key_prefix(namespace, 0)[2:-1] == namespace
