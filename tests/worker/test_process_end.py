"""A worker process that ends, or is killed, with a copy under way."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# A worker with a store that hangs, as a driver that is stuck would: all the test can
# ask for is that the process ends all the same.
WORKER = """
    import sys, threading, torch
    from vllm_ctx_offload.messages import TransferJob, TransferPlan
    from vllm_ctx_offload.plan import GroupShape, OffloadPlan
    from vllm_ctx_offload.worker import OffloadWorker

    cache = torch.zeros((16, 1024))
    plan = OffloadPlan((GroupShape(16),), 1, 16, cache[0].nbytes, 1, 16_384)
    worker = OffloadWorker(plan)
    worker.register({"l": cache}, 16)

    begun = threading.Event()
    def hang(*args, **kwargs):
        begun.set()
        threading.Event().wait()

    worker._transfer._copy = hang
    jobs = tuple(TransferJob(i, "r", (i,), (i,)) for i in range(3))
    worker.start_stores(TransferPlan(stores=jobs))
    begun.wait()
    print("storing", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def start() -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def start(ending: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WORKER) + textwrap.dedent(ending)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "storing\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("ending", ["worker.close()", ""])
def test_a_process_that_stops_in_the_middle_of_a_store_is_gone_in_time(
    start: object, ending: str
) -> None:
    process = start(ending)  # type: ignore[operator]
    # CASES 44 says 5 s, which it takes on an idle machine; what it must not do is wait
    # for the copy, which never ends.
    process.communicate("stop\n", timeout=30)
    assert process.returncode == 0


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_a_killed_process_leaves_no_shared_memory(start: object) -> None:
    before = shared_memory()
    process = start("")  # type: ignore[operator]
    maps = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in maps.splitlines()[1:])
    # The pool's 64 MiB are the process's own, not files that outlive it.
    assert int(fields["Pss_Shmem"].split()[0]) < 1024
    assert psutil.Process(process.pid).memory_info().rss > 64 * 1024**2
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    new = shared_memory() - before
    assert not [name for name in new if str(process.pid) in name or "ctx" in name]
