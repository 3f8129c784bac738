"""CASES 36: how much memory may still be used, by made-up cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_mock import MockerFixture

from vllm_ctx_offload import memory
from vllm_ctx_offload.memory import (
    DEFAULT_ENV,
    RAY_COPIES_ENV,
    MemoryLimit,
    available_memory,
    default_pool_bytes,
    format_bytes,
    publish_default_pool_bytes,
)

MIB = 1024**2
MACHINE_BYTES = 1_000 * MIB
MACHINE = MemoryLimit(MACHINE_BYTES, "the machine's memory")
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine has 1,000 MiB left, whatever runs beside the tests."""
    kib = MACHINE_BYTES // 1024
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemFree:  512 kB\nMemAvailable:   {kib} kB\nSwapFree: 0 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setenv(DEFAULT_ENV, "")
    monkeypatch.setenv(RAY_COPIES_ENV, "")


@pytest.mark.parametrize("text", ["MemTotal: 4096 kB\n", None])
def test_where_the_kernel_does_not_say_what_is_available_it_is_all_there_is(
    text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "other")
    if text is not None:
        (tmp_path / "other").write_text(text)
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(memory.os, "sysconf", sizes.__getitem__)
    found = available_memory(tmp_path / "none", tmp_path / "none")
    assert found == (4_096_000, "the machine's memory")


def write_v2(root: Path, limit: object, usage: object, stat: str | None = None) -> None:
    (root / "memory.max").write_text(f"{limit}\n")
    (root / "memory.current").write_text(f"{usage}\n")
    if stat is not None:
        (root / "memory.stat").write_text(stat)


def test_the_groups_around_a_service_bind_it_too(tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "self"
    inner = root / "system.slice" / "vllm.service"
    inner.mkdir(parents=True)
    write_v2(root / "system.slice", 100 * MIB, 60 * MIB)
    write_v2(inner, 90 * MIB, 10 * MIB)
    proc.write_text("0::/system.slice/vllm.service\n")
    expected = MemoryLimit(40 * MIB, "cgroup memory.max")
    assert available_memory(root, proc) == expected


def test_a_version_1_group_is_looked_for_in_its_own_hierarchy(tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "self"
    folder = root / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{100 * MIB}")
    (folder / "memory.usage_in_bytes").write_text(f"{30 * MIB}")
    proc.write_text("5:cpu,cpuacct:/other\n4:memory:/job\n0::/\n")
    expected = MemoryLimit(70 * MIB, "cgroup memory.limit_in_bytes")
    assert available_memory(root, proc) == expected


def write_v1(root: Path, limit: object, usage: object, stat: str = "") -> None:
    folder = root / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(stat)


def test_without_a_cgroup_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == MACHINE


def test_a_version_2_limit_leaves_what_is_not_used(tmp_path: Path) -> None:
    write_v2(tmp_path, 100 * MIB, 30 * MIB)
    assert available_memory(tmp_path) == MemoryLimit(70 * MIB, "cgroup memory.max")


def test_a_version_1_limit_leaves_what_is_not_used(tmp_path: Path) -> None:
    write_v1(tmp_path, 100 * MIB, 30 * MIB)
    expected = MemoryLimit(70 * MIB, "cgroup memory.limit_in_bytes")
    assert available_memory(tmp_path) == expected


@pytest.mark.parametrize(
    "stat",
    [
        f"anon 5\nfile 9\ninactive_file {20 * MIB}\nactive_file 7\n",
        f"inactive_file {20 * MIB}",
    ],
)
def test_page_cache_counts_as_memory_to_be_had(tmp_path: Path, stat: str) -> None:
    write_v2(tmp_path, 100 * MIB, 30 * MIB, stat)
    assert available_memory(tmp_path) == MemoryLimit(90 * MIB, "cgroup memory.max")


def test_version_1_page_cache_is_that_of_the_whole_hierarchy(tmp_path: Path) -> None:
    stat = f"inactive_file 0\ntotal_cache 8\ntotal_inactive_file {20 * MIB}\n"
    write_v1(tmp_path, 100 * MIB, 30 * MIB, stat)
    expected = MemoryLimit(90 * MIB, "cgroup memory.limit_in_bytes")
    assert available_memory(tmp_path) == expected


def test_stale_statistics_never_give_more_than_the_limit(tmp_path: Path) -> None:
    write_v2(tmp_path, 100 * MIB, 30 * MIB, f"inactive_file {40 * MIB}\n")
    assert available_memory(tmp_path) == MemoryLimit(100 * MIB, "cgroup memory.max")


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write_v2(tmp_path, 100 * MIB, 130 * MIB)
    assert available_memory(tmp_path) == MemoryLimit(0, "cgroup memory.max")


def test_a_limit_above_the_machines_memory_does_not_bind(tmp_path: Path) -> None:
    write_v2(tmp_path, 5_000 * MIB, 30 * MIB)
    assert available_memory(tmp_path) == MACHINE


def test_no_limit_in_version_2_leaves_the_machine(tmp_path: Path) -> None:
    write_v2(tmp_path, "max", 30 * MIB)
    assert available_memory(tmp_path) == MACHINE


def test_no_limit_in_version_1_leaves_the_machine(tmp_path: Path) -> None:
    write_v1(tmp_path, UNLIMITED_V1, 30 * MIB)
    assert available_memory(tmp_path) == MACHINE


def test_a_limit_without_a_usage_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("100")
    write_v1(tmp_path, 60 * MIB, 10 * MIB)
    expected = MemoryLimit(50 * MIB, "cgroup memory.limit_in_bytes")
    assert available_memory(tmp_path) == expected


def test_the_default_pool_is_a_quarter_and_stays_so_for_child_processes(
    mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = mocker.patch.object(memory, "available_memory")
    limits.return_value = MemoryLimit(400, "a cgroup")
    publish_default_pool_bytes()
    limits.return_value = MemoryLimit(80, "a cgroup")
    publish_default_pool_bytes()
    assert default_pool_bytes() == 100
    assert memory.os.environ[DEFAULT_ENV] == "100"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("", DEFAULT_ENV),
        ("MINE", f"MINE,{DEFAULT_ENV}"),
        (f"{DEFAULT_ENV},MINE", f"{DEFAULT_ENV},MINE"),
    ],
)
def test_vllm_is_told_once_to_copy_the_default_to_other_hosts(
    monkeypatch: pytest.MonkeyPatch, names: str, expected: str
) -> None:
    monkeypatch.setenv(RAY_COPIES_ENV, names)
    for _ in range(2):
        publish_default_pool_bytes()
    assert memory.os.environ[RAY_COPIES_ENV] == expected


@pytest.mark.parametrize("value", ["", "lots", "-5", "²", "1.5"])
def test_a_published_default_that_is_no_number_is_replaced(
    mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    mocker.patch.object(
        memory, "available_memory", return_value=MemoryLimit(400, "a cgroup")
    )
    monkeypatch.setenv(DEFAULT_ENV, value)
    assert default_pool_bytes() == 100


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1_023, "1023 B"),
        (1_024, "1.00 KiB"),
        (1_536, "1.50 KiB"),
        (3 * 1024**3 // 2, "1.50 GiB"),
        (1024**4, "1.00 TiB"),
        (5_000 * 1024**4, "5000.00 TiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(
    num_bytes: int, text: str
) -> None:
    assert format_bytes(num_bytes) == text
