"""What makes a recipe's training fast, switched on around the Trainer and off again after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from monkeyjump.training.compile import CompileReport, OwnGradients, compiled
from monkeyjump.training.fused_loss import fused_loss
from monkeyjump.training.progress import say
from monkeyjump.training.recipe import Recipe


@dataclass
class FastPath:
    """What is switched on."""

    fused_loss: str = "off"  # off, torch or liger
    compiled: CompileReport | None = None
    gradients: OwnGradients | None = None  # with CUDA graphs

    def measurements(self) -> dict[str, Any]:
        found: dict[str, Any] = {"fused_loss": self.fused_loss}
        if self.compiled is not None:
            found |= {"compile_seconds": round(self.compiled.seconds, 2), "graphs": self.compiled.graphs}
        return found


@contextmanager
def fast_path(model: nn.Module, recipe: Recipe, shapes: int | None, on_gpu: bool) -> Iterator[FastPath]:
    """Train inside as `recipe.train` says; `shapes` is how many shapes its batches have. Prints what compiling cost."""
    train = recipe.train
    fast = FastPath()
    with ExitStack() as stack:
        fast.fused_loss = stack.enter_context(fused_loss(model, train.fused_loss, on_gpu))
        if train.compile:
            what = "blocks" if train.compile is True else str(train.compile)
            graphs = train.cuda_graphs and on_gpu
            fast.compiled = stack.enter_context(compiled(model, what, shapes=shapes or 1, cuda_graphs=graphs))
            fast.gradients = OwnGradients(model) if graphs else None
            say(f"compiling the {what}: the first batch of every shape takes longer")
        yield fast
    if fast.compiled is not None:
        say(str(fast.compiled))
