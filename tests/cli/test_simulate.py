"""The command `simulate`, called as the command line calls it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from pytest_mock import MockerFixture

from vllm_ctx_offload.cli import main

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
TENANTS = {"quiet": {"reserved": "50%"}, "noisy": {}}
REQUESTS = [
    ("quiet", [1, 2]),
    ("noisy", [11, 12, 13, 14]),
    ("quiet", [1, 2, 3]),
    ("noisy", [11]),
]


@pytest.fixture(autouse=True)
def without_vllm(mocker: MockerFixture) -> None:
    """Importing vLLM takes seconds; the replay through it has its own tests."""
    name = "vllm_ctx_offload.cli.simulate.vllm_has_managers"
    mocker.patch(name, return_value=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 0,
            "input_length": 512 * len(ids),
            "hash_ids": ids,
            "tenant": name,
        }
        for name, ids in REQUESTS
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def run(trace: Path, *args: str, **extra_config: Any) -> int:
    options = ["--extra-config", json.dumps(extra_config)] if extra_config else []
    return main(["simulate", str(trace), *options, *args])


def test_json_holds_the_rates_of_every_tenant_policy_and_capacity(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, "--capacity", "4", "--json", tenants=TENANTS) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.err == ""
    (result,) = found.pop("results")
    assert found == {
        "trace": str(trace),
        "requests": 4,
        "tokens_per_chunk": 512,
        "undeclared_tenants": [],
        "rejected_hints": {},
    }
    assert result["capacity_chunks"] == 4
    quiet = {"config": 40.0, "lru": 0.0, "bound": 40.0}
    noisy = {"config": 20.0, "lru": 20.0, "bound": 20.0}
    assert result["tenants"] == {
        "noisy": {
            "requests": 2,
            "chunks": 5,
            "tokens": 5 * 512,
            "block_hit_percent": noisy,
            "token_hit_percent": noisy,
        },
        "quiet": {
            "requests": 2,
            "chunks": 5,
            "tokens": 5 * 512,
            "block_hit_percent": quiet,
            "token_hit_percent": quiet,
        },
    }
    total = {"config": 30.0, "lru": 10.0, "bound": 30.0}
    assert result["total"]["block_hit_percent"] == total


def test_the_table_has_a_row_for_each_tenant_and_one_for_all(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capacities = ("--capacity", "4", "--capacity", "8")
    assert run(trace, *capacities, tenants=TENANTS) == 0
    printed = capsys.readouterr().out
    blocks = printed.split("chunks, ")[1:]
    assert "4 chunks, 2,048 tokens" in printed
    assert "8 chunks, 4,096 tokens" in printed
    lines = blocks[0].splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert "quiet 2 40.0/40.0 0.0/0.0 40.0/40.0" in rows
    assert "all 4 30.0/30.0 10.0/10.0 30.0/30.0" in rows
    assert "configured" in printed
    assert "vLLM" not in printed
    assert "\x1b" not in printed


def test_names_are_printed_as_they_are_and_undeclared_ones_are_told(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = trace.read_text().replace('"noisy"', '"\\ud800"')
    text = text.replace('"quiet"', '"[bold]"').replace("}", ', "ctx": {"ttl_s": 0}}')
    trace.write_text(text)
    assert run(trace, "--capacity", "4", tenants={"[bold]": {}}) == 0
    printed = capsys.readouterr().out
    assert "[bold] " in printed
    assert "counted as 'default': 1 tenant(s): '\\ud800'" in printed
    assert "Hints ignored or clamped: ttl_s (not_positive): 4" in printed


def test_sizes_become_chunks_with_the_bytes_of_a_token(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tenants = {"quiet": {"reserved": "1MiB"}, "noisy": {}}
    options = ("--bytes-per-token", "1KiB", "--capacity", "2MiB", "--json")
    assert run(trace, *options, tenants=tenants) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["capacity_chunks"] == 4
    assert result["total"]["block_hit_percent"]["config"] == pytest.approx(30)


def test_the_configured_memory_is_the_capacity_where_none_is_given(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--bytes-per-token", "1024", "--json")
    assert run(trace, *options, cpu_bytes_to_use="3MiB") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["capacity_chunks"] == 6


def test_the_configuration_may_be_in_a_file(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"tenants": TENANTS}))
    assert run(trace, "--capacity", "4", "--json", "--extra-config", f"@{path}") == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert set(result["tenants"]) == {"quiet", "noisy"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "--capacity is missing"),
        (["--capacity", "0"], "--capacity 0 holds no chunk"),
        (["--capacity", "many"], "--capacity many is no size"),
        (["--capacity", "4GiB"], "--capacity 4GiB is a size; add --bytes-per-token"),
        (["--capacity", "4", "--tokens-per-chunk", "0"], "has to be 1 or more"),
        (["--capacity", "4", "--tokens-per-chunk", "99"], "check --tokens-per-chunk"),
        (["--capacity", "4", "--bytes-per-token", "x"], "--bytes-per-token x is no"),
        (["--capacity", "4", "--bytes-per-token", "0"], "has to be 1 or more"),
        (["--capacity", "4", "--extra-config", "{"], "--extra-config is no JSON:"),
        (["--capacity", "4", "--extra-config", "[]"], "is no JSON object"),
        (["--capacity", "4", "--extra-config", "@none"], "none can't be read"),
        (["--capacity", "4", "--extra-config", '{"tenant": {}}'], "'tenants'?"),
        (
            ["--capacity", "4", "--extra-config", '{"tenants":{"a":{"reserved":9}}}'],
            "reserved or limit in bytes; add --bytes-per-token",
        ),
        (
            ["--capacity", "4", "--extra-config", '{"tenants":{"a":{"limit":"1%"}}}'],
            "tenant 'a' has limit",
        ),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(
    trace: Path, args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, *args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_wrong_line_is_one_sentence_and_exit_code_2(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(trace.read_text() + "\n{}")
    assert run(trace, "--capacity", "4") == 2
    printed = capsys.readouterr()
    assert printed.err == f"{trace}, line 5: 'timestamp' is missing.\n"


def test_a_bar_is_shown_on_a_terminal_only(
    trace: Path, capsys: pytest.CaptureFixture[str], mocker: MockerFixture
) -> None:
    bar = mocker.spy(__import__("rich.progress").progress.Progress, "__init__")
    assert run(trace, "--capacity", "4") == 0
    assert bar.call_args.kwargs["disable"] is True
    mocker.patch("sys.stderr.isatty", return_value=True)
    assert run(trace, "--capacity", "4") == 0
    assert bar.call_args.kwargs["disable"] is False


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
@pytest.mark.parametrize("tenants", [{}, TENANTS])
def test_the_plot_is_a_png(
    trace: Path, tmp_path: Path, tenants: dict[str, Any]
) -> None:
    path = tmp_path / "plot.png"
    capacities = ("--capacity", "8", "--capacity", "4", "--plot", str(path))
    assert run(trace, *capacities, tenants=tenants) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_a_plot_without_a_folder_is_refused_at_once(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none" / "plot.png"
    assert run(trace, "--capacity", "4", "--plot", str(path)) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_without_matplotlib_the_plot_is_refused_at_once(
    trace: Path, capsys: pytest.CaptureFixture[str], mocker: MockerFixture
) -> None:
    mocker.patch("importlib.util.find_spec", return_value=None)
    assert run(trace, "--capacity", "4", "--plot", "plot.png") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "install vllm-ctx-offload[plot]" in printed.err
