"""Rules about the source text that no linter checks."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60

# The dots in brackets keep this file from holding what it looks for.
FORBIDDEN = {
    "a package index's host": [
        r"pypi[.]org",
        r"files[.]pythonhosted[.]org",
        r"download[.]pytorch[.]org",
        r"anaconda[.]org",
    ],
    "an address that only some networks have": [
        r"https?://[\w.-]+[.](?:internal|local|corp|lan)\b",
        r"https?://(?:10|192[.]168|172[.](?:1[6-9]|2\d|3[01]))[.]\d",
        r"(?:index|find)[-_](?:url|links)",
    ],
    "a path of one machine": [
        r"(?<![\w.~$)}/])/(?:work|opt|root|home|Users)/\w",
        r"(?<![\w.~$)}/])/tmp/\w",
    ],
}


def tracked_files() -> list[Path]:
    """Returns what git holds, and what it would take in: text and not deleted."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in done.stdout.split("\0") if name]


def text_of(path: Path) -> str | None:
    """Returns a file's text, or None for a deleted or binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError, IsADirectoryError):
        return None


def long_functions(source: str) -> list[str]:
    """Returns the functions over the limit, decorators not counted."""
    return [
        f"{node.name} (line {node.lineno}, {length} lines)"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def forbidden_in(text: str, patterns: list[str]) -> list[str]:
    """Returns the places where one of the patterns occurs, with their line numbers."""
    return [
        f"line {number}: {match[0]}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in patterns
        for match in re.finditer(pattern, line)
    ]


PACKAGE = sorted((ROOT / "vllm_ctx_offload").rglob("*.py"))


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_package_file_and_its_functions_are_within_the_limits(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert long_functions(text) == []


def test_a_long_function_is_found() -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert long_functions(f"def fits():\n{body[:-9]}") == []
    assert long_functions(f"async def grows():\n{body}") == ["grows (line 1, 61 lines)"]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str) -> None:
    found = {
        str(path.relative_to(ROOT)): hits
        for path in tracked_files()
        if (text := text_of(path)) and (hits := forbidden_in(text, FORBIDDEN[what]))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a package index's host", "pip install -i https://pypi{dot}org/simple x"),
        ("a package index's host", "https://download{dot}pytorch{dot}org/whl/cpu"),
        ("an address that only some networks have", "http://10{dot}0.0.7:8080/"),
        ("an address that only some networks have", "http://box{dot}internal/"),
        ("an address that only some networks have", "--extra-index{dash}url X"),
        ("a path of one machine", 'open("{slash}work/main/x")'),
        ("a path of one machine", "cd {slash}home/me"),
    ],
)
def test_what_is_forbidden_is_found(what: str, text: str) -> None:
    written = text.format(dot=".", dash="-", slash="/")
    assert forbidden_in(written, FORBIDDEN[what])


@pytest.mark.parametrize(
    "text",
    ["$(ROOT)/work/x", "a/home/b", "docs/opt/x", "~/work/x", "http://127.0.0.1:1"],
)
def test_relative_and_local_names_are_allowed(text: str) -> None:
    assert not any(forbidden_in(text, patterns) for patterns in FORBIDDEN.values())
