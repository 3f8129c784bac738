"""The messages that an operator can see, read off the package's source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Message", "messages", "words"]

PACKAGE = Path(__file__).resolve().parents[1] / "vllm_ctx_offload"
# These commands explain their own arguments where they are typed.
OTHER_COMMANDS = ("replay", "report", "scrape", "simulate", "top", "traces")
# What makes an error out of a text, and which argument the text is.
ERRORS = {
    "ConfigError": 0,
    "PydanticCustomError": 1,
    "UnknownShapeError": 0,
    "fault_at": 2,
    "_unknown": -1,
    "unknown_key": None,  # its own text is inside
}
TABLES = ("_KINDS",)  # texts of warnings, by what they warn of
LOGGED = ("warning", "error", "exception", "critical")


class Message(NamedTuple):
    """A message and where it is made."""

    place: str
    # What stands between the values; the values themselves differ.
    constants: tuple[str, ...]


def words(text: str) -> str:
    """Returns the text in one line, without the marks of Markdown."""
    return re.sub(r"\s+", " ", text.replace("`", "").replace("\\", "")).strip()


def messages() -> Iterator[Message]:
    """Yields every message of an error or a warning."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem in OTHER_COMMANDS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(PACKAGE).as_posix()
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in TABLES:
                yield from _in_table(name, node)
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _in_function(name, function)


def _in_table(name: str, table: ast.AnnAssign) -> Iterator[Message]:
    assert isinstance(table.value, ast.Dict)
    for value in table.value.values:
        yield Message(f"{name}:{value.lineno}", tuple(_constants(value, table)))


def _in_function(name: str, function: ast.AST) -> Iterator[Message]:
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        text = _text_argument(node)
        if text is None:
            continue
        constants = tuple(_constants(text, function))
        if any(len(constant.split()) > 1 for constant in constants):
            yield Message(f"{name}:{node.lineno}", constants)


def _text_argument(call: ast.Call) -> ast.expr | None:
    called = call.func
    if isinstance(called, ast.Attribute):
        if called.attr not in LOGGED:
            return None
        return call.args[0]
    if not isinstance(called, ast.Name):
        return None
    if called.id == "Finding":
        level = ast.unparse(call.args[0])
        return call.args[2] if level in ("Level.WARN", "Level.FAULT") else None
    index = ERRORS.get(called.id)
    return None if index is None else call.args[index]


def _constants(text: ast.expr, function: ast.AST) -> Iterator[str]:
    """Yields the constant parts of a text, of a name those of what it stands for."""
    if isinstance(text, ast.JoinedStr):
        for part in text.values:
            yield from _constants(part, function)
    elif isinstance(text, ast.BinOp):
        yield from _constants(text.left, function)
        yield from _constants(text.right, function)
    elif isinstance(text, ast.Name):
        for value in _values_of(text.id, function):
            if text.id not in {
                n.id for n in ast.walk(value) if isinstance(n, ast.Name)
            }:
                yield from _constants(value, function)
    elif isinstance(text, ast.Constant) and isinstance(text.value, str):
        for part in re.split(r"%[sd]|%\.\d+f", text.value):
            constant = words(part).removeprefix("kv_connector_extra_config: ")
            if constant := constant.strip(" '\"():;,="):
                yield constant


def _values_of(name: str, function: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            if name in map(ast.unparse, node.targets):
                yield node.value
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == name:
            yield node.value
