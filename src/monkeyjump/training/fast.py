"""`monkeyjump.fast`: everything that makes training fast, switched on around any training loop and off again after it.

| part | what it does | where it holds |
|---|---|---|
| fused loss | the loss is made without the logits of a batch | causal models of Transformers |
| compiled blocks | one graph of the compiler serves all blocks of a kind and all lengths | on a GPU |
| captured blocks | a forward, and a backward, are one launch each | on a GPU, batch shapes that come often |
| attention | no mask is made where the padding is known to be at the end | models with torch's attention |
| PEFT's LoRA | our kernels compute the layers of PEFT | plain LoRA on linear layers, on a GPU |

What does not hold for a model is left out, with one line that says why. Inside, the model is used as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from monkeyjump.errors import ConfigError
from monkeyjump.training.attention import attending, gains_from_products
from monkeyjump.training.captured import CaptureReport, captured
from monkeyjump.training.compile import CompileReport, compiled, compiled_parts
from monkeyjump.training.fused_loss import fused_loss as with_fused_loss
from monkeyjump.training.plain_lora import faster_lora
from monkeyjump.training.progress import say
from monkeyjump.tuner.centers.pool_ranks import several_ranks

if TYPE_CHECKING:
    from monkeyjump.training.recipe import Recipe


@dataclass(frozen=True)
class FastSettings:
    """What is to be switched on. None: on a GPU."""

    compile: bool | str | None = None  # blocks (true) or model
    capture: bool | None = None
    fused_loss: bool | str = "auto"
    pads_last: bool = False  # whether pads, if there are any, are at the end of every row
    shapes: int | None = None  # how many shapes batches may have; None: any number
    asked: bool = False  # whether compiling was asked for by name: then it is an error where it cannot be
    direct: bool = False  # whether gradients are only ever asked for by `backward`, as a Trainer does

    @classmethod
    def of_recipe(cls, recipe: Recipe, gpu: bool, ranks: int = 1) -> FastSettings:
        """What a recipe asks for on this machine. Steps of several ranks are captured where `train.capture` says so."""
        train, on = recipe.train, recipe.fast == "auto" and gpu
        return cls(
            compile=on if train.compile is None else train.compile,
            capture=(on and ranks == 1 if train.capture is None else train.capture) and gpu,
            fused_loss="off" if train.fused_loss == "auto" and recipe.fast is False else train.fused_loss,
            pads_last=True,
            asked=bool(train.compile),
            direct=True,
        ).on(gpu)

    @property
    def few_shapes(self) -> bool:
        return bool(self.compile or self.capture)

    def on(self, gpu: bool) -> FastSettings:
        """The same with every None decided."""
        compile = gpu if self.compile is None else self.compile
        capture = gpu and not several_ranks() if self.capture is None else self.capture
        return replace(self, compile="blocks" if compile is True else compile, capture=capture)


@dataclass
class FastReport:
    """What is switched on, and what it did."""

    fused_loss: str = "off"
    attention: str = ""
    compiled: CompileReport | None = None
    captured: CaptureReport | None = None

    def measurements(self) -> dict[str, Any]:
        found: dict[str, Any] = {"fused_loss": self.fused_loss, "attention": self.attention}
        if self.compiled is not None:
            found |= {"compile_seconds": round(self.compiled.seconds, 2), "graphs": self.compiled.graphs}
        if self.captured is not None:
            found |= {"captured_graphs": self.captured.graphs, "replayed": self.captured.replayed}
        return found

    def __str__(self) -> str:
        return "; ".join(str(part) for part in (self.compiled, self.captured) if part is not None)


def _stacks(model: Any, asked: bool) -> list[Any]:
    """What runs the blocks that have adapters."""
    try:
        return compiled_parts(model.get_base_model() if hasattr(model, "get_base_model") else model, "model")
    except ConfigError:
        if asked:
            raise
        say("nothing is compiled or captured: no transformer block has an adapter")
        return []


@contextmanager
def fast(model: Any, settings: FastSettings | None = None, **changes: Any) -> Iterator[FastReport]:
    """Train inside. Settings are the fields of `FastSettings`, given as an object or as keywords.

    Pad or pack batches to few lengths: each is captured once. `pads_last=True` promises that pads are at the end of
    the rows, which attention then need not look for.
    """
    parameter = next(model.parameters())
    chosen = (settings or FastSettings(**changes)).on(parameter.device.type == "cuda")
    report = FastReport()
    with ExitStack() as stack:
        if chosen.few_shapes:
            if not several_ranks():  # whoever shards or wraps a model gives it other parameters
                stack.enter_context(known_modules(model))
            stack.enter_context(faster_lora(model))
        report.fused_loss = stack.enter_context(with_fused_loss(model, chosen.fused_loss, parameter.is_cuda))
        if chosen.few_shapes and (stacks := _stacks(model, chosen.asked)):
            report.attention = stack.enter_context(attending(model, chosen.pads_last))
            checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
            if chosen.compile and not chosen.asked and checkpoints:
                say("blocks are not compiled: gradient checkpointing computes them again by another graph")
            elif chosen.compile:
                compiling = compiled(model, str(chosen.compile), shapes=chosen.shapes, asked=chosen.asked)
                report.compiled = stack.enter_context(compiling)
            if chosen.capture:  # what gathers gradients over ranks hears of them from autograd
                direct = chosen.direct and not several_ranks()
                report.captured = stack.enter_context(captured(model, stacks, direct=direct))
            elif several_ranks() and parameter.is_cuda:
                say("steps of several ranks are not captured unless train.capture=true, or capture=True, asks for it")
        elif gains_from_products(parameter):
            report.attention = stack.enter_context(attending(model, chosen.pads_last))
        yield report
    if report.compiled is not None or report.captured is not None:
        say(str(report))


# -- a model that knows its modules, its parameters and its mode --------------------------------
# A Trainer asks for all parameters and sets the mode of all modules several times in every step. With the modules of a
# few hundred adapters each walk takes milliseconds of the host, which a captured step does not leave.

_KNOWN = "_known_parameters"
_MODE, _MODULES = f"{_KNOWN}: mode", f"{_KNOWN}: modules"


class _Knows(nn.Module):
    """Before the class of a model: answers from what is known. No adapter may be added or removed meanwhile."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(vars(self)[_KNOWN]) if recurse else super().parameters(recurse)

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        return iter(vars(self)[_MODULES]) if remove_duplicate else super().modules(remove_duplicate)

    def train(self, mode: bool = True) -> Any:
        """Nothing is done where this was the last to set a mode; somebody may have changed that of single modules."""
        known = vars(self)
        if self.training != mode or known.get(_MODE) != mode:
            super().train(mode)
            known[_MODE] = mode
        return self


class _KnowsNumber(_Knows):
    """The same before a class of Transformers, which counts its parameters in every step."""

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        key = f"{_KNOWN}: {args} {kwargs}"
        if key not in vars(self):
            vars(self)[key] = super().num_parameters(*args, **kwargs)  # type: ignore[misc]
        return vars(self)[key]


@contextmanager
def known_modules(model: nn.Module) -> Iterator[None]:
    """No walks through all modules inside, neither of the model nor of the base model in it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    before = [(holder, type(holder)) for holder in dict.fromkeys((model, base))]
    for holder, kind in before:
        vars(holder).update({_KNOWN: list(holder.parameters()), _MODULES: list(holder.modules())})
        knowing = _KnowsNumber if hasattr(kind, "num_parameters") else _Knows
        holder.__class__ = type(kind.__name__, (knowing, kind), {"__module__": kind.__module__})
    try:
        yield
    finally:
        for holder, kind in before:
            holder.__class__ = kind
            for name in [name for name in vars(holder) if name.startswith(_KNOWN)]:
                del vars(holder)[name]
