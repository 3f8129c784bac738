"""Text from outside as every line, terminal, log and metric can carry it."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """Returns text in which whatever is not printable is escaped as Python writes it.

    That is control characters, every kind of line end, marks that turn the direction
    of writing, and lone surrogates: what would end a line, steer a terminal, make one
    name look like another, or have no place in UTF-8. Printable is what
    `str.isprintable` says; of the white space that is the space alone.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
