"""The worker side needs torch alone."""

from __future__ import annotations

import subprocess
import sys


def test_the_worker_side_runs_with_vllm_blocked() -> None:
    code = """
import sys
sys.modules["vllm"] = None  # importing it fails
import torch
from vllm_ctx_offload.plan import GroupShape, OffloadPlan
from vllm_ctx_offload.worker import OffloadWorker

cache = torch.zeros((8, 4))
worker = OffloadWorker(OffloadPlan((GroupShape(16),), 1, 16, 16, 1, 4))
worker.register({"l": cache}, 8)
worker.close()
print(sorted(name for name in sys.modules if name.startswith("vllm.")))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
