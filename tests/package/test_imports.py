"""The installed wheel: what is registered, and what its modules import.

Every case runs in an interpreter of its own, in an environment that holds the wheel and
not the source tree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs code in the clean environment, packages blocked, and returns what it printed.
Run = Callable[..., str]

TENSORS_AND_VLLM = ("torch", "numpy", "vllm")


def modules_of(*names: str) -> list[str]:
    """Returns the dotted names of the modules in these files and folders."""
    found = []
    for name in names:
        path = ROOT / "vllm_ctx_offload" / name
        files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        found += [file.relative_to(ROOT).with_suffix("") for file in files]
    parts = [
        path.parts[:-1] if path.stem == "__init__" else path.parts for path in found
    ]
    return sorted(".".join(part) for part in parts)


PURE = modules_of("core", "scheduler", "config", "context", "errors", "memory", "plan")
PURE += modules_of("messages")


def test_the_wheel_is_what_is_imported(run_clean: Run, clean_python: Path) -> None:
    where = run_clean("import vllm_ctx_offload; print(vllm_ctx_offload.__file__)")
    assert Path(where.strip()).is_relative_to(clean_python.parents[1])


def test_entry_point_registers_with_vllm(run_clean: Run) -> None:
    printed = run_clean(
        """
        from importlib.metadata import distribution
        import vllm_ctx_offload
        (point,) = [
            point for point in distribution("vllm-ctx-offload").entry_points
            if point.group == "vllm.general_plugins"
        ]
        assert point.load() is vllm_ctx_offload.register
        print(point.name, point.value)
        """
    )
    assert printed.split() == ["ctx_offload", "vllm_ctx_offload:register"]


def test_console_script_is_installed_and_loads_without_vllm(
    run_clean: Run, clean_python: Path
) -> None:
    assert (clean_python.parent / "vllm-ctx-offload").exists()
    run_clean(
        """
        from importlib.metadata import distribution
        (point,) = [
            point for point in distribution("vllm-ctx-offload").entry_points
            if point.group == "console_scripts"
        ]
        assert point.name == "vllm-ctx-offload"
        assert callable(point.load())
        """,
        blocked=TENSORS_AND_VLLM,
    )


@pytest.mark.parametrize("blocked", TENSORS_AND_VLLM)
def test_the_blocker_blocks(run_clean: Run, blocked: str) -> None:
    run_clean(
        f"""
        try:
            import {blocked}
        except ImportError as error:
            assert "blocked in this test" in str(error)
        else:
            raise SystemExit("imported all the same")
        """,
        blocked=(blocked,),
    )


def test_decisions_import_without_torch_numpy_and_vllm(run_clean: Run) -> None:
    imports = "\n".join(f"import {name}" for name in ["vllm_ctx_offload", *PURE])
    run_clean(imports, blocked=TENSORS_AND_VLLM)


def test_worker_imports_without_vllm(run_clean: Run) -> None:
    imports = "; ".join(f"import {name}" for name in modules_of("worker"))
    run_clean(
        f"""
        import warnings
        warnings.simplefilter("ignore")  # torch's own
        {imports}
        """,
        blocked=("vllm",),
    )


def test_register_without_vllm_is_silent_on_repeat_and_never_raises(
    run_clean: Run,
) -> None:
    run_clean(
        """
        import vllm_ctx_offload
        for _ in range(3):
            assert vllm_ctx_offload.register() is None
        """,
        blocked=("vllm",),
    )


def test_register_loads_neither_torch_nor_the_connector(run_clean: Run) -> None:
    printed = run_clean(
        """
        import sys
        import vllm_ctx_offload
        vllm_ctx_offload.register()
        print(*sorted(sys.modules), sep="\\n")
        """,
        blocked=("vllm",),
    )
    loaded = set(printed.split())
    assert "vllm_ctx_offload" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(TENSORS_AND_VLLM)
    assert "vllm_ctx_offload.connector" not in loaded
    assert not any(name.startswith("vllm_ctx_offload.adapters") for name in loaded)


def test_register_adds_the_connector_once_and_does_not_load_it(run_clean: Run) -> None:
    printed = run_clean(
        """
        import warnings
        warnings.simplefilter("ignore")  # vLLM's own
        import sys
        import vllm_ctx_offload
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        before = set(KVConnectorFactory._registry)
        for _ in range(3):
            vllm_ctx_offload.register()
        added = set(KVConnectorFactory._registry) - before
        print(*added, "vllm_ctx_offload.connector" in sys.modules)
        """
    )
    assert printed.split()[-2:] == ["CtxOffloadConnector", "False"]
