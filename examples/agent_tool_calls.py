"""An agent that says how long its tools take.

While a tool runs, the agent's context waits in host memory. `expected_reuse_s` tells
the server when it will be needed again, so contexts that are back soon outlast those
that are not. The estimate is the mean of what the tool has taken so far. A tool that
takes minutes gets a priority as well, which an estimate alone does not outweigh.

    python examples/agent_tool_calls.py --base-url http://localhost:8000/v1 --steps 4
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from openai import OpenAI

SYSTEM = "You are an agent. " + "Use the tools you have, one at a time. " * 60
SLOW_SECONDS = 120
FIRST_GUESS_SECONDS = 10.0


class Agent:
    """One run of an agent, with one tool."""

    def __init__(
        self, client: OpenAI, model: str, ctx: dict[str, Any], tool: Callable[[], str]
    ) -> None:
        self._client = client
        self._model = model
        self._ctx = {**ctx, "receipt": True}
        self._tool = tool
        self._took: list[float] = []
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def run(self, task: str, num_steps: int) -> None:
        """Calls the model and the tool in turn, and the model once more."""
        self._messages.append({"role": "user", "content": task})
        for _ in range(num_steps):
            self._think(self._hints())
            began = time.monotonic()
            result = self._tool()
            self._took.append(time.monotonic() - began)
            # Servers that parse tool calls take this as a message of the role "tool".
            self._messages.append({"role": "user", "content": f"Result: {result}"})
        self._think({"release": True})  # the run is over: nobody will ask again

    def _hints(self) -> dict[str, Any]:
        seconds = statistics.mean(self._took) if self._took else FIRST_GUESS_SECONDS
        hints: dict[str, Any] = {"expected_reuse_s": round(seconds, 1)}
        if seconds > SLOW_SECONDS:
            hints |= {"priority": 60, "ttl_s": 2 * seconds}
        return hints

    def _think(self, hints: dict[str, Any]) -> None:
        completion = self._client.chat.completions.create(
            model=self._model,
            messages=self._messages,
            max_tokens=32,
            extra_body={"kv_transfer_params": {"ctx": {**self._ctx, **hints}}},
        )
        answer = completion.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": answer})
        params = (completion.model_extra or {}).get("kv_transfer_params") or {}
        loaded = (params.get("ctx") or {}).get("loaded_tokens", 0)
        print(f"{hints}: {loaded} tokens from host memory")


def main() -> None:
    """Runs the agent with a tool that takes a second."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = args.model or client.models.list().data[0].id

    def look_up() -> str:
        time.sleep(1)
        return "42"

    ctx = {"tenant": args.tenant, "session": f"run-{time.time_ns()}"}
    Agent(client, model, ctx, look_up).run("Find the answer.", args.steps)


if __name__ == "__main__":
    main()
