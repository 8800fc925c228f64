"""Training forwards replayed from CUDA graphs: one launch for the forward, the loss and all gradients.

A loss is one number, so its gradients are known up to a factor as soon as it is. The graph of a batch shape computes
the loss and the gradients for an upstream gradient of one; `backward` multiplies them by the one that really comes.
Everything around the model stays as it is, in any training loop: accumulation, clipping, optimiser, data-parallel
hooks. The call of the model is taken over where torch itself puts a compiled one.

A shape is captured when it comes for the third time; until then, and where a call cannot be captured, the model runs as
it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from monkeyjump.training.progress import say

WARM_UP = 2  # calls of a shape before it is captured: the first compiles, the second has everything in place
MOST_GRAPHS = 16
Key = tuple[Any, ...]


class Graph(Protocol):
    """Work that was recorded without being done, and does it whenever it is replayed."""

    def record(self, work: Callable[[], None]) -> None: ...

    def replay(self) -> None: ...


class CudaGraph:
    """One CUDA graph. All graphs of a model share one pool of memory, since only one of them runs at a time."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def record(self, work: Callable[[], None]) -> None:
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=self._pool):
            work()

    def replay(self) -> None:
        self._graph.replay()


@dataclass
class CaptureReport:
    """What was replayed, and what ran otherwise for which reason."""

    graphs: int = 0
    replayed: int = 0
    others: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        parts = [f"{self.replayed} forwards replayed from {self.graphs} CUDA graph{'s' if self.graphs != 1 else ''}"]
        return "; ".join(parts + [f"{count} not: {reason}" for reason, count in self.others.items()])


class CapturedCall:
    """Stands for the call of a model: replays training forwards, and passes everything else on."""

    def __init__(self, model: Any, new_graph: Callable[[], Graph] | None = None) -> None:
        self.model = model
        self.report = CaptureReport()
        self._seen: Counter[Key] = Counter()
        self._graphs: dict[Key, _Recorded | None] = {}  # None: cannot be captured
        self._new_graph = new_graph or partial(CudaGraph, torch.cuda.graph_pool_handle())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.model.training and torch.is_grad_enabled()):
            return self.model._call_impl(*args, **kwargs)
        reason = "arguments without names" if args else ""
        inputs = _with_device_numbers(kwargs, self.model)
        key = _key(inputs)
        if key is None:
            reason = "an argument is neither a tensor nor a plain value"
        if reason or key is None:
            return self._as_it_is(reason, args, kwargs)
        self._seen[key] += 1
        if key not in self._graphs:
            if self._seen[key] <= WARM_UP:
                return self._as_it_is("first batches of a shape", args, inputs)
            if len(self._graphs) >= MOST_GRAPHS:
                return self._as_it_is("more shapes than graphs", args, inputs)
            self._graphs[key] = self._record(inputs)
        recorded = self._graphs[key]
        if recorded is None:
            return self._as_it_is("cannot be captured", args, inputs)
        self.report.replayed += 1
        return recorded.run(inputs)

    def _as_it_is(self, reason: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.report.others[reason] += 1
        return self.model._call_impl(*args, **kwargs)

    def _record(self, inputs: dict[str, Any]) -> _Recorded | None:
        try:
            recorded = _Recorded(self.model, inputs, self._new_graph())
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            shape = tuple(next(value.shape for value in inputs.values() if isinstance(value, Tensor)))
            say(f"no memory to capture batches of shape {shape}, which run without: lower batch_size or max_length")
            return None
        except RuntimeError as error:
            say(f"a step cannot be captured and runs without: {str(error).splitlines()[0]}")
            return None
        self.report.graphs += 1
        return recorded


class _Recorded:
    """The forward, loss and gradients of one shape of inputs."""

    def __init__(self, model: Any, inputs: dict[str, Any], graph: Graph) -> None:
        self.inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.graph = graph
        self.output: Any = None
        self.used: list[nn.Parameter] = []  # those that the loss depends on
        self.flat: dict[torch.dtype, Tensor] = {}  # their gradients, one after another
        graph.record(lambda: self._work(model))

    def _work(self, model: Any) -> None:
        output: Any = model._call_impl(**self.inputs)
        loss = output.get("loss") if isinstance(output, ModelOutput) else None
        if loss is None:
            raise RuntimeError("the model returns no loss: give it labels")
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = zip(self.parameters, found, strict=True)
        self.used = [parameter for parameter, gradient in pairs if gradient is not None]
        gradients = [gradient for gradient in found if gradient is not None]
        kinds = dict.fromkeys(gradient.dtype for gradient in gradients)
        self.flat = {kind: torch.cat([g.reshape(-1) for g in gradients if g.dtype == kind]) for kind in kinds}
        logits = getattr(output, "logits", None)
        self.output = type(output)(loss=loss.detach(), logits=None if logits is None else logits.detach())

    def run(self, inputs: dict[str, Any]) -> Any:
        given = [value for value in inputs.values() if isinstance(value, Tensor)]
        kept = [value for value in self.inputs.values() if isinstance(value, Tensor)]
        torch._foreach_copy_(kept, given, non_blocking=True)
        self.graph.replay()
        # copies, since the next replay may come before this backward
        flat = {kind: values.clone() for kind, values in self.flat.items()}
        loss = _Known.apply(self.output.loss.clone(), flat, *self.used)
        return type(self.output)(loss=loss, logits=self.output.logits)


class _Known(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, flat: dict[torch.dtype, Tensor], *parameters: Tensor) -> Tensor:
        ctx.flat, ctx.kinds = flat, [(parameter.dtype, parameter.shape) for parameter in parameters]
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        parts = {}
        for kind, values in ctx.flat.items():
            sizes = [shape.numel() for dtype, shape in ctx.kinds if dtype == kind]
            parts[kind] = iter((values * upstream.to(kind)).split(sizes))
        return None, None, *(next(parts[dtype]).view(shape) for dtype, shape in ctx.kinds)


def _with_device_numbers(kwargs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The arguments, with the number of tokens in a step as a tensor: each plain number would be a shape of its own."""
    count = kwargs.get("num_items_in_batch")
    if count is None or isinstance(count, Tensor):
        return kwargs
    device = next(model.parameters()).device
    return {**kwargs, "num_items_in_batch": torch.tensor(count, device=device)}


def _key(inputs: dict[str, Any]) -> Key | None:
    """What a graph is made for: the shapes of tensors, the values of all else; None where something is neither."""
    parts: list[Any] = []
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            parts.append((name, tuple(value.shape), value.dtype, value.device))
        elif value is None or isinstance(value, (bool, int, float, str)):
            parts.append((name, value))
        else:
            return None
    return tuple(parts)
