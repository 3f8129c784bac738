"""A manager of eight slots: bare, behind a reuse filter that lets all by, plain LRU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manager_probe import KINDS, Checked, make_checked

NUM_SLOTS = 8


@pytest.fixture(params=KINDS)
def manager(request: pytest.FixtureRequest) -> Iterator[Checked]:
    checked = make_checked(request.param, NUM_SLOTS)
    yield checked
    checked.inner.check_invariants()
