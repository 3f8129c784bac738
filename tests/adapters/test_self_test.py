"""A release that nobody has seen stops the start, or is read as it means."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import vllm
from real_scheduler.vllm_setup import NAMES_RESUMED

from vllm_ctx_offload.adapters import vllm_api
from vllm_ctx_offload.adapters.releases import PRESENT_SINCE, SUPPORTED_TEXT
from vllm_ctx_offload.adapters.self_test import examine_release
from vllm_ctx_offload.connector import CtxOffloadConnector
from vllm_ctx_offload.errors import ConfigError

CLASSES = vllm_api.CLASSES
# Of which records, the fields that are read of each object in a step.
READ = [
    ("SchedulerOutput", "num_scheduled_tokens"),
    ("SchedulerOutput", "scheduled_new_reqs"),
    ("SchedulerOutput", "scheduled_cached_reqs"),
    ("SchedulerOutput", "preempted_req_ids"),
    ("SchedulerOutput", "kv_cache_block_copies"),
    ("SchedulerOutput", "kv_connector_block_state"),
    ("NewRequestData", "req_id"),
    ("NewRequestData", "block_ids"),
    ("NewRequestData", "num_computed_tokens"),
    ("CachedRequestData", "req_ids"),
    ("CachedRequestData", "new_block_ids"),
    ("CachedRequestData", "num_computed_tokens"),
    ("KVConnectorOutput", "kv_connector_worker_meta"),
    ("KVConnectorOutput", "invalid_block_ids"),
    ("KVConnectorBlockState", "boundary_state_offloads"),
    ("KVCacheBlocks", "blocks"),
    ("KVCacheBlock", "block_id"),
]
OF_REQUEST = [
    "request_id",
    "num_computed_tokens",
    "num_prompt_tokens",
    "block_hashes",
    "kv_transfer_params",
    "cache_salt",
    "lora_request",
    "shared_prefix_boundary",
]


def renamed(cls: type, field: str) -> type:
    """Returns the class as the next release may have it."""
    fields = []
    for each in dataclasses.fields(cls):
        name = f"{each.name}_now" if each.name == field else each.name
        values = {"default": each.default, "default_factory": each.default_factory}
        given = {k: v for k, v in values.items() if v is not dataclasses.MISSING}
        fields.append((name, Any, dataclasses.field(**given)))
    assert any(name == f"{field}_now" for name, *_ in fields)
    return dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)


def refusal(**changed: type) -> str:
    """Returns the one sentence that stops the start on a release with such classes."""
    with pytest.raises(ConfigError) as raised:
        examine_release(
            {**CLASSES, **changed}, vllm_api.CtxOffloadWorkerMetadata, "0.99.0"
        )
    text = str(raised.value)
    assert text.endswith("; install one of those.")
    assert f"({SUPPORTED_TEXT})" in text
    assert "\n" not in text
    return text


def test_this_release_can_be_read() -> None:
    examine_release(CLASSES, vllm_api.CtxOffloadWorkerMetadata, vllm.__version__)


@pytest.mark.parametrize(("name", "field"), READ)
def test_a_record_with_a_renamed_field_is_named(name: str, field: str) -> None:
    text = refusal(**{name: renamed(CLASSES[name], field)})
    assert f"'{field}' of the class {name} is missing or means something else" in text


@pytest.mark.parametrize("field", OF_REQUEST)
def test_a_request_with_a_renamed_field_is_named(field: str) -> None:
    class Request(vllm_api.Request):
        made = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.made = True

        def __getattribute__(self, name: str) -> Any:
            if name == field and self.made:
                raise AttributeError(name=name, obj=self)
            return super().__getattribute__(name)

    assert f"'{field}' of the class Request is missing" in refusal(Request=Request)


def test_requests_whose_loads_would_not_be_taken_are_told_apart() -> None:
    """Or a load would be promised that vLLM drops, for each of them, in each step."""

    class Request(vllm_api.Request):
        skip_reading_prefix_cache = skip_reading_external_kv = property(
            lambda self: False, lambda self, value: None
        )

    text = refusal(Request=Request)
    assert "'skip_reading_prefix_cache' of the class Request is missing" in text


def test_resumed_requests_that_nobody_names_have_to_come_as_new_ones() -> None:
    """Or their new blocks would be appended to the table that they lost."""
    records = {"NewRequestData": CLASSES["NewRequestData"]}
    if NAMES_RESUMED:
        known = renamed(CLASSES["CachedRequestData"], "resumed_req_ids")
        text = refusal(CachedRequestData=known)
    else:
        records["NewRequestData"] = renamed(
            CLASSES["NewRequestData"], "prefill_token_ids"
        )
        text = refusal(**records)
    assert "'resumed_req_ids' of the class CachedRequestData is missing" in text


@pytest.mark.parametrize(("name", "field"), [entry[:2] for entry in PRESENT_SINCE])
def test_what_older_releases_lack_may_not_be_missing_later(
    name: str, field: str
) -> None:
    class Without:
        def __init__(self, *args: object, **kwargs: object) -> None: ...

    others = {
        each: None for cls, each, _ in PRESENT_SINCE if (cls, each) != (name, field)
    }
    text = refusal(**{name: type(name, (Without,), others)})
    assert f"'{field}' of the class {name} is missing" in text
    classes = {key: cls for key, cls in CLASSES.items() if key != name}
    with pytest.raises(ConfigError, match=f"the class {name} is missing"):
        examine_release(classes, vllm_api.CtxOffloadWorkerMetadata, "0.99.0")


def test_what_means_something_else_is_named_too() -> None:
    class KVCacheBlocks(vllm_api.KVCacheBlocks):
        def get_block_ids(self, *args: Any, **kwargs: Any) -> Any:
            return [str(block) for block in super().get_block_ids()[0]]

    text = refusal(KVCacheBlocks=KVCacheBlocks)
    assert "of the class KVCacheBlock" in text


def test_it_is_run_where_vllm_asks_first_and_in_the_constructor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise ConfigError("can't be read")

    monkeypatch.setattr(vllm_api, "check_release", refuse)
    with pytest.raises(ConfigError, match="can't be read"):
        CtxOffloadConnector.requires_piecewise_for_cudagraph({})
    with pytest.raises(ConfigError, match="can't be read"):
        vllm_api.check_environment(None, None)  # type: ignore[arg-type]


RENAME: dict[str, str] = {
    "a field": (
        "from vllm.v1.request import Request\n"
        "make = Request.__init__\n"
        "def other(self, *args, **kwargs):\n"
        "    make(self, *args, **kwargs)\n"
        "    del self.num_prompt_tokens\n"
        "Request.__init__ = other\n"
    ),
    "a class": (
        "from vllm.v1.core import kv_cache_manager\n"
        "del kv_cache_manager.KVCacheBlocks\n"
    ),
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("a field", "'num_prompt_tokens' of the class Request is missing or means"),
        ("a class", "this vLLM lacks what the connector needs (cannot import name"),
    ],
)
def test_vllms_configuration_already_stops(change: str, said: str) -> None:
    """It looks for the class before any process with a model is started."""
    code = (
        "import logging, vllm_ctx_offload\n"
        f"{RENAME[change]}"
        "from vllm.distributed.kv_transfer.kv_connector.factory import "
        "KVConnectorFactory\n"
        "from vllm.config import KVTransferConfig\n"
        "vllm_ctx_offload.register()\n"
        "KVConnectorFactory.supports_hma_config(\n"
        "    KVTransferConfig(kv_connector='CtxOffloadConnector', kv_role='kv_both'))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    *_, last = result.stderr.splitlines()
    assert "ConfigError: CtxOffloadConnector: " in last
    assert said in last
