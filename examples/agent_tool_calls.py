"""An agent that says how long its tools take.

While a tool runs, the agent's context waits in host memory. `expected_reuse_s` says
when it will be needed again, so contexts that are back soon outlast those that are not.
A tool that takes minutes gets a priority too, because priority comes before estimates.

    python examples/agent_tool_calls.py --steps 4 --tool-seconds 20

What it waits for shows when other traffic needs the device cache meanwhile, such as
`batch_no_store.py`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from openai import OpenAI

SYSTEM = "You are an agent. " + "Use the tools you have, one at a time. " * 60
FIRST_GUESS_SECONDS = 10.0
SLOW_SECONDS = 120


def hints_before_a_call(took: list[float]) -> dict[str, Any]:
    """Returns what to say before a tool that has taken `took` seconds so far."""
    seconds = statistics.mean(took) if took else FIRST_GUESS_SECONDS
    hints: dict[str, Any] = {"expected_reuse_s": round(seconds, 1)}
    if seconds > SLOW_SECONDS:
        hints |= {"priority": 60, "ttl_s": 2 * seconds}
    return hints


def tool(seconds: float) -> str:
    """Stands for a search, a test run, a person who has to agree."""
    time.sleep(seconds)
    return "42"


def main() -> None:
    """Calls the model and the tool in turn, and the model once more."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tool-seconds", type=float, default=1)
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = args.model or client.models.list().data[0].id
    ctx = {"tenant": args.tenant, "session": f"run-{time.time_ns()}", "receipt": True}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    messages.append({"role": "user", "content": "Find the answer."})
    took: list[float] = []
    for step in range(args.steps + 1):
        is_last = step == args.steps
        hints = {"release": True} if is_last else hints_before_a_call(took)
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=32,
            extra_body={"kv_transfer_params": {"ctx": {**ctx, **hints}}},
        )
        params = (completion.model_extra or {}).get("kv_transfer_params")
        if not params:
            raise SystemExit("No receipt: the server has no CtxOffloadConnector.")
        receipt = params["ctx"]
        print(f"{hints}: the device lacked {receipt['lookup_tokens']} tokens, ", end="")
        print(f"host memory had {receipt['loaded_tokens']}")
        answer = completion.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        if not is_last:
            began = time.monotonic()
            # Where the server parses tool calls this is a message of the role "tool".
            said = f"The tool says: {tool(args.tool_seconds)}"
            messages.append({"role": "user", "content": said})
            took.append(time.monotonic() - began)


if __name__ == "__main__":
    main()
