"""What a model runner computes and samples, with symbols for KV and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from real_scheduler.sim_states import SimStates
from real_scheduler.sim_worker import Forward, StateForward, TokenView, in_group
from real_scheduler.vllm_setup import resumed_in
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.outputs import DraftTokenIds


class SimModel:
    """Answers a prefix with a token that depends on all of it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.generation = 0  # of the weights
        self.views: dict[str, TokenView] = {}
        self.num_scheduled: dict[str, int] = {}
        self._states = SimStates()
        # Draft tokens for what a request holds, or None without speculation.
        self.make_drafts: Callable[[TokenView], list[int]] | None = None

    def forward(
        self, output: SchedulerOutput
    ) -> tuple[list[Forward | StateForward], dict[str, list[int]]]:
        """Returns what each request computes, and the tokens it samples."""
        starts = {n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        fresh = {n.req_id for n in output.scheduled_new_reqs} | resumed_in(output)
        forwards: list[Forward | StateForward] = []
        sampled: dict[str, list[int]] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[request_id]
            # The latter after a load that failed beneath a running request.
            begins = not (starts[request_id] or request.num_output_placeholders)
            if request_id in fresh or begins:
                self._states.forget(request_id)
                self.views[request_id] = TokenView(request.all_token_ids)
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            first = starts[request_id]
            hashes = self._hashes(request_id, first, count, drafts)
            forwards.extend(self._attend(request_id, first, hashes, drafts))
            sampled[request_id] = self._sample(request_id, first + count, drafts)
            forwards.extend(
                self._states.advance(
                    request_id,
                    self._scheduler.kv_cache_manager,
                    self.views[request_id],
                    first=first,
                    hashes=hashes,
                    num_drafts=len(drafts),
                    num_sampled=len(sampled[request_id]),
                    generation=self.generation,
                )
            )
            total = self.num_scheduled.get(request_id, 0) + count
            self.num_scheduled[request_id] = total
        return forwards, sampled

    def _hashes(
        self, request_id: str, first: int, count: int, drafts: list[int]
    ) -> list[int]:
        """Returns the prefix hashes of the tokens that are computed."""
        view = self.views[request_id]
        with_drafts = TokenView([*view.tokens, *drafts]) if drafts else view
        hashes = with_drafts.prefix_hashes[first : first + count]
        assert len(hashes) == count, f"{request_id} computes tokens that nobody knows"
        return hashes

    def _attend(
        self, request_id: str, first: int, hashes: list[int], drafts: list[int]
    ) -> Iterator[Forward]:
        """Yields the part of each attention group."""
        view = self.views[request_id]
        manager = self._scheduler.kv_cache_manager
        tables = manager.get_block_ids(request_id)
        for group, block_ids in enumerate(tables):
            kind = manager.coordinator.single_type_managers[group]
            if isinstance(kind, MambaManager):
                continue
            yield Forward(
                list(block_ids),
                kind.block_size,
                first,
                [(self.generation, in_group(group, value)) for value in hashes],
                [in_group(group, value) for value in view.prefix_hashes[:first]],
                kind.get_num_skipped_tokens(first),
            )

    def _sample(self, request_id: str, end: int, drafts: list[int]) -> list[int]:
        view = self.views[request_id]
        if end < len(view.tokens):
            return []
        sampled: list[int] = []
        for draft in [*drafts, None]:
            token = view.next_token()
            view.append(token)
            sampled.append(token)
            if token != draft:
                break
        return sampled

    def draft(self, output: SchedulerOutput) -> None:
        """Proposes tokens to the requests of the step that are still there."""
        if self.make_drafts is None:
            return
        ids = [i for i in output.num_scheduled_tokens if i in self._scheduler.requests]
        drafts = [self.make_drafts(self.views[i]) for i in ids]
        self._scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))
