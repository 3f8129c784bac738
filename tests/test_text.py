"""What others write, and where it comes out: metrics, logs, terminals, errors.

Names, values and paths of any characters come in by the configuration, by requests and
by a page of metrics. Whatever leaves is one line that UTF-8 can carry, or was refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from rich.console import Console

from vllm_ctx_offload.adapters.catalogue import CONNECTOR_LABEL, PREFIX
from vllm_ctx_offload.cli import main
from vllm_ctx_offload.cli.scrape import parse_page
from vllm_ctx_offload.cli.top import Snapshot, as_json, draw
from vllm_ctx_offload.config import OffloadConfig, parse_config
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.text import printable

# One of every category, every kind of line end, and what steers a terminal.
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
ODD = LINE_ENDS + "\0\t\x1b\x7f\x9b\u200b\u200e\u202e\u2066\ufeff\ud800\udcff\ue000\xa0"
CATEGORIES = sorted({unicodedata.category(chr(code)) for code in range(0x110000)})
# Hypothesis leaves surrogates out unless it is told not to.
ANY_CHARACTER = st.sampled_from(CATEGORIES).flatmap(
    lambda category: st.characters(categories=[category])
)
ANY_TEXT = st.text(ANY_CHARACTER | st.sampled_from(ODD + '\\"{}=[]%$'), max_size=40)
QUIET = settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def is_one_line(text: str) -> bool:
    """Whether every reader of lines takes it for one, and UTF-8 can carry it."""
    text.encode()
    return len(text.splitlines()) == 1 and text.isprintable()


def sentence_of(extra_config: dict[str, Any]) -> str | None:
    try:
        parse_config(extra_config)
    except ConfigError as error:
        return str(error)
    return None


def page_of(name: str, tenants: list[str]) -> str:
    """Returns a page as vLLM's server makes it; `name` is that of its model."""
    registry = CollectorRegistry()
    labels = ["model_name", "engine", CONNECTOR_LABEL, "tenant"]
    gauge = Gauge(PREFIX + "resident_bytes", "...", labels, registry=registry)
    for tenant in tenants:
        gauge.labels(name, "0", "0", tenant).set(5)
    return generate_latest(registry).decode()


def lines_of(page: str) -> list[str]:
    """Returns what `top` prints for a page."""
    console = Console(width=400, file=io.StringIO(), no_color=True)
    console.print(draw(Snapshot(parse_page(page), {}, 0.0)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_every_category_of_unicode_is_tried() -> None:
    assert {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs", "Lo", "So"} < {*CATEGORIES}


@QUIET
@given(text=ANY_TEXT)
def test_printable_text_is_left_alone_and_all_other_becomes_so(text: str) -> None:
    shown = printable(text)
    assert not shown or is_one_line(shown)
    assert (shown == text) == text.isprintable()
    assert printable(shown) == shown


@QUIET
@given(name=ANY_TEXT.filter(bool))
@example(name="a\u2028b")
@example(name="\ud800")
@example(name="Zoë 💾 テナント")
def test_a_tenants_name_is_refused_or_comes_out_as_it_went_in(name: str) -> None:
    """By way of /metrics and its parser into one row of `top`."""
    if told := sentence_of({"tenants": {name: {}}}):
        assert is_one_line(told)
        assert not name.isprintable()
        return
    page = page_of("llama", [name, "default"])
    (pool,) = parse_page(page).values()
    assert {*pool.tenants} == {name, "default"}
    rows = [line for line in lines_of(page) if line.split()]
    # The title, the head, a rule, and a row each.
    assert len(rows) == 5
    assert json.loads(json.dumps(as_json(Snapshot({"0": pool}, {}, 0))))


@QUIET
@given(name=ANY_TEXT)
@example(name=LINE_ENDS)
def test_others_names_on_the_page_break_no_row_of_top(name: str) -> None:
    """The name of the model is vLLM's; tenants may be those of another program."""
    name = name.encode(errors="ignore").decode()  # what a page can hold at all
    page = page_of(name, ["acme", f"x{name}"])
    (pool,) = parse_page(page).values()
    assert {*pool.tenants} == {"acme", printable(f"x{name}")}
    lines = lines_of(page)
    assert all(is_one_line(line) for line in lines if line)
    assert len([line for line in lines if line.split()]) == 5


# ---- errors


def misplaced(text: str) -> Iterator[dict[str, Any]]:
    """Yields configurations with a text in each place that takes one."""
    for key, field in OffloadConfig.model_fields.items():
        assert field is not None
        yield {key: text}
        yield {key: [text]}
        yield {key: {text: text}}
    yield {text: 1}
    for field_name in ("reserved", "isolation", "weight", text):
        yield {"tenants": {"acme": {field_name: text}}}
        yield {"tenants": {text: {field_name: text}}}
        yield {"tenants": {text: {field_name: -1}}}


@QUIET
@given(text=ANY_TEXT)
@example(text=ODD)
def test_every_fault_of_the_configuration_is_one_line(text: str) -> None:
    for extra_config in misplaced(text):
        if (told := sentence_of(extra_config)) is not None:
            assert is_one_line(told), extra_config


@QUIET
@given(text=ANY_TEXT)
@example(text=ODD)
def test_every_fault_of_a_policy_file_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.yaml"
    for policy in misplaced(text):
        path.write_text(json.dumps(policy))
        told = sentence_of({"policy_file": str(path)})
        assert told is None or is_one_line(told)
    path.write_bytes(text.encode(errors="replace"))
    told = sentence_of({"policy_file": str(path)})
    assert told is None or is_one_line(told)


# ---- commands


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    with contextlib.suppress(SystemExit):
        main(arguments)
    captured = capsys.readouterr()
    text = captured.out + captured.err
    text.encode()
    return text.split("\n")


@pytest.mark.parametrize("odd", [f"a{char}b" for char in ODD.replace("\0", "")])
def test_what_the_doctor_finds_is_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: str
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"model_type": odd, "architectures": [odd]}))
    for extra, folder in (
        ({"tenants": {odd: {}}, odd: odd, "policy_file": odd}, str(model)),
        ({"kv_connector": odd}, str(tmp_path / odd)),
    ):
        lines = output_of(
            capsys, "doctor", "--extra-config", json.dumps(extra), "--model", folder
        )
        assert all(is_one_line(line) for line in lines if line), lines


@pytest.mark.parametrize("odd", [f"a{char}b" for char in ODD.replace("\0", "")])
def test_what_simulate_says_is_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: str
) -> None:
    # Of lone surrogates a command line has those that stand for bytes.
    name = odd.replace("\ud800", "\udcff")
    trace = tmp_path / "trace.jsonl"
    record = {"timestamp": 0, "input_length": 512, "hash_ids": [1], "tenant": odd}
    trace.write_text(json.dumps(record))
    for path, more in (
        (str(trace), ()),
        (str(trace), ("--extra-config", json.dumps({odd: 1}))),
        (str(trace), ("--plot", f"{tmp_path}/{name}/x.png")),
        (str(tmp_path / name), ()),
    ):
        lines = output_of(capsys, "simulate", path, "--capacity", "10", *more)
        assert all(is_one_line(line) for line in lines if line), lines
