"""What the packaging tests share: the built distributions and a clean interpreter."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Put before a snippet: these modules then fail to import, whatever is installed.
BLOCKER = """
import importlib.abc, sys

class _Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked in this test")
        return None

sys.meta_path.insert(0, _Blocker())
"""


class Distributions(NamedTuple):
    """The built files."""

    wheel: Path
    sdist: Path


def run_python(python: Path, code: str) -> str:
    """Runs code in an interpreter of its own and returns what it printed.

    Isolated (`-I`), so that neither the current folder nor PYTHONPATH lends it the
    source tree.
    """
    done = subprocess.run(
        [python, "-I", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The sdist of a copy of the tree, and the wheel built from that sdist.

    A copy, because a build leaves folders behind that the next one would pick up.
    """
    folder = tmp_path_factory.mktemp("build")
    tree = folder / "tree"
    tree.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    out = folder / "dist"
    # No isolation: the environment has setuptools, and a test needs no index for it.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return Distributions(wheel, sdist)


@pytest.fixture(scope="session")
def clean_python(
    distributions: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The interpreter of an environment that holds the wheel.

    Its dependencies come from the environment of the tests, through a path file. That
    environment's own, editable copy of the package comes after the wheel's folder on
    the path, and its path file is not processed there.
    """
    venv = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    found = run_python(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    site = Path(found.strip())
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-index", distributions.wheel],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def run_clean(clean_python: Path) -> Callable[..., str]:
    """Runs code against the installed wheel, with the named packages blocked."""

    def run(code: str, *, blocked: tuple[str, ...] = ()) -> str:
        start = BLOCKER.format(blocked=set(blocked)) if blocked else ""
        return run_python(clean_python, start + textwrap.dedent(code))

    return run
