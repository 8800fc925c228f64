"""Settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# No test may reach for the network: set before anything imports huggingface_hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU the kernels run in Triton's interpreter, which it decides on when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What one test compiled must not serve, or be counted in, the next."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
