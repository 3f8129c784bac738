"""The examples: scripts against a fake server, the gateway, and the manifests."""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from vllm_ctx_offload.cli.doctor_model import KvOptions, kv_shape
from vllm_ctx_offload.cli.doctor_plan import Engines, make_plan
from vllm_ctx_offload.config import OffloadConfig, parse_config
from vllm_ctx_offload.context import build_req_context

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = ("chat_sessions", "agent_tool_calls", "batch_no_store")
GIB = 1024**3


# ---- scripts


class FakeServer(ThreadingHTTPServer):
    """Answers as vLLM's OpenAI server does, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        receipt = {"lookup_tokens": 120, "loaded_tokens": 96}
        self.receipt: dict[str, Any] | None = {"ctx": receipt}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def contexts(self) -> list[dict[str, Any]]:
        return [request["kv_transfer_params"]["ctx"] for request in self.requests]


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.answer({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        self.server.requests.append(json.loads(self.rfile.read(size)))
        message = {"role": "assistant", "content": "yes"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {"id": "1", "object": "chat.completion", "created": 0}
        completion |= {"model": "fake", "choices": [choice]}
        usage = {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201}
        receipt = self.server.receipt
        completion |= {"usage": usage, "kv_transfer_params": receipt}
        self.answer(completion)

    def answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def load(name: str) -> ModuleType:
    pytest.importorskip("openai")
    return importlib.import_module(f"examples.{name}")


# Clients of `openai` leave their connections to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
class TestScripts:
    @pytest.fixture(autouse=True)
    def arguments(self, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Any:
        def give(*more: str) -> None:
            argv = ["x", "--base-url", server.url, "--tenant", "acme", *more]
            monkeypatch.setattr(sys, "argv", argv)

        return give

    def test_chats_name_their_session_and_release_it_at_the_end(
        self,
        server: FakeServer,
        arguments: Any,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        arguments()
        load("chat_sessions").main()
        base = {"tenant": "acme", "receipt": True}
        turns = [{**base, "session": s} for s in ("chat-1", "chat-2")]
        assert server.contexts[:6] == turns * 3
        assert server.contexts[6:] == [{**ctx, "release": True} for ctx in turns]
        assert [len(r["messages"]) for r in server.requests[:6]] == [2, 2, 4, 4, 6, 6]
        said = "200 prompt tokens: 80 from the device, 96 from host memory"
        assert capsys.readouterr().out.count(said) == 6

    def test_chats_pause_between_their_turns_only(
        self, arguments: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chat = load("chat_sessions")
        waited: list[float] = []
        monkeypatch.setattr(chat.time, "sleep", waited.append)
        arguments("--pause", "20")
        chat.main()
        assert waited == [0, 20, 20]

    @pytest.mark.parametrize("name", ["chat_sessions", "agent_tool_calls"])
    def test_a_server_without_the_connector_is_a_sentence(
        self, server: FakeServer, arguments: Any, name: str
    ) -> None:
        server.receipt = None
        arguments()
        with pytest.raises(SystemExit, match=r"^No receipt: the server has no Ctx"):
            load(name).main()

    def test_agents_estimate_what_their_tool_takes(
        self,
        server: FakeServer,
        arguments: Any,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        agent = load("agent_tool_calls")
        waited: list[float] = []
        monkeypatch.setattr(agent, "tool", waited.append)
        arguments("--steps", "2", "--tool-seconds", "7")
        agent.main()
        first, second, last = server.contexts
        assert waited == [7, 7]
        assert first["expected_reuse_s"] == 10
        assert second["expected_reuse_s"] < 10
        assert last["release"] is True
        assert "expected_reuse_s" not in last
        assert first["session"] == second["session"] == last["session"]
        said = "the device lacked 120 tokens, host memory had 96"
        assert capsys.readouterr().out.count(said) == 3

    def test_agents_ask_for_protection_while_a_slow_tool_runs(self) -> None:
        hints = load("agent_tool_calls").hints_before_a_call([100.0, 300.0])
        assert hints == {"expected_reuse_s": 200, "priority": 60, "ttl_s": 400}

    @pytest.mark.parametrize(
        ("more", "ctx"),
        [([], {"store": False}), (["--no-load"], {"store": False, "load": False})],
    )
    def test_batch_jobs_store_nothing(
        self,
        server: FakeServer,
        arguments: Any,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        more: list[str],
        ctx: dict[str, bool],
    ) -> None:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("one\n\ntwo\nthree\n")
        arguments(str(prompts), *more)
        load("batch_no_store").main()
        assert server.contexts == [{"tenant": "acme", "receipt": True, **ctx}] * 3
        lines = capsys.readouterr().out.splitlines()
        assert [json.loads(line)["prompt"] for line in lines] == ["one", "two", "three"]
        assert json.loads(lines[0])["receipt"]["loaded_tokens"] == 96

    def test_all_that_they_ask_for_is_accepted(
        self, server: FakeServer, arguments: Any
    ) -> None:
        arguments()
        load("chat_sessions").main()
        agent = load("agent_tool_calls")
        contexts = [*server.contexts, agent.hints_before_a_call([500.0])]
        for ctx in contexts:
            assert not build_req_context(OffloadConfig(), "r", {"ctx": ctx}).rejected

    @pytest.mark.parametrize("name", SCRIPTS)
    def test_they_are_short(self, name: str) -> None:
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) < 90


# ---- gateway


class TestGateway:
    @pytest.fixture
    def seen(self) -> list[Any]:
        return []

    @pytest.fixture
    def client(self, seen: list[Any]) -> Iterator[Any]:
        for module in ("fastapi", "httpx", "uvicorn"):
            pytest.importorskip(module)
        import httpx
        from fastapi.testclient import TestClient

        from examples.gateway import make_app

        def vllm(request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("responses"):
                raise httpx.ConnectError("down")
            seen.append((request.url.path, json.loads(request.content or b"null")))
            return httpx.Response(418, text="data: 1\n\n", headers={"x": "y"})

        upstream = httpx.AsyncClient(
            transport=httpx.MockTransport(vllm), base_url="http://vllm"
        )
        app = make_app({"sk-1": "acme"}, upstream)
        with TestClient(app, headers={"authorization": "Bearer sk-1"}) as client:
            yield client

    @pytest.mark.parametrize(
        ("sent", "ctx"),
        [
            (None, {"tenant": "acme"}),
            ({"ctx": {"tenant": "zeta"}}, {"tenant": "acme"}),
            (
                {"ctx": {"tenant": "zeta", "session": "s", "decode_priority": 9}},
                {"tenant": "acme", "session": "s"},
            ),
            ({"ctx": {"store": False}}, {"tenant": "acme", "store": False}),
            ({"ctx": ["session"], "remote_engine_id": "x"}, {"tenant": "acme"}),
            ("text", {"tenant": "acme"}),
        ],
    )
    def test_the_tenant_is_that_of_the_key(
        self, client: Any, seen: list[Any], sent: Any, ctx: dict[str, str]
    ) -> None:
        body = {"prompt": "x", "kv_transfer_params": sent}
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.text) == (418, "data: 1\n\n")
        expected = {"prompt": "x", "kv_transfer_params": {"ctx": ctx}}
        assert seen == [("/v1/completions", expected)]

    def test_a_key_can_come_as_for_anthropics_api(
        self, client: Any, seen: list[Any]
    ) -> None:
        del client.headers["authorization"]
        key = {"x-api-key": "sk-1"}
        assert client.post("/v1/messages", json={}, headers=key).status_code == 418
        assert seen[0][1]["kv_transfer_params"] == {"ctx": {"tenant": "acme"}}

    def test_our_examples_can_ask_it_for_the_model(
        self, client: Any, seen: list[Any]
    ) -> None:
        assert client.get("/v1/models").status_code == 418
        assert seen == [("/v1/models", None)]
        wrong = {"authorization": "Bearer sk-2"}
        assert client.get("/v1/models", headers=wrong).status_code == 401
        assert len(seen) == 1

    @pytest.mark.parametrize(
        ("path", "key", "content", "status"),
        [
            ("completions", "Bearer sk-2", b"{}", 401),
            ("completions", "", b"{}", 401),
            ("load_lora_adapter", "Bearer sk-1", b"{}", 404),
            ("completions", "Bearer sk-1", b"{", 400),
            ("completions", "Bearer sk-1", b"[]", 400),
            ("responses", "Bearer sk-1", b"{}", 502),
        ],
    )
    def test_what_it_does_not_pass_on(
        self,
        client: Any,
        seen: list[Any],
        path: str,
        key: str,
        content: bytes,
        status: int,
    ) -> None:
        headers = {"authorization": key}
        answer = client.post(f"/v1/{path}", content=content, headers=headers)
        assert answer.status_code == status
        assert seen == []


# ---- manifests


def transfer_config(arguments: list[str], policy: dict[str, Any]) -> OffloadConfig:
    """The configuration in a server's arguments, with the policy in its place."""
    value = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert value["kv_connector"] == "CtxOffloadConnector"
    assert value["kv_role"] == "kv_both"
    extra = value["kv_connector_extra_config"]
    assert Path(extra.pop("policy_file")).name == "policy.yaml"
    return parse_config({**extra, **policy})


def gib(text: str) -> int:
    return int(text.lower().removesuffix("i").removesuffix("g"))


def test_the_container_has_room_for_its_pool_and_the_comment_is_right() -> None:
    text = (EXAMPLES / "docker" / "compose.yaml").read_text(encoding="utf-8")
    service = yaml.safe_load(text)["services"]["vllm"]
    policy = yaml.safe_load((EXAMPLES / "docker" / "policy.yaml").read_text())
    config = transfer_config(service["command"], policy)
    model = {"num_hidden_layers": 32, "num_attention_heads": 32}
    model |= {"num_key_value_heads": 8, "head_dim": 128}
    shape = kv_shape(model, KvOptions())
    plan, faults = make_plan(config, shape, Engines(16, 1))
    assert faults == []
    assert plan is not None
    assert f"= {shape.bytes_per_token} bytes" in text
    assert f"= {plan.num_slots * 16} tokens" in text
    assert plan.total_bytes // GIB + 8 + 8 == gib(service["mem_limit"])
    reserved = config.tenants["acme"].reserved.num_bytes
    in_tokens = f"# {reserved // shape.bytes_per_token} tokens"
    assert in_tokens in (EXAMPLES / "docker" / "policy.yaml").read_text()
    assert service["ulimits"]["memlock"] == -1


def test_the_pod_has_room_for_its_pool_and_the_comment_is_right() -> None:
    text = (EXAMPLES / "kubernetes" / "vllm.yaml").read_text(encoding="utf-8")
    files, deployment, service, _ = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    (doctor,) = pod["initContainers"]
    policy = yaml.safe_load(files["data"]["policy.yaml"])
    config = transfer_config(server["args"], policy)
    model = {"num_hidden_layers": 64, "num_attention_heads": 40}
    model |= {"num_key_value_heads": 8, "head_dim": 128}
    shape = kv_shape(model, KvOptions(tensor_parallel_size=2))
    plan, faults = make_plan(config, shape, Engines(16, 2))
    assert faults == []
    assert plan is not None
    assert f"= {2 * shape.bytes_per_token} bytes" in text
    assert f"= {plan.num_slots * 16} tokens" in text
    assert plan.bytes_per_worker == 64 * GIB
    limits = server["resources"]["limits"]
    assert plan.total_bytes // GIB + 16 + 16 == gib(limits["memory"])
    assert limits == server["resources"]["requests"]
    assert limits["memory"] == doctor["resources"]["limits"]["memory"]
    assert server["volumeMounts"] == doctor["volumeMounts"]
    assert "--tensor-parallel-size=2" in doctor["command"]
    assert "--tensor-parallel-size=2" in server["args"]
    extra = json.loads(files["data"]["extra.json"])
    assert parse_config({**extra, "policy_file": None, **policy}) == config
    assert service["spec"]["selector"] == pod_labels(deployment)


def pod_labels(deployment: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    return labels


def test_the_images_are_of_one_supported_vllm() -> None:
    releases = pytest.importorskip("vllm_ctx_offload.adapters.releases")
    dockerfile = (EXAMPLES / "docker" / "Dockerfile").read_text(encoding="utf-8")
    (version,) = re.findall(r"^ARG VLLM_VERSION=v(\S+)$", dockerfile, re.MULTILINE)
    assert "FROM vllm/vllm-openai:${VLLM_VERSION}\n" in dockerfile
    first, end = releases.SUPPORTED
    assert first <= type(first)(version) < end
    manifest = (EXAMPLES / "kubernetes" / "vllm.yaml").read_text(encoding="utf-8")
    images = re.findall(r"image: registry\.example/vllm-ctx-offload:(\S+)", manifest)
    assert images == [version, version]


def test_the_servers_name_their_model_as_vllm_serve_wants_it() -> None:
    """As the first argument; the option of that name is about to go."""
    compose = (EXAMPLES / "docker" / "compose.yaml").read_text(encoding="utf-8")
    manifest = (EXAMPLES / "kubernetes" / "vllm.yaml").read_text(encoding="utf-8")
    _, deployment, *_ = yaml.safe_load_all(manifest)
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    for arguments in (
        yaml.safe_load(compose)["services"]["vllm"]["command"],
        server["args"],
    ):
        assert not arguments[0].startswith("-")
        assert not [part for part in arguments if part.startswith("--model=")]
