"""A real OpenAI server in a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine.spec import BLOCK, CTX, engine_environment

__all__ = ["OURS", "Server"]

_FLAGS: Final = ("--enforce-eager", "--enable-prompt-tokens-details")
_READY: Final = "Application startup complete"
# A metric's line: name, labels, value.
_SAMPLE: Final = re.compile(r"(?P<name>[\w:]+)\{(?P<labels>.*)\} (?P<value>\S+)")
OURS: Final = "vllm:ctx_offload_"
COMMON_LABELS: Final = ("engine", "model_name", "connector")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


class Server:
    """Starts at once; `wait_ready` returns when it answers or has ended."""

    def __init__(
        self, model: Path, *, num_blocks: int, flags: Sequence[str] = (), **extra: Any
    ) -> None:
        self.port = _free_port()
        transfer = {**CTX, "kv_connector_extra_config": extra}
        arguments = {
            "--model": str(model),
            "--served-model-name": "tiny",
            "--port": str(self.port),
            "--host": "127.0.0.1",
            "--dtype": "float32",
            "--max-model-len": str((num_blocks - 1) * BLOCK),
            "--block-size": str(BLOCK),
            "--num-gpu-blocks-override": str(num_blocks),
            "--max-num-seqs": "8",
            "--gpu-memory-utilization": "0.3",
            "--kv-transfer-config": json.dumps(transfer),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in arguments.items():
            command += [name, value]
        self.lines: list[str] = []
        with engine_environment(
            VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_LOGGING_LEVEL="INFO"
        ):
            self.process = subprocess.Popen(
                [*command, *_FLAGS, *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if _READY in line:
                self._ready.set()
        self._ready.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_ready(self) -> None:
        self._ready.wait()
        # The line comes a moment before the socket listens.
        while not self._answers():
            assert self.process.poll() is None, self.log[-5000:]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health"):
                return True
        except OSError:
            return False

    def post(
        self, path: str, *, rank: int | None = None, **body: Any
    ) -> dict[str, Any]:
        """Sends a request; `rank` is the engine it goes to, where there are several."""
        headers = {"Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps({"model": "tiny", "temperature": 0, **body}).encode(),
            headers,
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        assert isinstance(answer, dict)
        return answer

    def begin_completion(
        self, prompt: Sequence[int], max_tokens: int
    ) -> http.client.HTTPConnection:
        """Sends a request whose answer is never read; the caller closes it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens}
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        return connection

    def complete(
        self,
        prompt: Sequence[int],
        ctx: Mapping[str, Any],
        max_tokens: int = 1,
        rank: int | None = None,
    ) -> dict[str, Any]:
        return self.post(
            "/v1/completions",
            rank=rank,
            prompt=list(prompt),
            max_tokens=max_tokens,
            kv_transfer_params={"ctx": {"receipt": True, **ctx}},
        )

    def metrics(
        self, prefix: str = OURS, left_out: Collection[str] = COMMON_LABELS
    ) -> dict[tuple[str, ...], float]:
        """Returns (name, label values) -> value, of names with that prefix.

        The tenant is the first label, where there is one.
        """
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url) as response:
            text = response.read().decode()
        samples = {}
        for match in _SAMPLE.finditer(text):
            name = match["name"].removeprefix(prefix)
            if name == match["name"] or name.endswith("_created"):
                continue
            labels = dict(_LABEL.findall(match["labels"]))
            tenant = [labels.pop("tenant")] if "tenant" in labels else []
            own = [v for k, v in labels.items() if k not in left_out]
            samples[(name, *tenant, *own)] = float(match["value"])
        return samples

    def close(self) -> None:
        # The engine's process holds the log too: reading would never end.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
