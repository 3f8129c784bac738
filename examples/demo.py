"""A vLLM server that answers returning conversations from host memory.

Two tenants hold two conversations each, in turn. The server's device cache has room
for one and a half of them, so each time one comes back its KV cache is gone from the
device, and the connector loads it from host memory instead of computing it again. As
a comparison some requests are sent twice in a row: vLLM's own prefix cache serves the
second one from the device.

Then a third tenant sends more than host memory holds. The two have reservations there,
so their conversations still come back from the host; on a second server that evicts
whatever was least recently used, the same traffic has to be computed again.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples import report, serving
from examples.conversations import NOISY, ONE_SHOTS, SCRIPTS, Conversation
from examples.report import Outcome, Served
from examples.serving import Client, DemoError, say
from tools import smollm2
from tools.vllm_server import ServerError

TURNS = 3
# What has to come back from the cache after the noise: all but the newest question and
# a block that is not full.
MIN_KEPT = 0.9

QUIET = " and ".join(dict.fromkeys(script.tenant for script in SCRIPTS))
DEVICE_TOKENS = serving.DEVICE_BLOCKS * serving.BLOCK_SIZE
HOST_TOKENS = serving.HOST_BLOCKS * serving.BLOCK_SIZE
INTRODUCTION = f"""\
{len(SCRIPTS)} conversations of 2 tenants take turns, but the device cache has room for
only {DEVICE_TOKENS:,} tokens: what comes back must come from the host, which holds \
{HOST_TOKENS:,}.
Prompt tokens by source:"""
NOISE = f"""\
{QUIET} have {serving.RESERVED} of host memory reserved each. Now a third tenant,
{NOISY}, sends {len(ONE_SHOTS)} prompts that nobody sends again:"""
SAME_NOISE = f"{NOISY} sends its {len(ONE_SHOTS)} prompts:"
RETURN = f"""\
These were {{tokens:,}} tokens; host memory holds {HOST_TOKENS:,} in all.
The conversations come back:"""
AGAIN = """\
The same once more, in short, under "eviction_policy": "lru": reservations are ignored,
and what was used least recently goes first. The conversations begin:"""
SOURCE = f"""\
A chunk is {serving.BLOCK_SIZE} tokens. The counts are from /metrics:
vllm:ctx_offload_evicted_chunks_total{{tenant="whose chunks went",by="for whom"}}."""


def talk(client: Client, conversations: Sequence[Conversation]) -> Iterator[Served]:
    """Hold all conversations in turn, printing and returning a row a request."""
    for turn in range(1, TURNS + 1):
        for conversation in conversations:
            conversation.ask(turn - 1)
            served, answer = ask_and_show(client, conversation, turn)
            yield served
            if turn == 2:
                # The same once more, to compare with a hit on the device.
                yield ask_and_show(client, conversation, turn)[0]
            conversation.answered(answer)


def take_turn(
    client: Client, conversations: Sequence[Conversation], turn: int
) -> list[Served]:
    """Go on with each conversation once, printing and returning a row for each."""
    rows = []
    for conversation in conversations:
        conversation.ask(turn - 1)
        served, answer = ask_and_show(client, conversation, turn)
        conversation.answered(answer)
        rows.append(served)
    return rows


def disturb(
    client: Client, conversations: Sequence[Conversation], turn: int, text: str
) -> Outcome:
    """Let the noisy tenant send its prompts, and the conversations come back."""
    start_table(text)
    noise = take_turn(client, [Conversation(script) for script in ONE_SHOTS], 1)
    start_table(RETURN.format(tokens=sum(row.prompt for row in noise)))
    rows = take_turn(client, conversations, turn)
    return Outcome(rows, client.evicted_for_noise())


def start_table(text: str) -> None:
    """Print what the next rows are about, and their header."""
    say(f"\n{text}\n\n{report.HEADER}")


def ask_and_show(
    client: Client, conversation: Conversation, turn: int
) -> tuple[Served, str]:
    """Send what was said so far, printing a row around it; see `Client.send`."""
    script = conversation.script
    print(report.row_start(script.name, script.tenant, turn), end="", flush=True)
    served, answer = client.send(conversation, turn)
    say(report.row_end(served))
    return served, answer


def show_tenants_protected(model: Path, log_file: Path) -> Outcome:
    """Show host hits, and that the reservations hold when another tenant is noisy."""
    conversations = [Conversation(script) for script in SCRIPTS]
    with serving.running(model, serving.DEFAULT_POLICY, log_file) as client:
        start_table(INTRODUCTION)
        rows = list(talk(client, conversations))
        say()
        say(report.summary(rows))
        ratio = report.speedup(rows)
        if ratio is None:
            raise DemoError("No request was served from host memory.")
        say(f"Coming back from host memory was {ratio:.1f} times as fast as cold.")
        outcome = disturb(client, conversations, TURNS + 1, NOISE)
        check_kept(outcome)
        say()
    return outcome


def show_tenants_unprotected(model: Path, log_file: Path) -> Outcome:
    """Show the same traffic, in short, where all tenants share one LRU."""
    conversations = [Conversation(script) for script in SCRIPTS]
    with serving.running(model, "lru", log_file) as client:
        start_table(AGAIN)
        take_turn(client, conversations, 1)
        outcome = disturb(client, conversations, 2, SAME_NOISE)
        say()
    return outcome


def check_kept(outcome: Outcome) -> None:
    """Raises DemoError unless the quiet tenants kept their cache."""
    if outcome.kept() < MIN_KEPT:
        raise DemoError(
            f"After {NOISY}'s prompts only {outcome.kept():.0%} of the returning "
            f"tokens came from the cache, less than {MIN_KEPT:.0%}: the reservations "
            "did not hold."
        )


def run(model: Path, log_file: Path) -> None:
    """Show both parts and print what they come to."""
    ctx = show_tenants_protected(model, log_file)
    say()
    lru_log = log_file.with_name(f"{log_file.stem}-lru{log_file.suffix}")
    lru = show_tenants_unprotected(model, lru_log)
    say()
    say(f"What {NOISY}'s prompts did:")
    say()
    say(report.comparison(NOISY, ctx, lru))
    say()
    say(SOURCE)


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
        help="file for the server's log (default: in the user's cache); the second "
        "server's is beside it",
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run(smollm2.prepare(report=say), arguments.log)
    except KeyboardInterrupt:
        say("\ninterrupted; the server is stopped")
        return 130
    except (smollm2.ModelError, ServerError, DemoError, OSError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
