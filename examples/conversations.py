"""What the tenants of the demo say.

Four people of two tenants hold conversations about a long list each, and a third
tenant sends lists that it never comes back to. The text is made up from a few word
lists with a fixed seed, so every run sends the same, and each list is long enough that
computing it again takes a while.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

ENTRIES = 64

PEOPLE = ("Ines", "Tomasz", "Aiko", "Samuel", "Leila", "Bruno", "Greta", "Priya")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
REMARKS = (
    "Nobody has looked at it yet.",
    "An answer was promised for the end of the week.",
    "Two others have said the same since then.",
    "It is more urgent than it looks, so please do not leave it for later.",
    "The last message about it was never answered.",
)


class Script(NamedTuple):
    """What one person of a tenant talks about; a question a turn."""

    name: str
    tenant: str
    topic: str
    subjects: tuple[str, ...]
    troubles: tuple[str, ...]
    questions: tuple[str, ...]


SCRIPTS = (
    Script(
        "A",
        "acme",
        "open tickets of the service desk",
        ("the label printer", "the scanner in hall 2", "the laptop", "the phone"),
        ("stops after a few pages", "shows a blue screen", "loses its settings"),
        (
            "Which device is mentioned most often?",
            "Who is waiting for a spare part?",
            "Write one sentence to calm the people who wait.",
            "Which ticket should be closed first?",
        ),
    ),
    Script(
        "B",
        "globex",
        "notes of the night shift",
        ("the mixer", "conveyor 4", "the packing robot", "the cooling pump"),
        ("runs too warm", "makes a scraping noise", "stopped without an error code"),
        (
            "Which machine should be checked first?",
            "What was said about noise?",
            "Write one sentence for the morning shift.",
            "On which day was the most written?",
        ),
    ),
    Script(
        "C",
        "acme",
        "complaints from customers",
        ("the parcel", "the invoice", "the blue chair", "the voucher"),
        ("never arrived", "does not match the order", "was damaged on the way"),
        (
            "What do people complain about most?",
            "Who wrote about an invoice?",
            "Write one sentence to say sorry.",
            "Who has waited longest?",
        ),
    ),
    Script(
        "D",
        "globex",
        "requests about business trips",
        ("the flight to Oslo", "the hotel in Lyon", "the train ticket", "the visa"),
        ("is not booked yet", "has the wrong date", "costs more than was approved"),
        (
            "Which trip is most urgent?",
            "Who has a wrong date?",
            "Write one sentence to the travel office.",
            "What is too expensive?",
        ),
    ),
)

# The third tenant. Two of its prompts have only the first words in common, fewer than
# fill a block.
NOISY = "initech"
ONE_SHOTS = tuple(
    Script(
        f"one-shot {number}",
        NOISY,
        f"{what} found in the nightly scan",
        ("the mail gateway", "the old file server", "the test system", "the router"),
        ("answers too slowly", "has an old certificate", "was restarted twice"),
        ("Which finding is the worst?",),
    )
    for number, what in enumerate(
        ("defects", "surprises", "weaknesses", "delays", "changes"), start=1
    )
)


@dataclass(slots=True)
class Conversation:
    """One conversation: everything said so far goes into the next request."""

    script: Script
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def kv_transfer_params(self) -> dict[str, dict[str, str]]:
        """What tells the connector whose conversation this is."""
        session = f"conversation-{self.script.name}"
        return {"ctx": {"tenant": self.script.tenant, "session": session}}

    def ask(self, turn: int) -> None:
        """Add the question of a turn (from 0); the first brings the list along."""
        question = self.script.questions[turn]
        if not self.messages:
            system = f"You work for {self.script.tenant}. Answer in one short sentence."
            self.messages.append({"role": "system", "content": system})
            question = f"{document(self.script)}\n\n{question}"
        self.messages.append({"role": "user", "content": question})

    def answered(self, text: str) -> None:
        """Add the model's answer."""
        self.messages.append({"role": "assistant", "content": text})


def document(script: Script) -> str:
    """Returns the list that `script` is about; the same one every time."""
    rng = random.Random(script.name)
    lines = [f"These are the {script.topic}:"]
    for number in range(1, ENTRIES + 1):
        day, person = rng.choice(DAYS), rng.choice(PEOPLE)
        subject, trouble = rng.choice(script.subjects), rng.choice(script.troubles)
        lines.append(
            f"{number}. On {day} {person} wrote that {subject} {trouble}. "
            f"{rng.choice(REMARKS)}"
        )
    return "\n".join(lines)
