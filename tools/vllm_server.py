"""A vLLM server as a child process: started, waited for and surely stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from tools import local_vllm

POLL_SECONDS = 0.5
STOP_SECONDS = 30.0

# What an error message shows of the log: exceptions, without them its end.
MAX_ERRORS = 3
TAIL_LINES = 15
_EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .*")


class ServerError(RuntimeError):
    """The server did not come up or is gone; the message says what to look at."""


class VllmServer:
    """A server on a free local port; a context manager that stops it on any way out.

    It runs in a process group of its own. Ctrl-C in a terminal therefore reaches only
    the caller, which leaves the ``with`` block, and nothing of the server is left.
    """

    def __init__(self, model: Path, options: Sequence[str], log_file: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = log_file
        self.command = [
            *local_vllm.server_command(model),
            "--host=127.0.0.1",
            f"--port={self.port}",
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VllmServer:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | local_vllm.ENVIRONMENT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_ready(
        self, on_wait: Callable[[float], None], timeout_seconds: float = 600.0
    ) -> None:
        """Returns when the server answers.

        Args:
            on_wait: Called about twice a second with the seconds waited so far.
            timeout_seconds: When to give up.

        Raises:
            ServerError: If the server ended, or did not answer in time.
        """
        began = time.monotonic()
        while not self._answers():
            waited = time.monotonic() - began
            if not self.is_running:
                raise ServerError(
                    f"The server ended while starting.{self._what_the_log_says()}"
                )
            if waited > timeout_seconds:
                raise ServerError(
                    f"The server did not answer within {timeout_seconds:.0f} s."
                    f"{self._what_the_log_says()}"
                )
            on_wait(waited)
            time.sleep(POLL_SECONDS)

    @property
    def is_running(self) -> bool:
        """Whether the server's main process lives."""
        return self._process is not None and self._process.poll() is None

    def get(self, path: str) -> str:
        """Returns the body of a GET request, as text."""
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            body: bytes = response.read()
        return body.decode()

    def stop(self) -> bool:
        """Stop the server with all its processes; return whether it went by itself."""
        process = self._process
        if process is None:
            return True
        self._process = None
        # Stopping takes seconds; a second Ctrl-C must not leave processes behind.
        with _uninterrupted():
            # What service managers send; SIGINT is ignored in a script's background.
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
                graceful = True
            except subprocess.TimeoutExpired:
                graceful = False
            # The engine's processes outlive a main process that crashed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return graceful

    def _answers(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def _what_the_log_says(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()
        # vLLM's processes each fail in turn, over pages: the first is the cause.
        errors = dict.fromkeys(
            found[0]
            for line in lines
            if " WARNING " not in line and (found := _EXCEPTION.search(line))
        )
        shown = list(errors)[:MAX_ERRORS] or lines[-TAIL_LINES:]
        what = "Errors" if errors else "The last lines"
        text = "\n".join(f"  | {line}" for line in shown)
        return f" {what} in {self.log_file}:\n{text}"


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C inside the block."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def free_port() -> int:
    """Returns a TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
