"""Fixtures of the routing tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_limits

from monkeyjump.routing import kmeans


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: on busy cores the threads of each wait for one another, 10 to 20 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def iterations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every iteration of k-means: fewer than `max_iter` of them means that all restarts converged."""
    found: list[int] = []
    iterate = kmeans._iterate

    def counted(*args: Any) -> Any:
        found.append(len(found))
        return iterate(*args)

    monkeypatch.setattr(kmeans, "_iterate", counted)
    return found
