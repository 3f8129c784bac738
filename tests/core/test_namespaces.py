"""P6: no choice of names lets a private tenant's lookup see another's keys."""

from __future__ import annotations

import itertools

import pytest
from core.counted import count_operations
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_probe import LOOKUP_MISS, make_manager, store

from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.context import ReqContext, build_req_context
from vllm_ctx_offload.core import AccountTerms
from vllm_ctx_offload.scheduler.request_state import make_key_prefix

# Letters that joined names would be told apart by, and that lengths are written with.
NAMES = st.text("ab\x00\x01/:|é*\ud800", min_size=1, max_size=4)


def context(name: str | None, tenants: dict[str, object]) -> ReqContext:
    params = None if name is None else {"ctx": {"tenant": name}}
    return build_req_context(parse_config({"tenants": tenants}), "r", params)


def keys(req_context: ReqContext, hashes: list[bytes], group: int = 0) -> list[bytes]:
    return [make_key_prefix(req_context.namespace, group) + h for h in hashes]


@settings(deadline=None, max_examples=150)
@given(
    names=st.lists(NAMES, min_size=2, max_size=5, unique=True),
    num_declared=st.integers(0, 5),
    hashes=st.lists(
        st.binary(min_size=1, max_size=4), min_size=1, max_size=4, unique=True
    ),
)
def test_a_private_tenant_sees_its_own_keys_only(
    names: list[str], num_declared: int, hashes: list[bytes]
) -> None:
    """CASES 29: declared or not, and whatever the hashes are."""
    tenants: dict[str, object] = {"*": {"isolation": "private"}}
    declared = [name for name in names[:num_declared] if name.isprintable()]
    tenants.update({name: {} for name in declared if name != "*"})
    contexts = [context(name, tenants) for name in names]
    for owner, other in itertools.permutations(contexts, 2):
        manager = make_manager(8)
        stored = store(manager, keys(owner, hashes), owner)
        assert manager.lookup(stored, owner).num_ready == len(hashes)
        wanted = keys(other, hashes)
        assert manager.lookup(wanted, other) == LOOKUP_MISS
        assert not {*stored} & {*wanted}
        # Nor does storing them help, or take anything from their owner.
        assert store(manager, wanted, other) == wanted
        assert manager.lookup(stored, owner).num_ready == len(hashes)


@settings(deadline=None, max_examples=100)
@given(
    names=st.lists(NAMES, min_size=2, max_size=2, unique=True),
    groups=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    hashes=st.tuples(st.binary(max_size=9), st.binary(max_size=9)),
)
def test_prefixes_of_two_namespaces_or_groups_never_lead_to_one_key(
    names: list[str], groups: tuple[int, int], hashes: tuple[bytes, bytes]
) -> None:
    """CASES 29: framed by length, so no hash can make up for a difference."""
    one, other = (context(name, {"*": {}}) for name in names)
    (key,) = keys(one, [hashes[0]], groups[0])
    for req_context, group in ((other, groups[0]), (other, groups[1])):
        assert [key] != keys(req_context, [hashes[1]], group)
    if groups[0] != groups[1]:
        assert [key] != keys(one, [hashes[1]], groups[1])


def test_the_shared_namespace_is_common_and_apart_from_all_private_ones() -> None:
    tenants: dict[str, object] = {"a": {"isolation": "shared"}, "b": {}}
    shared = [context(name, tenants) for name in ("a", None, "undeclared")]
    manager = make_manager(4)
    stored = store(manager, keys(shared[0], [b"h"]), shared[0])
    assert [keys(one, [b"h"]) for one in shared] == [stored] * 3
    private = context("b", tenants)
    assert manager.lookup(keys(private, [b"h"]), private) == LOOKUP_MISS


@pytest.mark.parametrize("num_slots", [10, 5_000])
def test_a_miss_takes_no_longer_for_the_keys_of_others(num_slots: int) -> None:
    """Nothing can be told from it about what others hold."""
    tenants: dict[str, object] = {"a": {}, "b": {}}
    a, b = context("a", tenants), context("b", tenants)
    hashes = [b"%d" % index for index in range(num_slots)]
    wanted = keys(b, hashes)
    work = []
    for holder in (None, a):
        manager = make_manager(num_slots, accounts={"a": AccountTerms()})
        if holder is not None:
            store(manager, keys(a, hashes), a)
        work.append(count_operations(lambda m=manager: m.lookup(wanted, b)))
    assert work[0] == work[1] < 40
