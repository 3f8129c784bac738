"""What the demo says and prints, and the arithmetic of the benchmarks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine, hit_latency, overhead
from examples import demo, report, serving
from examples.conversations import (
    NOISY,
    ONE_SHOTS,
    SCRIPTS,
    Conversation,
    Script,
    document,
)
from examples.report import Outcome, Served
from tools import local_vllm
from vllm_ctx_offload.config import parse_config
from vllm_ctx_offload.plan import GroupShape, ModelShape, OffloadPlan, resolve_plan

METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 3100.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 64.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 1.6e+03
vllm:prompt_tokens_by_source_total{engine="0",source="something_new"} 7.0
vllm:prompt_tokens_by_source_created{engine="0",source="local_compute"} 1.7e+09
# TYPE vllm:ctx_offload_evicted_chunks_total counter
vllm:ctx_offload_evicted_chunks_total{by="initech",engine="0",tenant="acme"} 60.0
vllm:ctx_offload_evicted_chunks_total{by="initech",engine="1",tenant="acme"} 4.0
vllm:ctx_offload_evicted_chunks_total{by="acme",engine="0",tenant="initech"} 9.0
vllm:ctx_offload_evicted_chunks_total{by="initech",engine="0",tenant="initech"} 1e+02
vllm:ctx_offload_evicted_chunks_created{by="initech",engine="0",tenant="acme"} 1.7e+09
"""


def served(device: int, host: int, computed: int, seconds: float = 1.0) -> Served:
    """Returns a request whose tokens came from those places."""
    prompt = device + host + computed
    return Served("A", "acme", 1, prompt, device, host, computed, seconds)


def outcome(*shares: tuple[str, int], **evicted: int) -> Outcome:
    """Returns prompts of 100 tokens, so many of them from the host, by tenant."""
    rows = [
        Served("A", name, 4, 100, 0, host, 100 - host, 1.0) for name, host in shares
    ]
    return Outcome(rows, evicted)


class TestReport:
    def test_counters_are_read_by_source(self) -> None:
        assert report.tokens_by_source(METRICS) == {
            report.COMPUTED: 3100,
            report.DEVICE: 64,
            report.HOST: 1600,
        }

    def test_a_server_without_requests_has_counted_nothing(self) -> None:
        assert set(report.tokens_by_source("").values()) == {0}

    @pytest.mark.parametrize(
        ("request_", "kind"),
        [
            (served(0, 0, 100), report.COLD),
            (served(96, 0, 4), report.LOCAL_HIT),
            (served(0, 96, 4), report.HOST_HIT),
            (served(32, 64, 4), report.HOST_HIT),
            (served(64, 32, 4), report.LOCAL_HIT),
            (served(0, 32, 68), report.PARTIAL),
        ],
    )
    def test_a_request_is_of_the_kind_most_of_its_tokens_are(
        self, request_: Served, kind: str
    ) -> None:
        assert request_.kind == kind

    def test_evictions_are_counted_by_whose_chunks_went_for_one_tenant(self) -> None:
        assert report.evicted_for("initech", METRICS) == {"acme": 64, "initech": 100}
        assert report.evicted_for("acme", METRICS) == {"initech": 9}
        assert report.evicted_for("initech", "") == {}

    @pytest.mark.parametrize("script", [*SCRIPTS, *ONE_SHOTS], ids=lambda s: s.name)
    def test_rows_stand_under_their_header(self, script: Script) -> None:
        row = report.row_start(script.name, script.tenant, 2) + report.row_end(
            Served(script.name, script.tenant, 2, 12_345, 1_111, 11_200, 78, 1.5)
        )
        assert row.index(script.tenant) == report.HEADER.index("tenant")
        for title, value in {
            "turn": "2",
            "prompt": "12,345",
            "device": "1,111",
            "host": "11,200",
            "computed": "78",
            "first token": "1.50 s",
        }.items():
            end = report.HEADER.index(title) + len(title)
            assert row[:end].endswith(f" {value}")
        assert row.index("host hit") == report.HEADER.index("kind")
        assert len(row) <= 88

    def test_the_summary_gives_the_median_of_each_kind(self) -> None:
        rows = [served(0, 0, 100, seconds) for seconds in (7.0, 8.0, 30.0)]
        rows += [served(0, 96, 4, 0.5), served(10, 20, 70, 99.0)]
        assert report.summary(rows) == (
            "Median first token: cold 8.00 s (100 computed), local hit none, "
            "host hit 0.50 s (4 computed)"
        )
        assert report.speedup(rows) == 16.0

    def test_without_a_host_hit_there_is_no_speedup(self) -> None:
        assert report.speedup([served(0, 0, 100), served(96, 0, 4)]) is None

    def test_what_was_kept_is_the_share_of_tokens_from_the_cache(self) -> None:
        rows = [served(30, 50, 20), served(0, 0, 300)]
        assert Outcome(rows, {}).kept() == 0.2
        both = outcome(("acme", 90), ("globex", 40), ("acme", 80))
        assert both.kept("acme") == 0.85
        assert both.kept("globex") == 0.4

    def test_the_comparison_sets_both_policies_side_by_side(self) -> None:
        ctx = outcome(("acme", 98), ("globex", 97), initech=1_164)
        lru = outcome(("acme", 0), ("globex", 1), acme=113, globex=117)
        lines = report.comparison("initech", ctx, lru).splitlines()
        assert [line.split()[-2:] for line in lines] == [
            ["ctx", "lru"],
            ["98.0%", "0.0%"],
            ["97.0%", "1.0%"],
            ["0", "113"],
            ["0", "117"],
            ["1,164", "0"],
        ]
        assert [line.partition(":")[0] for line in lines[1:]] == [
            *("acme", "globex"),
            *("acme", "globex", "initech"),
        ]
        assert {len(line) for line in lines} == {72}


class TestConversations:
    def test_two_tenants_hold_two_conversations_each(self) -> None:
        tenants = [Conversation(script).kv_transfer_params for script in SCRIPTS]
        names = [params["ctx"]["tenant"] for params in tenants]
        sessions = {params["ctx"]["session"] for params in tenants}
        assert sorted(names) == ["acme", "acme", "globex", "globex"]
        assert len(sessions) == 4

    def test_every_run_sends_the_same_lists(self) -> None:
        scripts = (*SCRIPTS, *ONE_SHOTS)
        documents = [document(script) for script in scripts]
        assert documents == [document(script) for script in scripts]
        assert len(set(documents)) == len(scripts)

    def test_the_noisy_tenant_is_a_third_one(self) -> None:
        assert {script.tenant for script in ONE_SHOTS} == {NOISY}
        assert NOISY not in {script.tenant for script in SCRIPTS}

    def test_there_is_a_question_for_each_turn_and_the_return(self) -> None:
        assert {len(script.questions) for script in SCRIPTS} == {demo.TURNS + 1}
        assert {len(script.questions) for script in ONE_SHOTS} == {1}

    def test_each_turn_continues_the_one_before(self) -> None:
        conversation = Conversation(SCRIPTS[0])
        conversation.ask(0)
        first = list(conversation.messages)
        assert document(SCRIPTS[0]) in first[-1]["content"]
        conversation.answered("The phone.")
        conversation.ask(1)
        assert conversation.messages[: len(first)] == first
        roles = [message["role"] for message in conversation.messages]
        assert roles == ["system", "user", "assistant", "user"]
        assert conversation.messages[-1]["content"] == SCRIPTS[0].questions[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shape = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return tmp_path


def transfer_config(options: list[str]) -> dict[str, Any]:
    config = json.loads(options[options.index("--kv-transfer-config") + 1])
    assert isinstance(config, dict)
    return config


class TestCommand:
    def test_it_can_be_pasted_into_a_shell(self, model: Path) -> None:
        command = ["vllm", "serve", "model", *serving.server_options(model, "ctx")]
        lines = serving.shell_lines(command)
        assert shlex.split(lines.replace("\\\n", "")) == command
        assert lines.splitlines()[1].strip().startswith("--kv-transfer-config '{")

    def test_the_connector_is_named_as_documented(self, model: Path) -> None:
        transfer = transfer_config(serving.server_options(model, "ctx"))
        assert transfer["kv_connector"] == "CtxOffloadConnector"
        assert transfer["kv_role"] == "kv_both"

    def test_the_second_server_differs_in_the_policy_alone(self, model: Path) -> None:
        ctx = transfer_config(serving.server_options(model, "ctx"))
        lru = transfer_config(serving.server_options(model, "lru"))
        assert lru["kv_connector_extra_config"].pop("eviction_policy") == "lru"
        assert lru == ctx

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_the_pool_and_the_reservations_hold_whole_blocks(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
    ) -> None:
        monkeypatch.setattr(local_vllm, "best_dtype", lambda: dtype)
        plan, reserved = plan_of(serving.server_options(model, "ctx"), dtype)
        assert plan.num_slots == serving.HOST_BLOCKS
        assert reserved == {"acme": 126, "globex": 126, NOISY: 0}


def plan_of(options: list[str], dtype: str) -> tuple[OffloadPlan, dict[str, int]]:
    """Returns what the connector makes of the options, and who reserves how much."""
    extra_config = transfer_config(options)["kv_connector_extra_config"]
    config = parse_config(extra_config)
    block_bytes = 32 * 30 * 2 * 3 * 64 * {"bfloat16": 2, "float32": 4}[dtype]
    plan = resolve_plan(config, ModelShape((GroupShape(32),), 32, block_bytes, 96, 1))
    reserved = {
        name: account.reserved.resolve(plan.total_bytes) // block_bytes
        for name, account in config.tenants.items()
    }
    return plan, reserved


class TestVerdict:
    def test_a_cache_that_was_kept_passes(self) -> None:
        demo.check_kept(outcome(("acme", 97), ("globex", 98)))

    def test_one_tenants_loss_fails_the_demo(self) -> None:
        with pytest.raises(serving.DemoError, match=r"initech's prompts only 49%"):
            demo.check_kept(outcome(("acme", 98), ("globex", 0)))


class TestBenchmarks:
    def test_prompts_of_different_seeds_share_no_block(self) -> None:
        seeds = (*range(40), *hit_latency.WARM_UP_SEEDS)
        firsts = {tuple(engine.random_prompt(seed, 64)[:32]) for seed in seeds}
        assert len(firsts) == len(seeds)
        assert engine.random_prompt(3, 64) == engine.random_prompt(3, 64)

    @pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (32, 1), (33, 2)])
    def test_blocks_are_rounded_up(self, tokens: int, blocks: int) -> None:
        assert engine.blocks_for(tokens) == blocks

    def test_no_batch_repeats_a_prompt_of_another(self) -> None:
        workload = overhead.Workload(requests=3, prompt_tokens=8, output_tokens=1)
        prompts = workload.prompts(0) + workload.prompts(1)
        assert len({tuple(prompt) for prompt in prompts}) == 6

    def test_ratios_are_of_medians(self) -> None:
        samples = hit_latency.Samples([6.0, 8.0, 9.0], [0.5, 0.5, 9.0], [1.0] * 3)
        assert samples.host_to_local == 2.0
        assert samples.cold_to_host == 8.0

    def test_engines_are_compared_pair_by_pair(self) -> None:
        # The machine got slower, for both alike.
        measured = [
            overhead.Pair(
                engine.Answer(off, off / 2, 0, 1), engine.Answer(on, off / 4, 0, 1)
            )
            for off, on in ((1.0, 1.0), (2.0, 2.0), (9.0, 10.0))
        ]
        assert overhead.throughput_ratio(measured) == 1.0
        assert overhead.cpu_ratio(measured) == 0.5

    def test_sides_take_turns_at_going_first_with_new_prompts(self) -> None:
        log: list[tuple[str, int]] = []
        sides = FakeSide("off", log, 2.0), FakeSide("on", log, 4.0)
        workload = overhead.Workload(requests=1, prompt_tokens=8, output_tokens=1)
        measured = overhead.measure(sides, workload, pairs=3, seconds=60)
        assert [name for name, _ in log] == [*("off", "on", "on", "off") * 2]
        assert len({prompt for _, prompt in log}) == len(log)
        # The first batch of each warms up.
        assert [pair.off.seconds for pair in measured] == [2.0] * 3
        assert overhead.throughput_ratio(measured) == 0.5

    def test_no_pair_begins_after_the_time_is_up(self) -> None:
        sides = FakeSide("off", [], 1.0), FakeSide("on", [], 1.0)
        workload = overhead.Workload(requests=1, prompt_tokens=8, output_tokens=1)
        assert len(overhead.measure(sides, workload, pairs=9, seconds=0)) == 1

    def test_a_cached_token_spoils_the_comparison(self) -> None:
        sides = FakeSide("off", [], 1.0), FakeSide("on", [], 1.0, cached=32)
        workload = overhead.Workload(requests=1, prompt_tokens=8, output_tokens=1)
        with pytest.raises(overhead.EngineFailedError, match="32 tokens"):
            overhead.measure(sides, workload, pairs=1, seconds=0)

    @pytest.mark.parametrize(
        ("found", "message"),
        [((0, 0), "had 0 and 0"), ((64, 32), "had 64 and 32")],
    )
    def test_a_request_served_from_elsewhere_ends_the_benchmark(
        self, found: tuple[int, int], message: str
    ) -> None:
        cached, loaded = found

        class OtherEngine:
            total = 0

            def num_loaded_tokens(self) -> int:
                return self.total

            def run(self, prompts: list[list[int]], max_tokens: int) -> engine.Answer:
                self.total += loaded
                return engine.Answer(1.0, 1.0, cached, max_tokens)

        probe = hit_latency.Probe(OtherEngine())  # type: ignore[arg-type]
        with pytest.raises(hit_latency.WrongSourceError, match=message):
            probe.send([1] * 65, cached=64, loaded=64)


class FakeSide:
    """An engine that takes `seconds` for every batch and logs what it was sent."""

    def __init__(
        self, name: str, log: list[tuple[str, int]], seconds: float, cached: int = 0
    ) -> None:
        self.name = name
        self._log = log
        self._answer = engine.Answer(seconds, seconds, cached, 1)

    def run(self, prompts: list[list[int]], output_tokens: int) -> engine.Answer:
        self._log.append((self.name, hash(tuple(prompts[0]))))
        return self._answer

    def close(self) -> None:
        """Nothing was started."""
