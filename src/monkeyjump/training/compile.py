"""torch.compile for training: which parts are compiled, how often, and how long it took.

| `train.compile` | compiled | graphs for each batch shape |
|---|---|---|
| `blocks` (true) | every transformer block, with its router; one graph serves all blocks of a kind | 1 or 2 |
| `model` | the whole stack of blocks as one graph, from the token ids to the last hidden state | 1 |

Where batches have several lengths, the graphs of blocks serve all of them. Evaluation, calibration and generation
inside run the model as it is. A part that cannot be traced as one graph, and a graph that is made again and again, are
errors where compiling was asked for, and one line where it was not: torch would go on uncompiled without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from monkeyjump.errors import ConfigError
from monkeyjump.training.progress import say
from monkeyjump.tuner.model import find_context
from monkeyjump.tuner.module_paths import block_of, owner_of
from monkeyjump.tuner.recomputation import recomputes_forward, routed_forward

BACKEND = "inductor"
# Of one shape and one kind of block: a batch without padding needs no mask, a recomputed block stages nothing. Twice
# that is the limit.
_VARIANTS = 4


@dataclass
class CompileReport:
    """What compiling cost so far. Seconds include the backward graphs and, on a GPU, recording CUDA graphs."""

    seconds: float = 0.0
    graphs: int = 0
    given_up: str = ""  # why the rest runs uncompiled

    def __str__(self) -> str:
        if self.given_up:
            return f"not compiled: {self.given_up}"
        return f"{self.graphs} graph{'s' if self.graphs != 1 else ''} compiled in {self.seconds:.1f} s"


@contextmanager
def compiled(
    model: Any, what: str, *, shapes: int | None = 1, backend: Any = None, asked: bool = True
) -> Iterator[CompileReport]:
    """Train inside with compiled `blocks` or the compiled `model`, for batches of at most `shapes` distinct shapes.

    None is any number. What nobody has `asked` for is left out where it fails.
    """
    import torch._dynamo

    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    parts = compiled_parts(base, what)
    any_length = what == "blocks" and shapes != 1  # a whole model would make its masks for each
    kinds = {_kind(part) for part in parts}
    limit = 2 * _VARIANTS * (1 if any_length else max(1, shapes or 8)) * len(kinds)
    patched = torch._dynamo.config.patch(
        recompile_limit=limit,
        accumulated_recompile_limit=max(256, limit),
        specialize_float=True,  # rates and scales are no lengths
    )
    call, forward = (
        torch.compile(function, backend=backend or BACKEND, fullgraph=True, dynamic=any_length)
        for function in (whole_call, routed_forward)
    )
    configs = {name: sorted(vars(c).items(), key=str) for name, c in getattr(model, "peft_config", {}).items()}
    _forget_others((kinds, any_length, str(backend or BACKEND), str(configs)), limit)
    context = find_context(base)
    if context is not None:
        context.shared_inputs.prepare()
    if next(base.parameters()).is_cuda:
        with suppress(ImportError, AttributeError):  # not a public part of torch
            from torch._inductor.async_compile import AsyncCompile

            AsyncCompile.warm_pool()  # else the first graph would compile its kernels itself
    with patched, _measured() as report:
        for part in parts:
            part._compiled_call_impl = _TrainingCall(part, what, call, forward, report, asked)
        try:
            yield report
        finally:
            for part in parts:
                del part._compiled_call_impl
            if context is not None:
                context.shared_inputs.release()


def compiled_parts(base: nn.Module, what: str) -> list[Any]:
    """The blocks of every list that holds an adapter, or the models that own these lists."""
    modules = dict(base.named_modules())
    homes = {block_of(path, modules) for path, module in modules.items() if isinstance(module, BaseTunerLayer)}
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


_last: list[Any] = [None]  # what the graphs that there are were made for


def _forget_others(made_for: Any, limit: int) -> None:
    """Graphs belong to the code they were made from, for as long as the process lives: a later run of the same kind
    goes on with them, and those of another would only count against the limit."""
    from torch._dynamo import eval_frame

    for code in (whole_call.__code__, routed_forward.__code__):
        if made_for != _last[0] or 2 * len(eval_frame._debug_get_cache_entry_list(code)) >= limit:
            eval_frame.reset_code(code)
    _last[0] = made_for


def whole_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A module with its hooks. `Module.compile()` makes a graph of the forward and others of the hooks; the router is a
    hook and belongs into one graph with the projections that read its gates."""
    return module._call_impl(*args, **kwargs)


@dataclass(eq=False)
class _TrainingCall:
    """Stands for a module's call where torch itself puts a compiled one: compiled while it trains, else as it is."""

    module: Any
    what: str
    call: Callable[..., Any]
    forward: Callable[..., Any]
    report: CompileReport
    asked: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trains = self.module.training and torch.is_grad_enabled()
        if trains and self.what == "blocks" and args and not args[0].requires_grad:
            # the first block as the others, so that one graph serves all
            args = args[0].detach().requires_grad_(), *args[1:]
        if recomputes_forward(self.module):  # what is compiled lies inside of what is checkpointed
            return self.module._call_impl(*args, **kwargs)
        return self._compiled(self.call, whole_call, self.module, *args, **kwargs)

    def routed_forward(self, *args: Any) -> Any:
        """The forward of a block that is checkpointed without its hooks."""
        return self._compiled(self.forward, routed_forward, *args)

    def _compiled(self, call: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()) or self.report.given_up:
            return plain(*args, **kwargs)
        from torch._dynamo import exc

        name = type(self.module).__name__
        try:
            return call(*args, **kwargs)
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            reason = f"the compiler failed on {name}"  # the code that was generated does not compile
            if isinstance(error, exc.Unsupported):
                reason = f"the code of {name} cannot be traced as one graph"
            elif isinstance(error, exc.FailOnRecompileLimitHit):
                reason = f"{name} is compiled again and again, for batches or settings that change"
            first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if self.asked:
            raise ConfigError(
                f"train.compile={self.what!r}: {reason} ({first}). Set train.compile=false, or see all reasons with "
                "TORCH_LOGS=graph_breaks,recompiles.",
                title="cannot compile",
            )
        self.report.given_up = reason
        say(f"not compiled: {reason}")
        return plain(*args, **kwargs)


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
