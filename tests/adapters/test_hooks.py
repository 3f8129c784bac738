"""Our hooks against the installed vLLM's interface."""

from __future__ import annotations

import inspect

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
)

from vllm_ctx_offload.connector import CtxOffloadConnector
from vllm_ctx_offload.errors import ConfigError

DEFINED = sorted(
    name
    for name in vars(CtxOffloadConnector)
    if not name.startswith("_") and name != "request_finished_all_groups"
)

# By a release of the supported range.
ADDED_LATER = {"unregister_kv_caches"}  # 0.33


def parameters(function: object) -> list[inspect.Parameter]:
    assert callable(function)
    return list(inspect.signature(function).parameters.values())


def takes_anything(params: list[inspect.Parameter]) -> bool:
    kinds = {parameter.kind for parameter in params}
    return inspect.Parameter.VAR_POSITIONAL in kinds


@pytest.mark.parametrize("name", DEFINED)
def test_hook_exists_in_vllm_with_the_same_parameters(name: str) -> None:
    """A hook that vLLM does not know would never be called."""
    if name in ADDED_LATER and not hasattr(KVConnectorBase_V1, name):
        pytest.skip(f"this release of vLLM has no {name}")
    theirs = inspect.getattr_static(KVConnectorBase_V1, name)
    ours = inspect.getattr_static(CtxOffloadConnector, name)
    assert type(theirs) is type(ours), "a method is no property"
    if isinstance(theirs, property):
        return
    our_params = parameters(getattr(CtxOffloadConnector, name))
    if takes_anything(our_params):
        return
    their_params = parameters(getattr(KVConnectorBase_V1, name))
    # vLLM passes by position or by name: both have to fit.
    assert [(p.name, p.kind) for p in our_params] == [
        (p.name, p.kind) for p in their_params
    ]


def test_marker_of_the_hybrid_allocator_brings_its_hook() -> None:
    """CONTRACT: a connector that is no SupportsHMA is refused by default."""
    assert issubclass(CtxOffloadConnector, SupportsHMA)
    ours = parameters(CtxOffloadConnector.request_finished_all_groups)
    theirs = parameters(SupportsHMA.request_finished_all_groups)
    assert [p.name for p in ours] == [p.name for p in theirs]


def test_constructor_has_the_three_names_that_vllm_looks_for() -> None:
    names = [parameter.name for parameter in parameters(CtxOffloadConnector.__init__)]
    assert names == ["self", "vllm_config", "role", "kv_cache_config"]


def test_no_abstract_hook_is_missing() -> None:
    assert not inspect.isabstract(CtxOffloadConnector)


def test_only_vllms_base_classes_are_subclassed() -> None:
    """What keeps one package working on many releases."""
    assert CtxOffloadConnector.__bases__ == (KVConnectorBase_V1, SupportsHMA)


def test_a_wrong_setting_is_said_where_vllm_asks_first() -> None:
    """vLLM's configuration asks this, with CUDA graphs, before it loads a model."""
    asks = CtxOffloadConnector.requires_piecewise_for_cudagraph
    assert asks({"tenants": {"acme": {}}}) is False
    with pytest.raises(ConfigError, match="unknown key 'tenant'; did you mean"):
        asks({"tenant": {"acme": {}}})
