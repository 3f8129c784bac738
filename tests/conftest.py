"""Records what the package says while the tests run, where they run as a whole.

A run of some of the tests can't tell which messages no test produces: it records none.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from package_messages import PACKAGE, words

# Before torch is loaded, and for every process started: the models are tiny, and
# threads that wait for each other take several times as long on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
ENGINE = HERE / "engine"  # these take long, and say what they say in other processes
MISSING = pytest.StashKey[set[Path]]()


class Produced(logging.Handler):
    """The messages that were made, and the places in the package that made them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.places: set[str] = set()
        self.texts: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self._add(record.pathname, record.lineno, record.getMessage())

    def telling(self, make: Callable[..., Any], text_index: int) -> Callable[..., Any]:
        """Returns what makes the same, and takes in the text and who makes it."""

        def make_and_tell(*args: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                self._add(frame.f_code.co_filename, frame.f_lineno, args[text_index])
                frame = frame.f_back
            return make(*args)

        return make_and_tell

    def _add(self, file: str, line: int, text: str) -> None:
        if (path := Path(file)).is_relative_to(PACKAGE):
            self.places.add(f"{path.relative_to(PACKAGE).as_posix()}:{line}")
            self.texts.add(words(text))


PRODUCED = pytest.StashKey[Produced]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MISSING] = {
        path for path in HERE.rglob("test_*.py") if ENGINE not in path.parents
    }


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    parent.config.stash[MISSING].discard(file_path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Puts what looks at the messages behind the tests that produce them."""
    options = config.option
    if options.keyword or options.markexpr not in ("", "not engine"):
        return
    if config.stash[MISSING]:
        return
    config.stash[PRODUCED] = _record()
    items.sort(
        key=lambda item: (
            ENGINE in item.path.parents,
            "produced" in getattr(item, "fixturenames", ()),
        )
    )


def _record() -> Produced:
    # Not before: tests of the worker also run where only torch is installed.
    from vllm_ctx_offload import config
    from vllm_ctx_offload.cli.doctor_findings import Finding
    from vllm_ctx_offload.cli.doctor_model import UnknownShapeError
    from vllm_ctx_offload.errors import ConfigError

    produced = Produced()
    logging.getLogger("vllm_ctx_offload").addHandler(produced)
    for error in (ConfigError, UnknownShapeError):
        error.__init__ = produced.telling(error.__init__, 1)
    Finding.__new__ = produced.telling(Finding.__new__, 3)
    # What pydantic brings can't be changed, so there a kind of it takes its place.
    made = config.PydanticCustomError
    config.PydanticCustomError = type(
        made.__name__, (made,), {"__new__": produced.telling(made.__new__, 2)}
    )
    return produced


@pytest.fixture
def produced(pytestconfig: pytest.Config) -> Produced:
    """What the tests before this one have made the package say."""
    if PRODUCED not in pytestconfig.stash:
        pytest.skip("only a run of all tests knows")
    return pytestconfig.stash[PRODUCED]
