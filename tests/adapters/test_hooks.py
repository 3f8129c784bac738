"""Our hooks against the installed vLLM's interface."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import Any, Final

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
# Hooks that some supported releases do not have, which is known and looked after.
NOT_EVERYWHERE: Final = (
    "get_transfer_results",  # from 0.30 on
    "may_load_async",  # from 0.34 on
    "supports_lookahead_block_hashes",  # from 0.34 on
    "unregister_kv_caches",  # from 0.33 on
)


def parameters(function: object) -> list[inspect.Parameter]:
    assert callable(function)
    return list(inspect.signature(function).parameters.values())


def signature(params: list[inspect.Parameter]) -> str:
    # vLLM passes by position or by name: both have to fit.
    return ", ".join(
        str(p.replace(annotation=p.empty, default=p.empty)) for p in params
    )


def takes_anything(params: list[inspect.Parameter]) -> bool:
    kinds = {parameter.kind for parameter in params}
    return inspect.Parameter.VAR_POSITIONAL in kinds


def disagreement(base: type, name: str) -> str | None:
    """Returns what is wrong with a hook of ours in a line that names it."""
    theirs: Any = inspect.getattr_static(base, name, None)
    ours: Any = inspect.getattr_static(CtxOffloadConnector, name)
    if theirs is None:
        if name in NOT_EVERYWHERE:
            return None
        return f"{name}: this vLLM has no such hook, so it would never be called"
    if type(theirs) is not type(ours):
        kinds = (type(ours).__name__, type(theirs).__name__)
        return f"{name}: ours is a {kinds[0]}, vLLM's a {kinds[1]}"
    if isinstance(theirs, property):
        return None
    our_params = parameters(getattr(CtxOffloadConnector, name))
    their_params = parameters(getattr(base, name))
    found, wanted = signature(our_params), signature(their_params)
    if takes_anything(our_params) or found == wanted:
        return None
    return f"{name}: ours takes ({found}), vLLM passes ({wanted})"


def missing_hook(base: Any) -> str | None:
    """Returns a line that names the hooks that vLLM wants and we lack."""
    missing = sorted(base.__abstractmethods__ - vars(CtxOffloadConnector).keys())
    return (
        f"{', '.join(missing)}: vLLM wants it, and it is missing" if missing else None
    )


def fail_with(line: str | None) -> None:
    if line is not None:
        pytest.fail(line, pytrace=False)


@pytest.mark.parametrize("name", DEFINED)
def test_hook_exists_in_vllm_with_the_same_parameters(name: str) -> None:
    """A hook that vLLM does not know would never be called."""
    fail_with(disagreement(KVConnectorBase_V1, name))


def test_no_abstract_hook_is_missing() -> None:
    fail_with(missing_hook(KVConnectorBase_V1))
    assert not inspect.isabstract(CtxOffloadConnector)


class RenamedParameter(KVConnectorBase_V1):
    def get_num_new_matched_tokens(self, request: Any, num_local_tokens: int) -> Any:
        """`num_computed_tokens` of today."""


class MethodNow(KVConnectorBase_V1):
    def requires_kv_delivery(self) -> bool:  # type: ignore[override]
        raise NotImplementedError


class NewHook(KVConnectorBase_V1):
    @abc.abstractmethod
    def defragment(self) -> None: ...


def without(name: str) -> type:
    hooks = {key: hook for key, hook in vars(KVConnectorBase_V1).items() if key != name}
    hooks.pop("__dict__", None)
    hooks.pop("__weakref__", None)
    return type("NextRelease", (), hooks)


@pytest.mark.parametrize(
    ("say", "line"),
    [
        (
            lambda: disagreement(RenamedParameter, "get_num_new_matched_tokens"),
            (
                "get_num_new_matched_tokens: ours takes (self, request, "
                "num_computed_tokens), vLLM passes (self, request, num_local_tokens)"
            ),
        ),
        (
            lambda: disagreement(without("take_events"), "take_events"),
            "take_events: this vLLM has no such hook, so it would never be called",
        ),
        (
            lambda: disagreement(MethodNow, "requires_kv_delivery"),
            "requires_kv_delivery: ours is a property, vLLM's a function",
        ),
        (
            lambda: missing_hook(NewHook),
            "defragment: vLLM wants it, and it is missing",
        ),
        (
            lambda: disagreement(
                without("get_transfer_results"), "get_transfer_results"
            ),
            None,
        ),
    ],
    ids=["renamed", "removed", "no property", "new", "known to be missing"],
)
def test_a_next_release_that_differs_fails_with_a_line_that_names_the_hook(
    say: Callable[[], str | None], line: str | None
) -> None:
    assert say() == line
    if line is not None:
        with pytest.raises(pytest.fail.Exception) as failure:
            fail_with(say())
        assert str(failure.value) == line


def test_marker_of_the_hybrid_allocator_brings_its_hook() -> None:
    """CONTRACT: a connector that is no SupportsHMA is refused by default."""
    assert issubclass(CtxOffloadConnector, SupportsHMA)
    ours = parameters(CtxOffloadConnector.request_finished_all_groups)
    theirs = parameters(SupportsHMA.request_finished_all_groups)
    assert [p.name for p in ours] == [p.name for p in theirs]


def test_constructor_has_the_three_names_that_vllm_looks_for() -> None:
    names = [parameter.name for parameter in parameters(CtxOffloadConnector.__init__)]
    assert names == ["self", "vllm_config", "role", "kv_cache_config"]


def test_only_vllms_base_classes_are_subclassed() -> None:
    """What keeps one package working on many releases."""
    assert CtxOffloadConnector.__bases__ == (KVConnectorBase_V1, SupportsHMA)


def test_a_wrong_setting_is_said_where_vllm_asks_first() -> None:
    """vLLM's configuration asks this, with CUDA graphs, before it loads a model."""
    asks = CtxOffloadConnector.requires_piecewise_for_cudagraph
    assert asks({"tenants": {"acme": {}}}) is False
    with pytest.raises(ConfigError, match="unknown key 'tenant'; did you mean"):
        asks({"tenant": {"acme": {}}})
