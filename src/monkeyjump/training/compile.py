"""torch.compile for training: which parts are compiled, how often, and how long it took.

| `train.compile` | compiled | graphs for each batch shape |
|---|---|---|
| `blocks` (true) | every transformer block, with its router; one graph serves all blocks of a kind | 2 to 4 |
| `model` | the whole stack of blocks as one graph, from the token ids to the last hidden state | 1 |

Evaluation, calibration and generation inside run the model as it is. A part that cannot be traced as one graph, and a
graph that is made again and again, are errors: torch would otherwise go on uncompiled without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monkeyjump.errors import ConfigError
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.model import require_context
from monkeyjump.tuner.module_paths import block_of, owner_of

BACKEND = "inductor"
# Of one shape and one kind of block: the first block's input needs no gradient, a batch without padding needs no mask,
# a recomputed block stages nothing. Twice that is the limit.
_VARIANTS = 4


@dataclass
class CompileReport:
    """What compiling cost so far. Seconds include the backward graphs and, on a GPU, recording CUDA graphs."""

    seconds: float = 0.0
    graphs: int = 0

    def __str__(self) -> str:
        return f"{self.graphs} graph{'s' if self.graphs != 1 else ''} compiled in {self.seconds:.1f} s"


@contextmanager
def compiled(
    model: Any, what: str, *, shapes: int = 1, cuda_graphs: bool = False, backend: Any = None
) -> Iterator[CompileReport]:
    """Train inside with compiled `blocks` or the compiled `model`, for batches of at most `shapes` distinct shapes."""
    import torch._dynamo

    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    parts = compiled_parts(base, what)
    limit = 2 * _VARIANTS * max(1, shapes) * len({_kind(part) for part in parts})
    options: dict[str, Any] = {"backend": backend or BACKEND, "fullgraph": True, "dynamic": False}
    if cuda_graphs:
        options["mode"] = "reduce-overhead"
    patched = torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=max(256, limit))
    call = torch.compile(whole_call, **options)
    shared_inputs = require_context(base).shared_inputs
    shared_inputs.prepare()
    for part in parts:
        part._compiled_call_impl = _TrainingCall(part, what, call)
    try:
        with patched, _measured() as report:
            yield report
    finally:
        for part in parts:
            del part._compiled_call_impl
        shared_inputs.release()
        # the graphs belong to the code they were made from, not to `call`: a later run would count them as its own
        torch._dynamo.eval_frame.reset_code(whole_call.__code__)


def compiled_parts(base: nn.Module, what: str) -> list[Any]:
    """The blocks of every list that holds an adapter, or the models that own these lists."""
    modules = dict(base.named_modules())
    homes = {block_of(path, modules) for path, module in modules.items() if isinstance(module, MonkeyJumpLayer)}
    lists = sorted({home.rpartition(".")[0] for home in homes if home is not None})
    if not lists:
        raise ConfigError(
            f"train.compile={what!r} finds no transformer block with an adapter in {type(base).__name__}: "
            "set train.compile=false."
        )
    if what == "blocks":
        return [block for path in lists for block in modules[path].children()]
    return [modules[path] for path in sorted({owner_of(f"{path}.0", modules) for path in lists})]


def _kind(module: nn.Module) -> tuple:
    """What a graph depends on beside the batch: modules with the same kind share their graphs."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return getattr(module, "attention_type", None), tuple((name, tuple(tensor.shape)) for name, tensor in tensors)


def whole_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A module with its hooks. `Module.compile()` makes a graph of the forward and others of the hooks; the router is a
    hook and belongs into one graph with the projections that read its gates."""
    return module._call_impl(*args, **kwargs)


class _TrainingCall:
    """Stands for a module's call where torch itself puts a compiled one: compiled while it trains, else as it is."""

    def __init__(self, module: Any, what: str, call: Callable[..., Any]) -> None:
        self.module = module
        self.what = what
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.module._call_impl(*args, **kwargs)
        from torch._dynamo import exc

        try:
            return self.call(self.module, *args, **kwargs)
        except exc.Unsupported as error:
            reason = f"the code of {type(self.module).__name__} cannot be traced as one graph"
            raise self._refused(reason, error) from error
        except exc.FailOnRecompileLimitHit as error:
            reason = f"{type(self.module).__name__} is compiled again and again, for batches or settings that change"
            raise self._refused(reason, error) from error

    def _refused(self, reason: str, error: Exception) -> ConfigError:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return ConfigError(
            f"train.compile={self.what!r}: {reason} ({first}). Set train.compile=false, or see all reasons with "
            "TORCH_LOGS=graph_breaks,recompiles.",
            title="cannot compile",
        )


@contextmanager
def _measured() -> Iterator[CompileReport]:
    """Count the graphs and the time of every compilation inside, the lazy one of a backward pass included."""
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.utils import counters

    report, began, before = CompileReport(), [0.0], counters["stats"]["unique_graphs"]

    def start(_: Any) -> None:
        began[0] = time.perf_counter()

    def end(_: Any) -> None:
        report.seconds += time.perf_counter() - began[0]
        report.graphs = counters["stats"]["unique_graphs"] - before

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield report
    finally:
        with suppress(ValueError):  # torch._dynamo.reset() has removed them
            callback_handler.remove_start_callback(start)
            callback_handler.remove_end_callback(end)


class OwnGradients:
    """Gradient memory outside the CUDA graphs, for parameters whose backward is one.

    Without it the gradient that a graph hands over stays in the graph's memory, and the next micro-batch of an
    accumulated step overwrites it (pytorch/pytorch#169545). With memory of its own, autograd adds to it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.memory = [torch.zeros_like(parameter) for parameter in self.parameters]

    def begin(self) -> None:
        """Before every micro-batch: a new run of the graphs, and zeros where the last step left no gradient."""
        if torch.cuda.is_available():
            torch.compiler.cudagraph_mark_step_begin()
        empty = [
            (parameter, memory)
            for parameter, memory in zip(self.parameters, self.memory, strict=True)
            if parameter.grad is None
        ]
        if empty:
            torch._foreach_zero_([memory for _, memory in empty])
            for parameter, memory in empty:
                parameter.grad = memory
