"""`mj.fast`: everything that makes training fast, switched on around any training loop and off again after it.

| part | what it does | where it holds |
|---|---|---|
| fused loss | the loss is made without the logits of a batch | causal models of Transformers, on a GPU |
| compiled blocks | one graph of the compiler serves all blocks of a kind | on a GPU |
| captured step | forward, loss and gradients are one launch | one CUDA graph for each batch shape that comes often |

What does not hold for a model is left out, with one line that says why. Inside, the model is used as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from monkeyjump.training.captured import CapturedCall, CaptureReport
from monkeyjump.training.compile import CompileReport, compiled
from monkeyjump.training.fused_loss import fused_loss as with_fused_loss
from monkeyjump.training.progress import say


@dataclass
class FastReport:
    """What is switched on, and what it did."""

    fused_loss: str = "off"
    compiled: CompileReport | None = None
    captured: CaptureReport | None = None

    def __str__(self) -> str:
        parts = [f"fused loss {self.fused_loss}", *(str(part) for part in (self.compiled, self.captured) if part)]
        return ", ".join(parts)


@contextmanager
def fast(
    model: Any,
    *,
    compile: bool | None = None,
    capture: bool | None = None,
    fused_loss: bool | str = "auto",
    shapes: int = 8,
) -> Iterator[FastReport]:
    """Train inside. `compile` and `capture` are on where the model is on a GPU, unless told.

    `shapes` is how many shapes batches may have: pad or pack them to few, since each is compiled and captured once.
    """
    on_gpu = next(model.parameters()).device.type == "cuda"
    report = FastReport()
    with ExitStack() as stack:
        report.fused_loss = stack.enter_context(with_fused_loss(model, fused_loss, on_gpu))
        if on_gpu if compile is None else compile:
            report.compiled = stack.enter_context(compiled(model, "blocks", shapes=shapes))
        if on_gpu if capture is None else capture:
            report.captured = stack.enter_context(captured(model))
        yield report
    say(str(report))


@contextmanager
def captured(model: nn.Module) -> Iterator[CaptureReport]:
    """Replay training forwards of this model inside."""
    before = vars(model).get("_compiled_call_impl")
    call = CapturedCall(model)
    model._compiled_call_impl = call
    try:
        yield call.report
    finally:
        del model._compiled_call_impl
        if before is not None:
            model._compiled_call_impl = before
