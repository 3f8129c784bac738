"""Every message has its place in the documentation, and a test that makes it happen."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from package_messages import Message, messages, words
from pytest_mock import MockerFixture

import vllm_ctx_offload
from vllm_ctx_offload.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PAGE = words((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
MESSAGES = list(messages())
TESTS = words(
    "\n".join(
        path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    )
)


def phrases(message: Message) -> list[str]:
    """Returns what a test can know a message by: any three words of it in a row."""
    found = []
    for constant in message.constants:
        parts = constant.split()
        found += [" ".join(parts[i : i + 3]) for i in range(len(parts) - 2)]
    return found or [constant for constant in message.constants if " " in constant]


def test_the_source_has_messages() -> None:
    assert len(MESSAGES) > 40


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.place)
def test_the_page_explains(message: Message) -> None:
    missing = [part for part in message.constants if part not in PAGE]
    assert missing == [], "docs/troubleshooting.md lacks it"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.place)
def test_a_test_reads(message: Message) -> None:
    known = [phrase for phrase in phrases(message) if phrase in TESTS]
    assert known, f"no test mentions any of {phrases(message)}"


def test_the_tests_produce_every_message(produced: Any) -> None:
    """Runs last of all tests without an engine, see conftest.py."""

    def made(message: Message) -> bool:
        # Texts of a table and of a reason become part of what is said elsewhere.
        return message.place in produced.places or any(
            all(part in text for part in message.constants) for text in produced.texts
        )

    missing = [message for message in MESSAGES if not made(message)]
    assert not missing, "\n".join(map(str, missing))


def test_the_page_names_no_message_that_is_gone() -> None:
    """Items of lists begin with a message, whose longest part is in the source."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    known = [words(part) for message in MESSAGES for part in message.constants]
    # What pydantic says, and what a key is compared with.
    known += ["must be", "did you mean"]
    for item in re.findall(r"^- `([^`]+)`", text, re.MULTILINE):
        parts = [words(part).strip(" '\"():;,=.") for part in item.split("…")]
        longest = max(parts, key=len)
        assert any(longest in part or part in longest for part in known), item


# ---- the messages that no other test reads in full


def test_a_plugin_that_fails_says_so_and_does_not_stop_vllm(
    mocker: MockerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    mocker.patch(
        "vllm_ctx_offload.memory.publish_default_pool_bytes", side_effect=OSError("why")
    )
    with caplog.at_level(logging.WARNING):
        vllm_ctx_offload.register()
    assert "CtxOffloadConnector was not registered with vLLM: why" in caplog.text


def test_a_role_that_only_stores_is_refused() -> None:
    vllm_api = pytest.importorskip("vllm_ctx_offload.adapters.vllm_api")
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role="kv_producer"))
    with pytest.raises(ConfigError, match="but this connector both stores and loads"):
        vllm_api.check_environment(config, SimpleNamespace())


def test_a_pool_larger_than_the_memory_is_refused(mocker: MockerFixture) -> None:
    host_pool = pytest.importorskip("vllm_ctx_offload.worker.host_pool")
    mocker.patch.object(host_pool, "available_memory", return_value=(5, "a limit"))
    with pytest.raises(
        ConfigError, match=r"asks for 6 B on this worker, but a limit has only 5 B left"
    ):
        host_pool._check_memory(6)


@pytest.mark.parametrize(
    ("shape", "stride", "num_blocks", "why"),
    [
        ((12, 4, 16), (32, 16, 1), 12, "its blocks overlap"),
        ((24, 64), (70, 1), 12, "its kernel blocks are padded"),
        ((12, 8), (16, 2), 12, "the inside of a block has gaps"),
        ((7, 8), (8, 1), 12, "no dimension counts its blocks"),
        ((2, 2, 8), (16, 8, 1), 2, "its dimensions are ambiguous"),
    ],
)
def test_the_reason_of_an_unknown_layout_is_said(
    shape: tuple[int, ...], stride: tuple[int, ...], num_blocks: int, why: str
) -> None:
    torch = pytest.importorskip("torch")
    from vllm_ctx_offload.worker.kv_layout import derive_layout

    tensor = torch.zeros(4096).as_strided(shape, stride)
    with pytest.raises(ConfigError, match=why):
        derive_layout({"l": tensor}, num_blocks)


@pytest.mark.parametrize(
    ("name", "labels", "said"),
    [
        ("rejected_stores", ("acme", "limit"), "all that their tenant may hold"),
        ("rejected_stores", ("acme", "full"), "use all of the pool that could be"),
        ("hints_rejected", ("priority", "budget"), "ask for more than max_protected"),
    ],
)
def test_what_degrades_is_warned_of(
    name: str, labels: tuple[str, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    degraded = pytest.importorskip("vllm_ctx_offload.adapters.degraded")
    with caplog.at_level(logging.WARNING):
        degraded.DegradationLog().look_at({json.dumps([name, *labels]): 1})
    assert said in caplog.text
