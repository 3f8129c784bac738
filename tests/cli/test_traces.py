"""Trace readers: what they take, and the one sentence they give for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ctx_offload.cli.traces import (
    Trace,
    TraceError,
    TraceRequest,
    read_trace,
)


def line(**changes: Any) -> dict[str, Any]:
    record = {"timestamp": 2000, "input_length": 1100, "hash_ids": [4, 5, 6]}
    return {**record, "output_length": 1, **changes}


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "trace.jsonl"
    texts = [x if isinstance(x, str) else json.dumps(x) for x in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_mooncake_lines_are_read_without_their_partial_chunk(tmp_path: Path) -> None:
    path = write(tmp_path, line(), "", line(timestamp=2500.5, hash_ids=[4, 5]))
    assert read_trace(path) == Trace(
        [
            TraceRequest(2.0, 1100, [4, 5], {}),
            TraceRequest(2.5005, 1100, [4, 5], {}),
        ],
        512,
    )


def test_requests_come_in_the_order_of_arrival(tmp_path: Path) -> None:
    late, early, same = (line(timestamp=t, input_length=n) for t, n in TIMES)
    trace = read_trace(write(tmp_path, late, early, same))
    assert [(r.arrived_at, r.num_tokens) for r in trace.requests] == [
        (1.0, 1101),
        (2.0, 1100),
        (2.0, 1102),
    ]


TIMES = [(2000, 1100), (1000, 1101), (2000, 1102)]


def test_chunks_may_have_another_size(tmp_path: Path) -> None:
    path = write(tmp_path, line(input_length=40, hash_ids=[1, 2, 3]))
    trace = read_trace(path, 16)
    assert trace.tokens_per_chunk == 16
    assert trace.requests[0].chunk_ids == [1, 2]


def test_a_request_shorter_than_a_chunk_has_none(tmp_path: Path) -> None:
    path = write(tmp_path, line(input_length=0, hash_ids=[]))
    assert read_trace(path).requests[0].chunk_ids == []


@pytest.mark.parametrize(
    ("fields", "ctx"),
    [
        ({}, {}),
        ({"ctx": None}, {}),
        ({"tenant": "a", "session": "s"}, {"tenant": "a", "session": "s"}),
        ({"ctx": {"tenant": "a", "priority": 80}}, {"tenant": "a", "priority": 80}),
        ({"tenant": "a", "ctx": {"tenant": "a"}}, {"tenant": "a"}),
        ({"session": "s", "ctx": {"store": False}}, {"session": "s", "store": False}),
    ],
)
def test_tenant_and_session_are_short_forms_of_ctx(
    tmp_path: Path, fields: dict[str, Any], ctx: dict[str, Any]
) -> None:
    (request,) = read_trace(write(tmp_path, line(**fields))).requests
    assert request.ctx == ctx


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "is no JSON (Expecting"),
        ("[1]", "is no JSON object"),
        ({"timestamp": 1}, "'input_length' is missing"),
        (line(timestamp="1"), "'timestamp' = \"1\" is no number of milliseconds"),
        (line(timestamp=True), "'timestamp' = true is no number"),
        (line(timestamp=-1), "'timestamp' = -1 is no number"),
        (line(timestamp=float("nan")), "'timestamp' = NaN is no number"),
        (line(timestamp=10**400), "'timestamp' = 1000000"),
        (line(input_length=1.5), "'input_length' = 1.5 is no count of tokens"),
        (line(input_length=-1), "'input_length' = -1 is no count of tokens"),
        (line(hash_ids=7), "'hash_ids' is no list of whole numbers"),
        (line(hash_ids=[4, "5", 6]), "'hash_ids' is no list of whole numbers"),
        (line(hash_ids=[4, -5, 6]), "'hash_ids' is no list of whole numbers"),
        (line(hash_ids=[4, 2**63, 6]), "'hash_ids' is no list of whole numbers"),
        (
            line(hash_ids=[4]),
            "1 ids, but 'input_length' = 1100 is 2 full chunks of 512",
        ),
        (line(hash_ids=[4, 5, 6, 7]), "has 4 ids, but 'input_length' = 1100"),
        (line(hash_ids=[5, 4, 6]), "has 5 at the start, but line 1 has it after 4"),
        (line(hash_ids=[4, 4, 6]), "has 4 after 4, but line 1 has it at the start"),
        (line(tenant=7), "'tenant' = 7 is no text"),
        (line(ctx=[1]), "'ctx' = [1] is no object of hints"),
        (line(session="s", ctx={"session": "t"}), "'session' and 'ctx.session' differ"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(
    tmp_path: Path, bad: Any, says: str
) -> None:
    path = write(tmp_path, line(), bad)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith(f"{path}, line 2: ")
    assert says in text
    assert text.endswith(".")
    assert "\n" not in text


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(TraceError, match=r"line 1: is no JSON"):
        read_trace(path)


def test_an_empty_trace_and_a_missing_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no requests\.$"):
        read_trace(write(tmp_path, ""))
    with pytest.raises(TraceError, match=r"can't be read \(No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match=r"can't be read"):
        read_trace(tmp_path / "none.npz")


# ---- NPZ


def save(folder: Path, **changes: Any) -> Path:
    np = pytest.importorskip("numpy")
    arrays = {
        "off": [0, 2, 5, 5],
        "blk": [0, 1, 0, 1, 2],
        "t": [3.0, 1.0, 4.0],
        "tin": [20, 31, 5],
        "sess": [7, 8, 7],
        "B": 10,
        **changes,
    }
    path = folder / "trace.npz"
    np.savez(path, **{name: np.array(v) for name, v in arrays.items() if v is not None})
    return path


def test_agent_sessions_are_read_with_their_chunk_size(tmp_path: Path) -> None:
    assert read_trace(save(tmp_path)) == Trace(
        [
            TraceRequest(1.0, 31, [0, 1, 2], {"session": "8"}),
            TraceRequest(3.0, 20, [0, 1], {"session": "7"}),
            TraceRequest(4.0, 5, [], {"session": "7"}),
        ],
        10,
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"blk": None}, "the array 'blk' is missing"),
        ({"sess": [7]}, "the arrays do not fit together"),
        ({"off": [0, 2, 5, 6]}, "the arrays do not fit together"),
        ({"tin": [20, 31, 15]}, "the arrays do not fit together"),
        ({"tin": [20, 31, -1]}, "the arrays do not fit together"),
        ({"B": 0}, "the arrays do not fit together"),
        ({"blk": [0, 1, 1, 0, 2]}, "request 1: 'hash_ids' has 1 at the start"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(TraceError, match=says):
        read_trace(save(tmp_path, **changes))


def test_another_chunk_size_than_the_file_says_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert read_trace(path, 10).tokens_per_chunk == 10
    with pytest.raises(TraceError, match="chunks have 10 tokens, not 512"):
        read_trace(path, 512)


def test_a_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    path = tmp_path / "trace.npz"
    path.write_bytes(b"PK nothing")
    with pytest.raises(TraceError, match="is no NPZ file"):
        read_trace(path)
