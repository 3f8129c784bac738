"""How fast blocks move between cache and host pool, beside the limit of the machine.

For pages (one layer of one block) of 4 KiB to 2 MiB and jobs of 1 to 4,096 blocks, in
both directions and both at once: the backend of this device, one contiguous copy of as
many bytes (the limit), a loop of a copy a page (naive), and on a GPU vLLM's
`swap_blocks` and `swap_blocks_batch` where it is installed. All in turn in one run, on
the same threads or streams, so that what else the machine does hits all of them; a
ratio is the median over rounds. Block ids are scattered and rows in runs of 64, as with
a cache in use, or both are in runs, the best case.

Also: what a submission costs the model's thread, with streams that do nothing where
there is no GPU; and, on the CPU, what a decode step loses to a copy beside it.

Needs torch alone (and numba for the CPU backend); matplotlib for `--plot`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transfer_beside import step_ratios, submission_us
from transfer_rivals import Naive, Ours, Plain, Rival, make_job, vllm_rivals

from vllm_ctx_offload.messages import TransferJob
from vllm_ctx_offload.worker import paths
from vllm_ctx_offload.worker.cpu_transfer import CpuTransfer
from vllm_ctx_offload.worker.cuda_transfer import (
    SCRATCH_BYTES,
    CudaTransfer,
    DeviceTerms,
)
from vllm_ctx_offload.worker.host_pool import HostPool
from vllm_ctx_offload.worker.kv_layout import BlockLayout, derive_layout

KIB, MIB = 1024, 1024**2
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB)
BLOCKS = (1, 8, 64, 512, 4096)
DIRECTIONS = {"store": (True,), "load": (False,), "both": (True, False)}
# The case that is checked, and its goals.
PAGE, NUM_BLOCKS, MIN_RATIO = 64 * KIB, 512, 0.85
MAX_SUBMIT_US, MAX_STEP_RATIO = 100.0, 1.10
# A case gets 3 rounds, 6 within 2 s, and up to 42 within a fraction of a second.
LIMIT_S = (2.0, *(0.3,) * 6, 0.0)
# A smaller job is over before a poll looks again, so it is not compared.
MIN_COMPARED = 4 * MIB


class Case(NamedTuple):
    """What was measured; GB/s are medians, ratios are to the contiguous copy."""

    page_bytes: int
    num_blocks: int
    ids: str
    direction: str
    gb_per_s: dict[str, float]
    ratio: dict[str, float]


def make_rivals(
    layout: BlockLayout, pool: HostPool, device: str, ways: Sequence[paths.Path | None]
) -> dict[str, Rival]:
    """Returns all that is compared, by name."""
    if device == "cpu":
        # The same thread does the same bytes another way.
        plain, naive = Plain(layout, pool.rows), Naive(layout, pool.rows)
        # Each in one piece: the plain one has no part that belongs to a block.
        copies = {"contiguous": plain.copy, "naive": naive.copy}
        transfers = {
            name: CpuTransfer(layout, pool.rows, copy, piece_bytes=sys.maxsize)
            for name, copy in copies.items()
        }
        transfers["ours"] = CpuTransfer(layout, pool.rows)
        return {name: Ours(transfer) for name, transfer in transfers.items()}
    rivals: dict[str, Rival] = {"contiguous": Plain(layout, pool.rows)}
    settings = {
        f"ours, {path.value}" if path else "ours": (SCRATCH_BYTES, path)
        for path in ways
    }
    if len(ways) > 1:
        settings["ours, staged, 2x scratch"] = (2 * SCRATCH_BYTES, paths.Path.STAGED)
    for name, setting in settings.items():
        terms = DeviceTerms(torch.cuda, pool.pinned_rows, *setting)
        rivals[name] = Ours(CudaTransfer(layout, pool.rows, terms))
    rivals["naive"] = Naive(layout, pool.rows)
    return rivals | vllm_rivals(layout, pool.rows)


def measure(
    rivals: dict[str, Rival], job: TransferJob, num_bytes: int, directions: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns GB/s and ratios; as many rounds as the time for a case allows."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    began = time.perf_counter()
    rounds = 0
    while rounds < 3 or time.perf_counter() - began < LIMIT_S[min(rounds // 6, 7)]:
        for name, rival in rivals.items():
            start = time.perf_counter()
            rival.run(job, directions)
            # The first round is for warming up.
            if rounds:
                seconds[name].append(time.perf_counter() - start)
        rounds += 1
    total = num_bytes * len(directions) / 1e9
    speed = {name: total / statistics.median(s) for name, s in seconds.items()}
    limit = seconds["contiguous"]
    ratio = {
        name: statistics.median(a / b for a, b in zip(limit, own, strict=True))
        for name, own in seconds.items()
    }
    return speed, ratio


def sweep(args: argparse.Namespace, device: str) -> Iterator[Case]:
    """Measures every case that fits, page size by page size."""
    deadline = time.monotonic() + args.seconds
    ways = [None, *paths.Path] if args.path else [None]
    for page in args.pages:
        most = args.max_bytes // (page * args.layers)
        counts = [count for count in args.blocks if count <= most]
        if not counts:
            continue
        num_blocks = 2 * max(counts) + 2  # of 2 no dimension is clear
        caches = {
            str(layer): torch.zeros(num_blocks, page, dtype=torch.uint8, device=device)
            for layer in range(args.layers)
        }
        layout = derive_layout(caches, num_blocks)
        pool = HostPool(num_blocks, layout.bytes_per_block, device)
        rivals = make_rivals(layout, pool, device, ways)
        for count in counts:
            for ids in ("scattered", "runs"):
                job = make_job(layout, num_blocks, count, ids)
                num_bytes = count * layout.bytes_per_block
                for name, directions in DIRECTIONS.items():
                    # What is checked is measured however late it is.
                    if time.monotonic() > deadline and (page, count) != (
                        PAGE,
                        NUM_BLOCKS,
                    ):
                        continue
                    found = measure(rivals, job, num_bytes, directions)
                    yield Case(page, count, ids, name, *found)
        for rival in rivals.values():
            rival.close()
        pool.close()


def show(case: Case) -> None:
    """Prints a case in one line."""
    speeds = "  ".join(
        f"{name} {speed:6.2f} ({case.ratio[name]:.2f})"
        for name, speed in case.gb_per_s.items()
    )
    print(
        f"{case.page_bytes // KIB:5} KiB x {case.num_blocks:4} {case.ids:9} "
        f"{case.direction:5} {speeds}",
        flush=True,
    )


def plot(cases: Sequence[Case], file: Path) -> None:
    """Draws GB/s against page size at the largest jobs, a panel for each direction."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, panels = plt.subplots(1, 3, sharey=True, figsize=(14, 4))
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        found = [c for c in cases if c.direction == direction and c.ids == "scattered"]
        largest = {c.page_bytes: c for c in found}  # the last of a size is the largest
        for name in {name: 0 for case in found for name in case.gb_per_s}:
            points = [(page, c.gb_per_s[name]) for page, c in largest.items()]
            panel.plot(*zip(*points, strict=True), marker="o", label=name)
        panel.set(xscale="log", title=direction, xlabel="bytes of a page")
    panels[0].set_ylabel("GB/s")
    panels[0].legend()
    figure.savefig(file)


def goals(cases: Sequence[Case], result: dict[str, Any], device: str) -> Iterator[bool]:
    """Prints each goal, and yields whether it was met."""
    for case in cases:
        checked = (case.page_bytes, case.num_blocks) == (PAGE, NUM_BLOCKS)
        if checked and case.direction != "both":
            name = f"{case.direction} of {NUM_BLOCKS} x {PAGE // KIB} KiB"
            ratio = case.ratio["ours"]
            yield goal(f"{name}, {case.ids}", ratio, MIN_RATIO, ratio >= MIN_RATIO)
        num_bytes = case.page_bytes * case.num_blocks * result["layers"]
        if device == "cuda" and num_bytes >= MIN_COMPARED:
            for rival in case.ratio.keys() & {
                "naive",
                "swap_blocks",
                "swap_blocks_batch",
            }:
                slower = case.ratio[rival] / case.ratio["ours"]
                if slower > 1.05:
                    yield goal(f"{case[:4]}: {rival} over ours", slower, 1.0, False)
    submit = result["submission_us"]["median"]
    yield goal("submission in us", submit, MAX_SUBMIT_US, submit <= MAX_SUBMIT_US)
    for kind, step in result.get("steps", {}).items():
        name, ratio = f"step, {kind}", step["ratio"]
        yield goal(name, ratio, MAX_STEP_RATIO, ratio <= MAX_STEP_RATIO)
        print(f"     copied meanwhile: {step['copy_gb_per_s']:.2f} GB/s")


def goal(name: str, value: float, limit: float, met: bool) -> bool:
    """Prints one goal."""
    print(f"{'ok  ' if met else 'MISS'} {name}: {value:.2f} ({limit})")
    return met


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; defaults depend on the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, help="4 on the CPU, 32 on a GPU")
    parser.add_argument("--pages", type=int, nargs="+", default=PAGES, help="bytes")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="a job")
    parser.add_argument("--max-bytes", type=int, help="of a job")
    parser.add_argument("--seconds", type=float, default=200.0, help="of the sweep")
    parser.add_argument("--turns", type=int, default=12, help="with a copy beside")
    parser.add_argument("--path", action="store_true", help="each way on a GPU, too")
    parser.add_argument("--json", type=Path, help="write settings and figures")
    parser.add_argument("--plot", type=Path, help="draw them")
    parser.add_argument("--check", action="store_true", help="exit with 1 at a miss")
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.layers = args.layers or (32 if args.device == "cuda" else 4)
    args.max_bytes = args.max_bytes or (1024 if args.device == "cuda" else 256) * MIB
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a goal was missed and --check given."""
    args = parse(argv)
    if args.device == "cpu" and not importlib.util.find_spec("numba"):
        print("nothing was measured: there is no GPU, and on the CPU numba is needed")
        return 0
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {args.layers} layers; GB/s (ratio)")
    num_threads = torch.get_num_threads()
    if args.device == "cpu":
        torch.set_num_threads(1)  # also of threads to come; ours copies with one
    cases = []
    for case in sweep(args, args.device):
        cases.append(case)
        show(case)
    torch.set_num_threads(num_threads)
    result: dict[str, Any] = {"device": name, "torch": torch.__version__}
    result |= {"layers": args.layers, "cases": [case._asdict() for case in cases]}
    result["submission_us"] = submission_us(args.device)
    if args.device == "cpu" and torch.get_num_threads() > 1:
        result["steps"] = step_ratios(PAGE, NUM_BLOCKS, args.turns)
    met = list(goals(cases, result, args.device))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if args.plot:
        plot(cases, args.plot)
    return int(args.check and not all(met))


if __name__ == "__main__":
    sys.exit(main())
