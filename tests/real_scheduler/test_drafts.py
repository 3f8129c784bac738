"""Drafters with layers of their own (EAGLE), in the real scheduler.

What their layers keep for a token is final only once the token after it is confirmed
and computed. Until then the simulated cache holds a mark there, which must be neither
stored nor read; vLLM's own prefix cache drops the last block of a hit for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import real_scheduler.harness
from real_scheduler.harness import Engine
from real_scheduler.invariants import host_manager
from real_scheduler.sim_model import SimModel
from real_scheduler.sim_worker import Forward, TokenView
from real_scheduler.vllm_setup import STATE, as_eagle
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm_ctx_offload.scheduler.request_state import split_key

MakeEngine = Callable[..., Engine]
PROMPT = list(range(1, 201))  # six blocks and 8 tokens
NUM_DRAFTS = 3
NOT_FINAL = (-3, 0)


class DraftLayers(SimModel):
    """Also computes what the layers of the last group make of the next token."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.scheduler)
        self._num_final: dict[str, int] = {}  # since it last had no blocks
        self.num_accepted = self.num_rejected = 0

    def _attend(
        self, request_id: str, first: int, hashes: list[int], drafts: list[int]
    ) -> Iterator[Forward]:
        *others, own = super()._attend(request_id, first, hashes, drafts)
        yield from others
        count = len(hashes)
        # What was not final is computed again.
        begin = self._num_final.get(request_id, first)
        num_known = len(self._confirmed(request_id, drafts).tokens)
        end = self._num_final[request_id] = min(first + count, num_known) - 1
        final = [(self.generation, value) for value in own.read[begin:]]
        final = [*final, *own.symbols][: end - begin]
        marks = [NOT_FINAL] * (first + count - begin - len(final))
        yield own._replace(first=begin, symbols=[*final, *marks], read=own.read[:begin])

    def _confirmed(self, request_id: str, drafts: list[int]) -> TokenView:
        """Returns the tokens that are known with those drafts that are right."""
        view = TokenView(self.views[request_id].tokens)
        for draft in drafts:
            if view.next_token() != draft:
                break
            view.append(draft)
        return view

    def _sample(self, request_id: str, end: int, drafts: list[int]) -> list[int]:
        sampled = super()._sample(request_id, end, drafts)
        if drafts:
            self.num_accepted += len(sampled) - 1
            self.num_rejected += len(drafts) - len(sampled) + 1
        return sampled


LAYOUTS = {
    "marked": (None, None),
    "not marked": (None, None),
    "in one group": (None,),
}


@pytest.fixture(params=list(LAYOUTS))
def make_drafting(
    request: pytest.FixtureRequest,
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Engine]:
    """Engines with a drafter; vLLM marks the group of its layers, or has not found it.

    The third kind, a drafter whose layers are in the one group of the model's, is the
    most common one. vLLM then drops the last block for every group.
    """
    make_config = real_scheduler.harness.make_kv_cache_config

    def make_marked_config(*arguments: object) -> object:
        config = make_config(*arguments)
        config.kv_cache_groups[-1].is_eagle_group = request.param == "marked"
        return config

    monkeypatch.setattr(
        real_scheduler.harness, "make_kv_cache_config", make_marked_config
    )
    as_eagle(monkeypatch)

    def make(**options: object) -> Engine:
        engine = make_engine(
            num_drafts=NUM_DRAFTS,
            num_blocks=128,
            num_slots=128,
            extra={"offload_prompt_only": False},
            **{"groups": LAYOUTS[request.param], **options},
        )
        in_hash = options.get("drafts_in_hash", False)
        assert engine.side.planner._plan.drafts_in_hash == in_hash
        coordinator = engine.scheduler.kv_cache_manager.coordinator
        assert in_hash or coordinator.eagle_group_ids
        engine.model = DraftLayers(engine)
        engine.model.make_drafts = drafts_of(engine)
        return engine

    return make


def drafts_of(engine: Engine) -> Callable[[TokenView], list[int]]:
    """Wrong, partly right and right drafts in turn."""
    turns = itertools.cycle(range(NUM_DRAFTS + 1))

    def drafts(view: TokenView) -> list[int]:
        right = engine.answer(view.tokens, NUM_DRAFTS)
        num_right = next(turns)
        return [*right[:num_right], *[0] * (NUM_DRAFTS - num_right)]

    return drafts


def stored(engine: Engine) -> int:
    """Returns the chunks of the drafter's layers that are in host memory."""
    last = len(engine.side.planner._plan.groups) - 1
    keys = [chunk.key for chunk in host_manager(engine.side).chunks()]
    return sum(split_key(key)[0] == last for key in keys)


def cached(engine: Engine, prompt: list[int]) -> tuple[int, int]:
    """Returns the tokens a request need not compute, and those of them it loaded."""
    before = engine.count("hit_tokens")
    request = engine.run(prompt)
    loaded = engine.count("hit_tokens") - before
    return len(prompt) - engine.num_scheduled[request.request_id], int(loaded)


def test_accepted_and_rejected_drafts_leave_no_hole(
    make_drafting: Callable[..., Engine],
) -> None:
    """Every block is stored once it is final, and a later request finds all but one.

    1. Decoding crosses block edges with drafts that are accepted, and that are not.
    2. The block that the last token completes is never final, all before it are.
    3. A fresh request finds them. It computes the last of them, as after a hit of
       vLLM's own.
    """
    engine = make_drafting()
    for prompt in (PROMPT[:length] for length in range(58, 64)):
        request = engine.run(prompt, max_tokens=132)
        full = list(request.all_token_ids)
        # The last token was computed only if it was a draft.
        num_final = (min(request.num_computed_tokens, len(full)) - 1) // 32
        assert stored(engine) == num_final
        assert engine.model.num_accepted > 0 < engine.model.num_rejected

        longer = [*full, *range(300, 340)]
        assert engine.scheduler.reset_prefix_cache()
        # It computes more blocks and stores them too.
        assert cached(engine, longer) == (32 * (num_final - 1),) * 2
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)


@pytest.mark.parametrize("num_tokens", [192, 193, 200])
def test_a_prompt_is_stored_up_to_its_last_final_block(
    make_drafting: Callable[..., Engine], num_tokens: int
) -> None:
    engine = make_drafting()
    engine.run(PROMPT[:num_tokens])
    num_final = (num_tokens - 1) // 32
    assert stored(engine) == num_final
    assert engine.scheduler.reset_prefix_cache()
    expected = 32 * (num_final - 1)
    assert cached(engine, PROMPT[:num_tokens]) == (expected, expected)


def test_the_block_that_vllm_drops_of_its_own_hit_is_not_loaded_instead(
    make_drafting: Callable[..., Engine],
) -> None:
    engine = make_drafting()
    engine.run(PROMPT)
    assert cached(engine, PROMPT) == (5 * 32, 0)


def test_the_host_goes_on_where_a_local_hit_ends(
    make_drafting: Callable[..., Engine],
) -> None:
    """1. The device has four blocks of the prompt, of which vLLM uses three."""
    engine = make_drafting()
    engine.run(PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    engine.run(PROMPT[:129], ctx={"load": False, "store": False})
    assert cached(engine, PROMPT) == (5 * 32, 2 * 32)


@pytest.mark.parametrize("make_drafting", ["marked"], indirect=True)
@pytest.mark.parametrize("length", range(150, 200, 7))
def test_beside_states_as_much_is_loaded_as_vllm_hits(
    make_drafting: Callable[..., Engine], length: int
) -> None:
    """A state depends on no token after it; the drafts up to it do."""
    engine = make_drafting(groups=(None, STATE, None))
    engine.model.make_drafts = None  # simulated states can't take tokens back
    engine.run(PROMPT[:length], max_tokens=3)
    local, loaded = cached(engine, PROMPT)
    assert local >= 96 > loaded == 0

    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run(PROMPT[:length], max_tokens=3)
    assert engine.scheduler.reset_prefix_cache()
    assert cached(engine, PROMPT) == (local, local)


@pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "supports_lookahead_block_hashes"),
    reason="from vLLM 0.34 on",
)
def test_where_hashes_cover_the_drafts_nothing_is_dropped(
    make_drafting: Callable[..., Engine],
) -> None:
    """1. All blocks whose next token is known are stored, and load again.
    2. The same text up to a block's end, but no further, is another block.
    """
    engine = make_drafting(drafts_in_hash=True)
    engine.run(PROMPT)
    assert stored(engine) == 6
    assert cached(engine, PROMPT) == (192, 0)
    assert engine.scheduler.reset_prefix_cache()
    assert cached(engine, PROMPT) == (192, 192)
    assert engine.scheduler.reset_prefix_cache()
    assert cached(engine, [*PROMPT[:96], 500, *PROMPT[97:]]) == (64, 64)


def test_a_drafter_that_reads_tokens_alone_needs_no_drop(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_drafts=NUM_DRAFTS)
    assert engine.side.planner._plan.draft_lookahead == 0
    engine.run(PROMPT[:192])
    assert stored(engine) == 6
    assert engine.scheduler.reset_prefix_cache()
    assert cached(engine, PROMPT) == (192, 192)
