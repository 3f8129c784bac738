"""A manager of eight slots, bare and behind a reuse filter that lets everything by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manager_probe import Checked, make_checked

NUM_SLOTS = 8


@pytest.fixture(params=["bare", "filter0", "filter1"])
def manager(request: pytest.FixtureRequest) -> Iterator[Checked]:
    checked = make_checked(request.param, NUM_SLOTS)
    yield checked
    checked.inner.check_invariants()
