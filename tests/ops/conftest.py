"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory given to kernels is NaN, and so is what lies around it; after the test it must still be so around it."""
    from tests.ops.common import Poison  # not above: tests of the reference need no Triton

    with monkeypatch.context() as patch:
        found = Poison(patch)
        yield
    found.check()
