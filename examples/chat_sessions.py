"""Chats that come back: each turn loads what the last one has stored.

Two conversations take turns. Every request names its session, so that closing a chat
can release what only that chat has used; chats left open simply grow old. While the
device still holds a chat, nothing has to be loaded: to see loads, let
`batch_no_store.py` run beside it with more than the device cache holds, and wait
between the turns, as people do:

    python examples/chat_sessions.py --tenant acme --pause 20
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from openai import OpenAI

# Long enough to fill chunks; in a real chat this is the system prompt or a document.
SYSTEM = "You answer in one sentence. " + "The rules of the house apply. " * 60
QUESTIONS = {
    "chat-1": ["What is a prefix?", "And a suffix?", "Which one can be cached?"],
    "chat-2": ["Why is the sky blue?", "And at sunset?", "And on Mars?"],
}


class Chat:
    """One conversation."""

    def __init__(self, client: OpenAI, model: str, tenant: str, session: str) -> None:
        self._client, self._model = client, model
        self._ctx = {"tenant": tenant, "session": session, "receipt": True}
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def ask(self, question: str) -> tuple[str, str]:
        """Returns (the answer, where its prompt came from)."""
        self._messages.append({"role": "user", "content": question})
        answer, came_from = self._send(max_tokens=48)
        self._messages.append({"role": "assistant", "content": answer})
        return answer, came_from

    def close(self) -> None:
        """Says that the chat will not come back; its chunks are the first to go."""
        self._send(max_tokens=1, release=True)

    def _send(self, max_tokens: int, **hints: Any) -> tuple[str, str]:
        answer = self._client.chat.completions.create(
            model=self._model,
            messages=self._messages,
            max_tokens=max_tokens,
            extra_body={"kv_transfer_params": {"ctx": {**self._ctx, **hints}}},
        )
        prompt_tokens = answer.usage.prompt_tokens if answer.usage else 0
        params = (answer.model_extra or {}).get("kv_transfer_params")
        if not params:
            raise SystemExit("No receipt: the server has no CtxOffloadConnector.")
        receipt = params["ctx"]
        device_tokens = prompt_tokens - receipt["lookup_tokens"]
        came_from = f"{prompt_tokens} prompt tokens: {device_tokens} from the device, "
        came_from += f"{receipt['loaded_tokens']} from host memory"
        return answer.choices[0].message.content or "", came_from


def main() -> None:
    """Lets the two conversations take turns."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the first that the server has")
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--pause", type=float, default=0, help="seconds between turns")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = args.model or client.models.list().data[0].id
    chats = {name: Chat(client, model, args.tenant, name) for name in QUESTIONS}
    for number, turn in enumerate(zip(*QUESTIONS.values(), strict=True)):
        time.sleep(args.pause if number else 0)
        for (name, chat), question in zip(chats.items(), turn, strict=True):
            answer, came_from = chat.ask(question)
            print(f"{name}: {question} {answer!r}\n  {came_from}")
    for chat in chats.values():
        chat.close()


if __name__ == "__main__":
    main()
