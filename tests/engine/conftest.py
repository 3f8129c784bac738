"""Models made once a session, and engines shared by tests that want the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.harness import Engine
from engine.models import make_gemma3, make_gemma4, make_llama, make_mla
from engine.spec import EngineSpec

HERE = Path(__file__).parent
# What vLLM and its dependencies warn about is not ours to mend. What comes in every run
# is left out of the summary, so that there is one when something new comes.
WARNINGS = (
    "default",
    "error:::vllm_ctx_offload",
    # vLLM looks at every object of every module when it looks for its kernels.
    "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning:torch",
    # Lists that vLLM's n-gram proposer hands to numba.
    r"ignore:[\s\S]*type that is scheduled for deprecation::numba",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mla(tmp_path_factory.mktemp("mla"))


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma4(tmp_path_factory.mktemp("gemma4"))


class EngineShelf:
    """Holds one engine at a time and starts another only for a different spec."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._refused: dict[EngineSpec, str] = {}

    def get(self, spec: EngineSpec) -> Engine:
        """Returns an engine of that spec with both caches empty."""
        engine = self._engine
        if engine is None or engine.spec != spec or engine.broken:
            self.clear()
            if spec not in self._refused:
                try:
                    self._engine = Engine(spec)
                # MLA on the CPU: not there in 0.27, and in 0.28 misses a part.
                except (NotImplementedError, ImportError) as error:
                    self._refused[spec] = str(error)
            if (engine := self._engine) is None:
                pytest.skip(f"this vLLM: {self._refused[spec]}")
        engine.forget()
        return engine

    def clear(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()


@pytest.fixture(scope="session")
def shelf() -> Iterator[EngineShelf]:
    shelf = EngineShelf()
    yield shelf
    shelf.clear()


class CopyFaults:
    """Stands before the worker's copy and makes chosen ones fail."""

    def __init__(self, copy: Callable[..., None]) -> None:
        self._copy = copy
        self.fail: Callable[[bool], bool] = lambda to_host: False
        self.num_failed = 0

    def __call__(self, *arguments: Any, to_host: bool) -> None:
        if self.fail(to_host):
            self.num_failed += 1
            raise OSError("injected")
        self._copy(*arguments, to_host=to_host)


@pytest.fixture
def faults(engine: Engine) -> Iterator[CopyFaults]:
    transfer = engine.transfer
    faults = CopyFaults(transfer._copy)
    transfer._copy = faults
    yield faults
    engine.drain()
    transfer._copy = faults._copy
