"""The guard between the planner and vLLM's scheduler: CONTRACT 19."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from vllm_ctx_offload.adapters.scheduler_side import SchedulerSide
from vllm_ctx_offload.core import HostMemoryManager
from vllm_ctx_offload.messages import TransferJob, TransferPlan, WorkerReport
from vllm_ctx_offload.scheduler import StepEvents, TableUpdate

MakeSide = Callable[..., SchedulerSide]
MakeRequest = Callable[..., Request]

# Hook -> (method of the planner, call of the side, what vLLM gets for an answer).
HOOKS: dict[str, tuple[str, Callable[[SchedulerSide, Any], Any], Any]] = {
    "on_new_request": (
        "on_new_request",
        lambda side, request: side.on_new_request(request),
        None,
    ),
    "get_num_new_matched_tokens": (
        "lookup",
        lambda side, request: side.lookup(request, 0),
        (0, False),
    ),
    "update_state_after_alloc": (
        "on_allocated",
        lambda side, request: side.on_allocated(request, [[1]], 0),
        None,
    ),
    "build_connector_meta": (
        "plan_step",
        lambda side, request: side.plan_step(StepEvents),
        TransferPlan(),
    ),
    "update_connector_output": (
        "on_worker_report",
        lambda side, request: side.on_worker_report(WorkerReport()),
        None,
    ),
    "request_finished": (
        "on_finished",
        lambda side, request: side.on_finished(request, [[]]),
        None,
    ),
    "reset_cache": ("reset", lambda side, request: side.reset(), True),
}


def break_planner(side: SchedulerSide, method: str) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug of ours")

    setattr(side.planner, method, fail)


def store(side: SchedulerSide, request: Request) -> dict[str, Any] | None:
    """Stores a prompt of whole blocks; returns its receipt."""
    num_tokens = request.num_prompt_tokens
    blocks = list(range(1, num_tokens // 4 + 1))
    side.on_new_request(request)
    side.lookup(request, 0)
    side.on_allocated(request, [blocks], 0)
    events = StepEvents(
        {request.request_id: num_tokens},
        [TableUpdate(request.request_id, [blocks], 0, replace=True)],
    )
    for job in side.plan_step(lambda: events).stores:
        side.on_worker_report(WorkerReport(Counter([job.job_id])))
    return side.on_finished(request, [blocks])


@pytest.mark.parametrize("hook", HOOKS)
def test_error_in_a_hook_disables_and_never_reaches_vllm(
    make_side: MakeSide,
    make_request: MakeRequest,
    caplog: pytest.LogCaptureFixture,
    hook: str,
) -> None:
    side, request = make_side(), make_request(20)
    store(side, make_request(16, "stored"))
    method, call, answer = HOOKS[hook]
    break_planner(side, method)
    assert call(side, request) == answer
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert f"internal error in {hook}" in record.getMessage()
    # From now on there is no offloading, and nothing more is logged.
    assert side.lookup(request, 0) == (0, False)
    for _, later_call, later_answer in HOOKS.values():
        assert later_call(side, request) == later_answer
    assert not side.has_work
    assert len(caplog.records) == 1


def test_error_while_the_step_is_read_disables_too(make_side: MakeSide) -> None:
    def fail() -> StepEvents:
        raise AttributeError

    side = make_side()
    assert side.plan_step(fail) == TransferPlan()
    assert side.lookup(None, 0) == (0, False)


def test_promised_load_that_broke_is_reported_as_failed(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    """1. A hit is promised; 2. taking the admission fails: vLLM waits for a report.

    The job names the promised blocks, not the local hit before them, and no rows.
    """
    side, request = make_side(), make_request(20)
    store(side, make_request(16, "stored"))
    assert side.lookup(request, 8) == (8, True)
    break_planner(side, "on_allocated")
    side.on_allocated(request, [[7, 8, 9, 10]], 8)
    assert side.plan_step(StepEvents) == TransferPlan(
        loads=(TransferJob(-1, "r", (9, 10), ()),)
    )
    assert side.plan_step(StepEvents) == TransferPlan()


@pytest.mark.parametrize("when", ["reading", "planning", "later hook"])
def test_admitted_load_that_was_not_sent_is_reported_as_failed(
    make_side: MakeSide, make_request: MakeRequest, when: str
) -> None:
    side, request = make_side(), make_request(20)
    store(side, make_request(16, "stored"))
    assert side.lookup(request, 0) == (16, True)
    side.on_allocated(request, [[7, 8, 9, 10]], 16)
    if when == "later hook":
        break_planner(side, "reset")
        side.reset()

    def events() -> StepEvents:
        if when == "reading":
            raise AttributeError
        # A running request cannot be told of a table while its load is under way.
        return StepEvents({"r": 4}, [TableUpdate("r", [[1]], 0, replace=True)])

    assert side.plan_step(events) == TransferPlan(
        loads=(TransferJob(1, "r", (7, 8, 9, 10), ()),)
    )
    assert side.plan_step(StepEvents) == TransferPlan()


def test_reports_of_failed_jobs_are_taken_in_silence(make_side: MakeSide) -> None:
    side = make_side()
    break_planner(side, "reset")
    side.reset()
    side.on_worker_report(WorkerReport(Counter([-1, -1]), {-1}))


@pytest.mark.parametrize("params", [7, "x", [1], True])
def test_params_of_a_wrong_type_are_taken_out_of_vllms_way(
    make_side: MakeSide, make_request: MakeRequest, params: Any
) -> None:
    """CASES 31: vLLM itself reads fields of them after `on_new_request`."""
    side, request = make_side(), make_request(20, params=params)
    side.on_new_request(request)
    assert request.kv_transfer_params is None
    assert side.lookup(request, 0) == (0, False)


def test_ignored_field_is_logged_once_and_counted_each_time(
    make_side: MakeSide, make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    side = make_side()
    for index in range(3):
        params = {"ctx": {"priority": "high", "ttl_s": -1}}
        side.on_new_request(make_request(20, f"r{index}", params))
    assert len(caplog.records) == 2
    counts = side.take_stats()
    assert counts['["hints_rejected", "priority", "type"]'] == 3
    assert counts['["hints_rejected", "ttl_s", "negative"]'] == 3


@pytest.mark.parametrize("odd", ["a\nb", "\u2028", "\x85", "\x1b[2J", "\ud800", "%s"])
def test_no_text_of_a_request_gets_into_log_or_metrics(
    make_side: MakeSide,
    make_request: MakeRequest,
    caplog: pytest.LogCaptureFixture,
    odd: str,
) -> None:
    """A client could write lines of its own there."""
    side = make_side(
        tenants={"acme": {}, "*": {"isolation": "private"}},
        tenant_from=["kv_transfer_params", "cache_salt", "lora"],
    )
    directives = [{odd: odd}, {"priority": 1, odd: 1}, odd]
    for index, ctx in enumerate(
        [
            {"tenant": odd, "session": odd, odd: odd, "priority": odd},
            {"tenant": [odd], "retention_directives": directives, "store": odd},
            {"tenant": odd * 200, "session": odd * 200, "release": True},
            odd,
        ]
    ):
        params = {"ctx": {**ctx, "receipt": True} if isinstance(ctx, dict) else ctx}
        request = make_request(16, f"{odd}{index}", params, cache_salt=odd)
        receipt = store(side, request)
        assert odd not in json.dumps(receipt, ensure_ascii=False)
    assert caplog.records
    for record in caplog.records:
        assert odd not in record.getMessage()
        assert record.getMessage().isprintable()
    assert not side._disabled
    assert not [key for key in side.take_stats() if odd in json.loads(key)]


def test_a_device_reset_between_an_answer_and_its_admission_fails_the_load(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    """Should a release put a step between them: nothing old is copied."""
    side, request = make_side(reset_with_device_cache=True), make_request(20)
    pool = BlockPool(8, True, 4)
    side.on_block_pool(pool)
    store(side, make_request(16, "stored"))
    assert side.lookup(request, 0) == (16, True)
    assert pool.reset_prefix_cache()
    side.on_allocated(request, [[1, 2, 3, 4]], 16)
    (job,) = side.plan_step(StepEvents).loads
    assert (job.block_ids, job.rows) == ((1, 2, 3, 4), ())


def test_the_pool_is_left_alone_where_resets_are_not_followed(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    side = make_side()
    side.on_block_pool(None)
    store(side, make_request(16, "stored"))
    assert side.lookup(make_request(20), 0) == (16, True)


def resident(side: SchedulerSide) -> dict[str, int]:
    assert isinstance(side.manager, HostMemoryManager)
    side.manager.check_invariants()
    return side.manager.resident_by_tenant()


def test_accounts_of_the_configuration_are_those_of_the_manager(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    """A pool of 16 chunks of 10 bytes: `acme` may hold 3, the others what is left."""
    tenants = {"acme": {"limit": "20%", "reserved": 10}, "*": {"weight": 2}}
    side = make_side(tenants=tenants)
    for name in ("acme", "stranger"):
        store(side, make_request(16, name, {"ctx": {"tenant": name}}))
    assert resident(side) == {"acme": 3, "default": 4}


def test_what_finds_no_place_is_on_the_receipt_with_the_reason(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    side = make_side(tenants={"acme": {"limit": 20}})
    params = {"ctx": {"tenant": "acme", "receipt": True}}
    assert store(side, make_request(16, params=params)) == {
        "ctx": {
            "tenant": "acme",
            "priority": 35,
            "lookup_tokens": 16,
            "loaded_tokens": 0,
            "stored_tokens": 8,
            "rejected_tokens": 8,
            "rejected_reason": "limit",
        }
    }
    assert side.take_stats()['["rejected_stores", "acme", "limit"]'] == 2


@pytest.mark.parametrize("asked", [None, 10, 35, 80])
@pytest.mark.parametrize("tenant", ["acme", "low", "stranger"])
def test_the_priority_on_the_receipt_is_that_of_the_chunks(
    make_side: MakeSide, make_request: MakeRequest, tenant: str, asked: int | None
) -> None:
    """A stranger may ask for 60, but is accounted to `default`, which has 30."""
    most = {"acme": 100, "low": 20, "*": 60, "default": 30}
    tenants = {name: {"max_priority": value} for name, value in most.items()}
    side = make_side(tenants=tenants, max_protected="100%")
    hints = {"tenant": tenant, "priority": asked, "receipt": True}
    receipt = store(side, make_request(16, params={"ctx": hints}))
    assert receipt is not None
    assert isinstance(side.manager, HostMemoryManager)
    kept = {run.priority for run in side.manager._table}
    assert kept == {receipt["ctx"]["priority"]}


@pytest.mark.parametrize(
    ("max_protected", "num_protected", "num_counted"),
    [("0%", 0, 1), ("13%", 2, 1), ("100%", 4, 0)],
)
def test_no_more_than_the_budget_is_protected_and_the_rest_is_counted(
    make_side: MakeSide,
    make_request: MakeRequest,
    max_protected: str,
    num_protected: int,
    num_counted: int,
) -> None:
    side = make_side(max_protected=max_protected)
    side.on_new_request(request := make_request(16, params={"ctx": {"priority": 80}}))
    events = StepEvents({"r": 16}, [TableUpdate("r", [[1, 2, 3, 4]], 0, replace=True)])
    side.plan_step(lambda: events)
    assert request.num_prompt_tokens == 16
    assert isinstance(side.manager, HostMemoryManager)
    assert side.manager.num_protected == num_protected
    counts = side.take_stats()
    assert counts.get('["hints_rejected", "priority", "budget"]', 0) == num_counted


def test_decode_priority_begins_where_the_prompt_ends(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    """1. Four blocks of prompt are stored, at the default; 2. then one of decoding."""
    side = make_side(offload_prompt_only=False)
    request = make_request(16, params={"ctx": {"decode_priority": 80}})
    side.on_new_request(request)
    table = [TableUpdate("r", [[1, 2, 3, 4, 5]], 0, replace=True)]
    side.plan_step(lambda: StepEvents({"r": 16}, table))
    assert isinstance(side.manager, HostMemoryManager)
    assert side.manager.num_protected == 0
    request.num_computed_tokens = 16
    request.append_output_token_ids([100, 101, 102, 103])
    side.plan_step(lambda: StepEvents({"r": 4}))
    assert side.manager.num_protected == 1
    assert resident(side) == {"default": 5}


@pytest.mark.parametrize("policy", ["ctx", "lru"])
def test_lru_ignores_limits_and_priorities_but_not_whose_keys_they_are(
    make_side: MakeSide, make_request: MakeRequest, policy: str
) -> None:
    tenants = {"acme": {"limit": 10}, "zeta": {"load": False}}
    side = make_side(tenants=tenants, eviction_policy=policy)
    params = {"ctx": {"tenant": "acme", "priority": 80}}
    store(side, make_request(16, params=params))
    assert isinstance(side.manager, HostMemoryManager)
    plain = policy == "lru"
    assert resident(side)["acme"] == (4 if plain else 1)
    assert side.manager.num_protected == (0 if plain else 1)
    num_hit = 16 if plain else 4
    assert side.lookup(make_request(20, "own", params), 0) == (num_hit, True)
    for name in ("zeta", "stranger"):
        other = make_request(20, name, {"ctx": {"tenant": name}})
        assert side.lookup(other, 0) == (0, False)


def test_context_takes_what_the_request_says_of_itself(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    side = make_side(tenants={"acme": {}}, tenant_from=["cache_salt"])
    request = make_request(20, cache_salt="acme", session_id="s-1")
    side.on_new_request(request)
    context = side.planner._states["r"].req_context
    assert (context.tenant, context.namespace) == ("acme", b"acme")
    assert context.hints.session == "s-1"
    assert context.num_prompt_tokens == 20


def test_threshold_puts_the_filter_before_the_manager(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    side = make_side(store_threshold=2)
    request = make_request(16)
    events = StepEvents({"r": 16}, [TableUpdate("r", [[1, 2, 3, 4]], 0, replace=True)])
    side.on_new_request(request)
    assert side.plan_step(lambda: events).stores == ()
    side.on_finished(request, [[1, 2, 3, 4]])
    side.on_new_request(request)
    assert len(side.plan_step(lambda: events).stores) == 1


def test_the_filter_gives_tenants_their_share_of_its_tracker(
    make_side: MakeSide,
) -> None:
    tenants = {"acme": {"reserved": "50%", "weight": 2}, "zeta": {"limit": "25%"}}
    side = make_side(tenants=tenants, store_threshold=2, max_tracker_size=64)
    accounts = {
        account.name: account for account in side.manager._tracker._table.accounts
    }
    assert (accounts["acme"].reserved, accounts["acme"].weight) == (32, 2)
    assert (accounts["zeta"].limit, accounts["default"].limit) == (16, None)


def test_work_is_pending_until_the_worker_has_reported(
    make_side: MakeSide, make_request: MakeRequest
) -> None:
    side, request = make_side(), make_request(16)
    assert not side.has_work
    events = StepEvents({"r": 16}, [TableUpdate("r", [[1, 2, 3, 4]], 0, replace=True)])
    side.on_new_request(request)
    side.plan_step(lambda: events)
    side.on_finished(request, [[1, 2, 3, 4]])
    assert side.has_work
    side.on_worker_report(WorkerReport(Counter([0])))
    assert not side.has_work
