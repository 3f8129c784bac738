"""The worker side needs torch alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


NOT_NEEDED = ("vllm", "psutil", "yaml", "pydantic", "msgspec", "sortedcontainers")
# Torch says when there is no numpy.
WARNINGS = ("-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning")
WORKER = """
import types
import torch
from vllm_ctx_offload.worker import OffloadWorker

cache = torch.zeros((8, 4))
plan = types.SimpleNamespace(bytes_per_block=16, num_rows=4, writes_early=False)
worker = OffloadWorker(plan)
worker.register({"l": cache}, 8)
worker.close()
"""


def run_without(modules: tuple[str, ...], code: str, *folders: Path) -> None:
    """Runs code in a process where these modules can't be imported."""
    block = f"import sys\nsys.modules.update(dict.fromkeys({modules}))\n"
    found = f"sys.path[:0] = {[str(folder) for folder in folders]}\n"
    done = subprocess.run(
        [sys.executable, *WARNINGS, "-c", block + found + code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_the_worker_side_runs_with_torch_alone() -> None:
    """And with numba, which compiles the copies of the CPU backend."""
    run_without(NOT_NEEDED, WORKER)


@pytest.mark.parametrize(
    "code",
    [
        "import vllm_ctx_offload.worker",
        "import worker.test_gpu",
        "import transfer\ntransfer.submission_us('cpu')",
    ],
)
def test_what_a_machine_with_a_gpu_runs_needs_no_numpy_either(code: str) -> None:
    folders = (ROOT / "benchmarks", ROOT / "tests")
    run_without((*NOT_NEEDED, "hypothesis", "numpy"), code, *folders)
