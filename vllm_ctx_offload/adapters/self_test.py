"""Whether the objects of this release of vLLM are what the connector takes them for.

Requests are made, scheduled, preempted, resumed and finished, as vLLM's own classes say
it, through the functions that the hooks use, and what comes of it is compared. So a
release that nobody has seen stops the start with a sentence instead of serving without
the connector, or worse.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from packaging.version import Version

from vllm_ctx_offload.adapters.releases import PRESENT_SINCE, SUPPORTED_TEXT
from vllm_ctx_offload.adapters.scheduler_side import SchedulerSide
from vllm_ctx_offload.adapters.step_events import step_events, step_results
from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.errors import ConfigError
from vllm_ctx_offload.messages import TransferPlan, WorkerReport
from vllm_ctx_offload.plan import GroupShape, OffloadPlan
from vllm_ctx_offload.scheduler import FinalState, StepEvents

__all__ = ["examine_release"]

_BLOCK: Final = 4  # tokens
_PROMPT: Final = list(range(1, 10))  # two blocks and a token to compute
_ID: Final = "self-test"
_PLAN: Final = OffloadPlan(
    groups=(GroupShape(_BLOCK),),
    blocks_per_chunk=1,
    tokens_per_hash=_BLOCK,
    bytes_per_block=1,
    num_workers=1,
    num_slots=4,
)
_CONFIG: Final = {
    "cpu_bytes_to_use": 4,
    "tenants": {"salted": {}},
    "tenant_from": ["cache_salt"],
}


class _UnreadableError(Exception):
    """A field that is missing, or that says something else."""

    def __init__(self, name: str, field: str) -> None:
        super().__init__(name, field)
        self.name = name
        self.field = field


def examine_release(
    classes: Mapping[str, type], metadata_class: type[Any], version: str
) -> None:
    """Returns if the connector can read all that it is told.

    Args:
        classes: of vLLM, by name.
        metadata_class: of our workers' reports.
        version: of vLLM.

    Raises:
        ConfigError: naming the class, the field and the supported releases.
    """
    trial = _Trial(classes, metadata_class)
    try:
        for name, field, since in PRESENT_SINCE:
            if Version(version) >= Version(since):
                trial.require(name, field)
        trial.run()
    except _UnreadableError as error:
        _refuse(version, error.name, error.field, error)
    except AttributeError as error:
        name = type(error.obj).__name__
        # Of None, say: then what was looked at last is not what it was.
        where = (name, str(error.name)) if name in classes else trial.reads
        _refuse(version, *where, error)
    except Exception as error:  # noqa: BLE001 - whatever an unknown object leads to
        _refuse(version, *trial.reads, error)


def _refuse(version: str, name: str, field: str, cause: Exception) -> NoReturn:
    raise ConfigError(
        f"CtxOffloadConnector: in vLLM {version} the field '{field}' of the class "
        f"{name} is missing or means something else than in the supported releases "
        f"({SUPPORTED_TEXT}), so requests can't be followed; install one of those."
    ) from cause


def _hashes(request: Any) -> list[bytes]:
    """Stands for vLLM's function that hashes the blocks that are full and new."""
    known, full = len(request.block_hashes), request.num_tokens // _BLOCK
    return [b"%032d" % index for index in range(known, full)]


class _Trial:
    """The life of a request, told with vLLM's classes."""

    def __init__(self, classes: Mapping[str, type], metadata_class: type[Any]) -> None:
        self._classes = classes
        self._metadata_class = metadata_class
        self._planner = SchedulerSide(parse_config(_CONFIG), _PLAN).planner
        # (class, field) that what is done now depends on.
        self.reads = ("Request", "__init__")

    def require(self, name: str, field: str) -> None:
        """Raises unless objects of a class have a field."""
        if (cls := self._classes.get(name)) is None:
            raise _UnreadableError(name, field)
        thing = self._make_request(_ID) if name == "Request" else cls
        if not hasattr(thing, field) and field not in _fields(cls):
            raise _UnreadableError(name, field)

    def run(self) -> None:
        """Raises what tells which field is unreadable."""
        self._requests_that_skip_loads()
        request = self._make_request(
            _ID, extra_args={"kv_transfer_params": {"ctx": {"session": "s"}}}
        )
        self._made(request)
        self._stored(request)
        self._preempted(request)
        self._loaded(request)
        self._resumed(request)
        self._finished(request)
        self._blocks_copied_and_states()

    def _expect(self, name: str, field: str, found: object, wanted: object) -> None:
        if found != wanted:
            raise _UnreadableError(name, field)

    def _make(self, name: str, **values: Any) -> Any:
        """Returns an object of a dataclass; what has to be given and isn't is None."""
        cls = self._classes[name]
        fields = _fields(cls)
        for field in values.keys() - fields.keys():
            raise _UnreadableError(name, field)
        self.reads = (name, next(iter(values), "__init__"))
        nothing = dict.fromkeys(name for name, must in fields.items() if must)
        return cls(**nothing | values)

    def _make_request(self, request_id: str, **sampling: Any) -> Any:
        self.reads = ("Request", "__init__")
        params = self._classes["SamplingParams"](max_tokens=1, **sampling)
        return self._classes["Request"](
            request_id,
            list(_PROMPT),
            params,
            None,
            cache_salt="salted",
            block_hasher=_hashes,
        )

    def _events(self, num_tokens: int = 0, **values: Any) -> StepEvents:
        """Returns what a step's output says; what is not given is empty."""
        if "scheduled_cached_reqs" not in values:
            values["scheduled_cached_reqs"] = self._known()
        output: dict[str, Any] = {
            "num_scheduled_tokens": {_ID: num_tokens} if num_tokens else {},
            "scheduled_new_reqs": [],
            "preempted_req_ids": None,
        }
        return step_events(self._make("SchedulerOutput", **output | values))

    def _step(self, num_tokens: int, **values: Any) -> TransferPlan:
        return self._planner.plan_step(self._events(num_tokens, **values))

    def _as_new(self, block_ids: list[int], num_computed: int) -> dict[str, Any]:
        new = self._make(
            "NewRequestData",
            req_id=_ID,
            block_ids=(block_ids,),
            num_computed_tokens=num_computed,
        )
        return {"scheduled_new_reqs": [new]}

    def _known(self, *tables: list[int] | None, resumed: bool = False) -> Any:
        names = {"resumed_req_ids": {_ID} if resumed else set()}
        return self._make(
            "CachedRequestData",
            req_ids=[_ID for _ in tables],
            new_block_ids=[None if ids is None else (ids,) for ids in tables],
            num_computed_tokens=[len(_PROMPT) - 1 for _ in tables],
            **names if self._names_resumed else {},
        )

    @property
    def _names_resumed(self) -> bool:
        return "resumed_req_ids" in _fields(self._classes["CachedRequestData"])

    def _table(self) -> list[int]:
        return self._planner._states[_ID].block_ids[0]  # noqa: SLF001

    # ---- what is told

    def _requests_that_skip_loads(self) -> None:
        for option, value in (
            ("skip_reading_prefix_cache", True),
            ("prompt_logprobs", 1),
        ):
            request = self._make_request(option, **{option: value})
            self._planner.lookup(request, 0, 0.0)
            state = self._planner.on_new_request(request)
            reason = state.answer.skip_reason if state.answer else None
            self._expect("Request", option, reason, "skip_reading_prefix_cache")
            self._planner.on_finished(request, ([],))

    def _made(self, request: Any) -> None:
        state = self._planner.on_new_request(request)
        context = state.req_context
        self._expect("Request", "request_id", context.request_id, _ID)
        self._expect("Request", "cache_salt", context.tenant, "salted")
        self._expect("Request", "kv_transfer_params", context.hints.session, "s")
        for field in ("num_tokens", "num_prompt_tokens"):
            self._expect("Request", field, getattr(request, field), len(_PROMPT))
        self._expect("Request", "num_computed_tokens", request.num_computed_tokens, 0)
        hashes = [bytes(block_hash) for block_hash in request.block_hashes]
        self._expect("Request", "block_hashes", len(hashes), len(_PROMPT) // _BLOCK)
        answer = self._planner.lookup(request, 0, 0.0)
        self._expect("Request", "block_hashes", answer, (0, False))

    def _stored(self, request: Any) -> None:
        blocks = self._make("KVCacheBlocks", blocks=([self._block(1), self._block(2)],))
        self._planner.on_allocated(request, blocks.get_block_ids(), 0)
        plan = self._step(len(_PROMPT), **self._as_new([1, 2, 3], 0))
        self._expect("NewRequestData", "block_ids", self._table(), [1, 2, 3])
        stored = [job.block_ids for job in plan.stores]
        self._expect("SchedulerOutput", "num_scheduled_tokens", stored, [(1, 2)])
        self._end(*(job.job_id for job in plan.stores))
        request.num_computed_tokens = len(_PROMPT)

    def _preempted(self, request: Any) -> None:
        request.num_computed_tokens = 0
        self._step(0, preempted_req_ids={_ID})
        table = self._planner._states[_ID].block_ids  # noqa: SLF001
        self._expect("SchedulerOutput", "preempted_req_ids", table, [])

    def _loaded(self, request: Any) -> None:
        answer = self._planner.lookup(request, 0, 0.0)
        self._expect("KVConnectorOutput", "kv_connector_worker_meta", answer, (8, True))
        blocks = self._make("KVCacheBlocks", blocks=([self._block(4), self._block(5)],))
        self._planner.on_allocated(request, blocks.get_block_ids(), 2 * _BLOCK)
        plan = self._step(0)
        loaded = [job.block_ids for job in plan.loads]
        self._expect("KVCacheBlock", "block_id", loaded, [(4, 5)])
        self._end(*(job.job_id for job in plan.loads))
        request.num_computed_tokens = 2 * _BLOCK

    def _resumed(self, request: Any) -> None:
        """Up to 0.33 it is among the known requests, or the new ones; later the new."""
        if self._names_resumed:
            known = self._known([4, 5, 6], resumed=True)
            told = {"scheduled_cached_reqs": known}
        else:
            # What a new request always has now, because it may be a resumed one.
            must = _fields(self._classes["NewRequestData"])
            if not must.get("prefill_token_ids"):
                raise _UnreadableError("CachedRequestData", "resumed_req_ids")
            told = self._as_new([4, 5, 6], 2 * _BLOCK)
        self._step(1, **told)
        self._expect("CachedRequestData", "resumed_req_ids", self._table(), [4, 5, 6])
        request.num_computed_tokens = len(_PROMPT)
        for block_ids, table in (([7], [4, 5, 6, 7]), (None, [4, 5, 6, 7])):
            self._step(1, scheduled_cached_reqs=self._known(block_ids))
            self._expect("CachedRequestData", "new_block_ids", self._table(), table)

    def _finished(self, request: Any) -> None:
        self.reads = ("KVCacheBlocks", "blocks")
        self._planner.on_finished(request, ([4, 5, 6, 7],))
        self._expect("Request", "request_id", self._planner.num_requests, 0)

    def _blocks_copied_and_states(self) -> None:
        copy = self._make("KVCacheBlockCopy", src_block_id=1, dst_block_id=2)
        events = self._events(kv_cache_block_copies=[copy])
        self._expect("KVCacheBlockCopy", "dst_block_id", events.copied_to, (2,))
        if "KVConnectorBlockState" in self._classes:
            name, field = "KVConnectorBlockState", "boundary_state_offloads"
            offered = self._make(name, **{field: {_ID: [(0, 3, _BLOCK)]}})
            events = self._events(kv_connector_block_state=offered)
            wanted = {_ID: [FinalState(group=0, block_id=3, num_tokens=_BLOCK)]}
            self._expect(name, field, events.states, wanted)

    def _block(self, block_id: int) -> Any:
        return self._make("KVCacheBlock", block_id=block_id)

    def _end(self, *job_ids: int) -> None:
        """All workers report jobs."""
        report = WorkerReport(Counter(job_ids))
        output = self._make(
            "KVConnectorOutput",
            kv_connector_worker_meta=self._metadata_class(report),
            invalid_block_ids=set(),
        )
        self._planner.on_worker_report(*step_results(output, self._metadata_class))


def _fields(cls: Any) -> dict[str, bool]:
    """Returns the fields of a record, and of each whether it has to be given."""
    if not dataclasses.is_dataclass(cls):
        return dict.fromkeys(getattr(cls, "_fields", ()), True)  # of a named tuple
    missing = dataclasses.MISSING
    return {
        field.name: field.init and field.default is field.default_factory is missing
        for field in dataclasses.fields(cls)
    }
