"""What the demo says and prints, and the arithmetic of the benchmarks."""

from __future__ import annotations

import json
import shlex

import pytest

from benchmarks import engine, hit_latency, overhead
from examples import demo, report
from examples.conversations import SCRIPTS, Conversation, document
from examples.report import Served

METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 3100.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 64.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 1.6e+03
vllm:prompt_tokens_by_source_total{engine="0",source="something_new"} 7.0
vllm:prompt_tokens_by_source_created{engine="0",source="local_compute"} 1.7e+09
"""


def served(device: int, host: int, computed: int, seconds: float = 1.0) -> Served:
    """Returns a request whose tokens came from those places."""
    prompt = device + host + computed
    return Served("A", "acme", 1, prompt, device, host, computed, seconds)


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

    def test_rows_stand_under_their_header(self) -> None:
        row = report.row_start("A", "acme", 2) + report.row_end(
            Served("A", "acme", 2, 12_345, 1_111, 11_200, 78, 1.5)
        )
        for title, value in {
            "turn": "2",
            "prompt": "12,345",
            "device": "1,111",
            "host": "11,200",
            "computed": "78",
            "first token": "1.50 s",
        }.items():
            assert row.index(value) + len(value) == (
                report.HEADER.index(title) + len(title)
            )
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


class TestConversations:
    def test_two_tenants_hold_two_conversations_each(self) -> None:
        tenants = [Conversation(script).kv_transfer_params for script in SCRIPTS]
        names = [params["ctx"]["tenant"] for params in tenants]
        sessions = {params["ctx"]["session"] for params in tenants}
        assert sorted(names) == ["acme", "acme", "globex", "globex"]
        assert len(sessions) == 4

    def test_every_run_sends_the_same_lists(self) -> None:
        documents = [document(script) for script in SCRIPTS]
        assert documents == [document(script) for script in SCRIPTS]
        assert len(set(documents)) == len(SCRIPTS)

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


class TestCommand:
    def test_it_can_be_pasted_into_a_shell(self) -> None:
        command = ["vllm", "serve", "model", *demo.server_options()]
        lines = demo.shell_lines(command)
        assert shlex.split(lines.replace("\\\n", "")) == command
        assert lines.splitlines()[1].strip().startswith("--kv-transfer-config '{")

    def test_the_connector_is_named_as_documented(self) -> None:
        options = demo.server_options()
        transfer = json.loads(options[options.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector"] == "CtxOffloadConnector"
        assert transfer["kv_role"] == "kv_both"


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
