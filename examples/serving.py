"""The demo's servers: how they are started, asked and stopped."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from examples import report
from examples.conversations import NOISY, SCRIPTS, Conversation
from examples.report import Served
from tools import local_vllm, smollm2
from tools.vllm_server import VllmServer

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

ANSWER_TOKENS = 24

BLOCK_SIZE = 32
MAX_MODEL_LEN = 2560
# One and a half conversations of about 62 blocks each.
DEVICE_BLOCKS = 96
# All conversations, which fill up to 245 blocks, but not what the noisy tenant sends
# as well: 284 blocks.
HOST_BLOCKS = 280
# 126 blocks each; a quiet tenant's two conversations fill up to 124.
RESERVED = "45%"

DEFAULT_POLICY: Final = "ctx"

# How often to look again for figures that the server publishes after its answer.
METRICS_TRIES = 50


class DemoError(RuntimeError):
    """The demo did not show what it should; the message says why."""


def say(text: str = "") -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def block_bytes(model: Path, dtype: str) -> int:
    """Returns the size of the KV cache of one block of tokens."""
    shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
    channels = shape["num_key_value_heads"] * shape["head_dim"]
    keys_and_values = 2 * channels * {"bfloat16": 2, "float32": 4}[dtype]
    return int(shape["num_hidden_layers"] * keys_and_values * BLOCK_SIZE)


def server_options(model: Path, policy: str) -> list[str]:
    """Returns the options of ``vllm serve`` for an `eviction_policy`."""
    dtype = local_vllm.best_dtype()
    tenants: dict[str, dict[str, str]] = {
        script.tenant: {"reserved": RESERVED} for script in SCRIPTS
    }
    extra_config: dict[str, object] = {
        "cpu_bytes_to_use": f"{HOST_BLOCKS * block_bytes(model, dtype) // 1024}KiB",
        "tenants": tenants | {NOISY: {}},
    }
    if policy != DEFAULT_POLICY:
        extra_config["eviction_policy"] = policy
    transfer = {
        "kv_connector": "CtxOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra_config,
    }
    return [
        "--kv-transfer-config",
        json.dumps(transfer, separators=(",", ":")),
        f"--served-model-name={smollm2.MODEL_NAME}",
        f"--block-size={BLOCK_SIZE}",
        f"--num-gpu-blocks-override={DEVICE_BLOCKS}",
        f"--max-model-len={MAX_MODEL_LEN}",
        f"--dtype={dtype}",
        # Compiling takes minutes and would change nothing of what is shown.
        "--enforce-eager",
        "--gpu-memory-utilization=0.3",
    ]


def shell_lines(command: list[str]) -> str:
    """Returns `command` as one would type it, an option a line."""
    return " ".join(
        ("\\\n    " if part.startswith("--") else "") + shlex.quote(part)
        for part in command
    )


class Client:
    """Sends requests one at a time and finds out how each was served."""

    def __init__(self, server: VllmServer, openai: OpenAI) -> None:
        self._server = server
        self._openai = openai
        self._before = report.tokens_by_source(server.get("/metrics"))

    def send(self, conversation: Conversation, turn: int) -> tuple[Served, str]:
        """Send what was said so far; return how it was served, and the answer."""
        began = time.monotonic()
        first_token_at = 0.0
        prompt_tokens = 0
        pieces = []
        stream = self._openai.chat.completions.create(
            model=smollm2.MODEL_NAME,
            messages=cast("list[ChatCompletionMessageParam]", conversation.messages),
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"kv_transfer_params": conversation.kv_transfer_params},
        )
        for chunk in stream:
            if chunk.usage:
                prompt_tokens = chunk.usage.prompt_tokens
            if chunk.choices and chunk.choices[0].delta.content:
                first_token_at = first_token_at or time.monotonic()
                pieces.append(chunk.choices[0].delta.content)
        # An empty answer has no first token: then the end has to do.
        seconds = (first_token_at or time.monotonic()) - began
        tokens = self._sources_of_last(prompt_tokens)
        served = Served(
            conversation.script.name,
            conversation.script.tenant,
            turn,
            prompt_tokens,
            tokens[report.DEVICE],
            tokens[report.HOST],
            tokens[report.COMPUTED],
            seconds,
        )
        return served, "".join(pieces)

    def evicted_for_noise(self) -> dict[str, int]:
        """Returns how many chunks of each tenant made room for the noisy one."""
        return report.evicted_for(NOISY, self._server.get("/metrics"))

    def _sources_of_last(self, prompt_tokens: int) -> dict[str, int]:
        """Returns where the tokens of the last request came from.

        With one request at a time the growth of vLLM's counters is that request's.
        They are written after the answer is sent, hence the tries.
        """
        grown: dict[str, int] = {}
        for _ in range(METRICS_TRIES):
            now = report.tokens_by_source(self._server.get("/metrics"))
            grown = {name: now[name] - self._before[name] for name in report.SOURCES}
            if sum(grown.values()) == prompt_tokens:
                self._before = now
                return grown
            time.sleep(0.1)
        raise DemoError(
            f"A request had {prompt_tokens} prompt tokens, but the server's metrics "
            f"account for {grown}: is somebody else using {self._server.url}?"
        )


def show_start(waited: float) -> None:
    """Print how long the start has taken: in place on a terminal, else rarely."""
    if sys.stdout.isatty():
        print(f"\rstarting the server: {waited:3.0f} s ", end="", flush=True)
    elif int(waited) % 10 == 0 and waited % 1 < 0.5:
        say(f"starting the server: {waited:3.0f} s")


@contextmanager
def running(model: Path, policy: str, log_file: Path) -> Iterator[Client]:
    """Start a server for the block, and stop it; failures name its log.

    Raises:
        DemoError: If the block does, or the server did not answer or stop.
    """
    from openai import OpenAI, OpenAIError

    with VllmServer(model, server_options(model, policy), log_file) as server:
        if policy == DEFAULT_POLICY:
            say(f"server: {shell_lines(server.command)}")
        else:
            say(f'server: as before, but with "eviction_policy": "{policy}"')
        say(f"server log: {log_file}")
        began = time.monotonic()
        server.wait_until_ready(show_start)
        if sys.stdout.isatty():
            say()
        say(f"server: ready after {time.monotonic() - began:.0f} s at {server.url}")
        openai = OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600
        )
        try:
            yield Client(server, openai)
        except (OpenAIError, OSError) as error:
            text = f"The server did not answer: {error}. See {log_file}."
            raise DemoError(text) from error
        except DemoError as error:
            raise DemoError(f"{error} See {log_file}.") from error
        say("stopping the server ...")
        if not server.stop():
            text = "The server did not stop by itself and was killed."
            raise DemoError(f"{text} See {log_file}.")
        say("server: stopped")
