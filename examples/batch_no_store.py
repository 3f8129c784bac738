"""A batch job that takes no host memory from others.

`store: false` keeps its prompts out of host memory; what is there already, such as a
shared beginning, is still loaded. Give `--no-load` to read nothing either. The operator
can make that a rule: `"tenants": {"nightly": {"store": false}}`.

    python examples/batch_no_store.py prompts.txt --tenant nightly > answers.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from openai import OpenAI


def answer(client: OpenAI, model: str, ctx: dict[str, Any], prompt: str) -> str:
    """Returns the answer to one prompt as a line of JSON."""
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=64,
        extra_body={"kv_transfer_params": {"ctx": ctx}},
    )
    text = completion.choices[0].message.content
    receipt = ((completion.model_extra or {}).get("kv_transfer_params") or {}).get(
        "ctx"
    )
    return json.dumps({"prompt": prompt, "answer": text, "receipt": receipt})


def main() -> None:
    """Answers every line of a file, several at a time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompts", type=Path, help="a text file, one prompt a line")
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--no-load", action="store_true", help="read nothing either")
    parser.add_argument("--parallel", type=int, default=8)
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = args.model or client.models.list().data[0].id
    ctx = {"tenant": args.tenant, "store": False, "receipt": True}
    if args.no_load:
        ctx["load"] = False
    prompts = [line for line in args.prompts.read_text().splitlines() if line.strip()]
    with ThreadPoolExecutor(args.parallel) as threads:
        for line in threads.map(partial(answer, client, model, ctx), prompts):
            print(line)
    print(f"{len(prompts)} prompts, nothing stored", file=sys.stderr)


if __name__ == "__main__":
    main()
