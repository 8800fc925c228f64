"""A stand-in for CUDA graphs, which exist on no CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from monkeyjump.training.captured import CaptureReport, captured
from monkeyjump.training.cuda_graphs import CudaGraph


class RunAgain(CudaGraph):
    """Does recorded work when it is replayed, into the tensors of its recording, as a CUDA graph does."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def prepare(self, work: Callable[[], None]) -> None:
        work()

    def rehearse(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with torch.random.fork_rng():
            self.work, self.found = work, work()
        for buffer, before in buffers:  # recording does nothing
            buffer.data.copy_(before)
        return self.found

    def replay(self) -> None:
        for tensor, again in zip(self.found, self.work(), strict=True):
            tensor.detach().copy_(again.detach())


def replaying(model: nn.Module, parts: list[Any], direct: bool = False) -> AbstractContextManager[CaptureReport]:
    """`captured` with the stand-in."""
    return captured(model, parts, lambda: RunAgain(model), direct)
