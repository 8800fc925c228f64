"""Fixtures of the routing tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from threadpoolctl import threadpool_limits


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: on busy cores the threads of each wait for one another, 10 to 20 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)
