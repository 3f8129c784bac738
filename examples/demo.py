"""A vLLM server that answers returning conversations from host memory.

Two tenants hold two conversations each, in turn. The server's device cache has room
for one and a half of them, so each time one comes back its KV cache is gone from the
device, and the connector loads it from host memory instead of computing it again. As
a comparison some requests are sent twice in a row: vLLM's own prefix cache serves the
second one from the device.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples import report
from examples.conversations import SCRIPTS, Conversation
from examples.report import Served
from tools import local_vllm, smollm2
from tools.vllm_server import ServerError, VllmServer

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

TURNS = 3
ANSWER_TOKENS = 24

BLOCK_SIZE = 32
MAX_MODEL_LEN = 2560
# One and a half conversations of about 62 blocks each.
DEVICE_BLOCKS = 96
HOST_BYTES = "512MiB"

INTRODUCTION = f"""\
{len(SCRIPTS)} conversations of 2 tenants take turns, but the device cache has room for
only {DEVICE_BLOCKS * BLOCK_SIZE:,} tokens: what comes back must come from the host.
Prompt tokens by source:"""

# How often to look again for figures that the server publishes after its answer.
METRICS_TRIES = 50


class DemoError(RuntimeError):
    """The demo did not show what it should; the message says why."""


def say(text: str = "") -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def server_options() -> list[str]:
    """Returns the options of ``vllm serve``."""
    transfer = {
        "kv_connector": "CtxOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
    }
    return [
        "--kv-transfer-config",
        json.dumps(transfer, separators=(",", ":")),
        f"--served-model-name={smollm2.MODEL_NAME}",
        f"--block-size={BLOCK_SIZE}",
        f"--num-gpu-blocks-override={DEVICE_BLOCKS}",
        f"--max-model-len={MAX_MODEL_LEN}",
        f"--dtype={local_vllm.best_dtype()}",
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


def talk(client: Client) -> Iterator[Served]:
    """Hold all conversations in turn, printing and returning a row a request."""
    conversations = [Conversation(script) for script in SCRIPTS]
    for turn in range(1, TURNS + 1):
        for conversation in conversations:
            conversation.ask(turn - 1)
            served, answer = ask_and_show(client, conversation, turn)
            yield served
            if turn == 2:
                # The same once more, to compare with a hit on the device.
                yield ask_and_show(client, conversation, turn)[0]
            conversation.answered(answer)


def ask_and_show(
    client: Client, conversation: Conversation, turn: int
) -> tuple[Served, str]:
    """Send what was said so far, printing a row around it; see `Client.send`."""
    script = conversation.script
    print(report.row_start(script.name, script.tenant, turn), end="", flush=True)
    served, answer = client.send(conversation, turn)
    say(report.row_end(served))
    return served, answer


def show_start(waited: float) -> None:
    """Print how long the start has taken: in place on a terminal, else rarely."""
    if sys.stdout.isatty():
        print(f"\rstarting the server: {waited:3.0f} s ", end="", flush=True)
    elif int(waited) % 10 == 0 and waited % 1 < 0.5:
        say(f"starting the server: {waited:3.0f} s")


def run(model: Path, log_file: Path) -> None:
    """Start the server, talk to it and print what happened."""
    from openai import OpenAI, OpenAIError

    with VllmServer(model, server_options(), log_file) as server:
        say(f"server: {shell_lines(server.command)}")
        say(f"server log: {log_file}")
        began = time.monotonic()
        server.wait_until_ready(show_start)
        if sys.stdout.isatty():
            say()
        say(f"server: ready after {time.monotonic() - began:.0f} s at {server.url}")
        say()
        say(INTRODUCTION)
        say()
        say(report.HEADER)
        openai = OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600
        )
        try:
            rows = list(talk(Client(server, openai)))
        except OpenAIError as error:
            raise DemoError(f"The server did not answer: {error}.") from error
        say()
        say(report.summary(rows))
        ratio = report.speedup(rows)
        if ratio is None:
            raise DemoError("No request was served from host memory.")
        say(f"Coming back from host memory was {ratio:.1f} times as fast as cold.")
        say("stopping the server ...")
        if not server.stop():
            raise DemoError("The server did not stop by itself and was killed.")
        say("server: stopped")


def _terminate(*_: object) -> NoReturn:
    """Leave as Ctrl-C does, so that the server is stopped."""
    raise KeyboardInterrupt


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--log",
        type=Path,
        default=smollm2.cache_folder() / "demo-server.log",
        help="file for the server's log (default: in the user's cache)",
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run(smollm2.prepare(report=say), arguments.log)
    except KeyboardInterrupt:
        say("\ninterrupted; the server is stopped")
        return 130
    except (smollm2.ModelError, ServerError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
    except (DemoError, OSError) as error:
        print(f"\ndemo: {error} See {arguments.log}.", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
