"""One shape of inputs of a stack of blocks, recorded: its forward is one graph, its backward another.

What the blocks read beside their arguments (the call around them) is copied to where the graph looks, and what learned
routers say to the top of the model is an output like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.utils._pytree import tree_flatten, tree_unflatten

from monkeyjump.training.cuda_graphs import CudaGraph
from monkeyjump.training.plain_lora import SEEDS, FasterLinear
from monkeyjump.tuner.call import calls_of
from monkeyjump.tuner.context import RoutingContext
from monkeyjump.tuner.fast.shared_inputs import Seeds
from monkeyjump.tuner.recomputation import HOLDERS, CarriesCall

TOLD = ("labels", "task_ids", "prompt_lengths", "token_ids")  # what the stack reads of the call around it
SAID = ("load", "probability", "contrastive")  # what learned routers say to the top of the model


@dataclass(eq=False)
class Flight:
    """A replayed forward whose backward has not come yet. It ends with the tensors that hold it."""

    landed: bool = False


@dataclass(eq=False)
class Stack:
    """A stack of blocks: what it is, how it is called, the routing of its model, and where its graphs come from."""

    module: Any
    call: Callable[..., Any]
    context: RoutingContext | None
    new_graph: Callable[[], CudaGraph]
    direct: bool = False  # gradients go to the parameters past autograd, which nobody asks for them by other ways


class Recorded:
    """The forward and the backward of one shape of inputs."""

    def __init__(self, stack: Stack, leaves: list[Any], spec: Any, own_leaves: bool = False) -> None:
        """`own_leaves`: record with other parameter objects over the same memory.

        Where the graph of an earlier loss is alive, autograd sends gradients of its parameters through the stream of
        that loss, which no recording may touch. Who listens to gradients must not hear those of a recording either.
        """
        self.stack, self.spec = stack, spec
        self.leaves = list(leaves)
        for place, value in enumerate(leaves):
            if isinstance(value, Tensor):
                self.leaves[place] = value.detach().clone().requires_grad_(value.requires_grad)
        self.inputs = [value for value in self.leaves if isinstance(value, Tensor)]
        self.trained = [p for p in stack.module.parameters() if p.requires_grad]
        own_leaves = own_leaves or any(map(_has_hooks, self.trained))
        self.own = {parameter: nn.Parameter(parameter.detach()) for parameter in self.trained} if own_leaves else {}
        parameters = [self.own.get(parameter, parameter) for parameter in self.trained]
        self.sources = [*(value for value in self.inputs if value.requires_grad), *parameters]
        self.asked = len(self.sources) - len(parameters)  # how many of the sources are inputs
        # stands for all parameters where autograd is to know none of them
        self.anchor = torch.zeros((), device=parameters[0].device if parameters else None, requires_grad=True)
        self.live: list[Tensor] = []  # the outputs that have a gradient, with the graph behind them
        self.shape_of_output: Any = None
        self.upstream: list[Tensor] = []
        self.used: list[int] = []
        self.forward, self.backward = stack.new_graph(), stack.new_graph()

    def prepare(self) -> None:
        """Compile what will be needed."""
        with _without_random_states(self.stack.module), _undone(self.stack.module):
            self.forward.prepare(self._rehearsed)

    def record(self) -> None:
        with _without_random_states(self.stack.module):
            with _undone(self.stack.module):  # a recording can load no kernel and compile nothing
                self.forward.rehearse(self._rehearsed)
            self.live = []
            outputs = self.forward.record(self._forward)
            self.differentiable = [output.requires_grad for output in outputs]
            self.flat = self.backward.record(self._backward)
        self.live = []
        self.outputs = [output.detach() for output in outputs]

    def _rehearsed(self) -> None:
        self._forward()
        self.upstream = [torch.zeros_like(output) for output in self.live]
        self._backward()

    def _forward(self) -> list[Tensor]:
        args, kwargs, told = tree_unflatten(self.leaves, self.spec)
        for part in self.stack.module.modules():
            vars(part).get(SEEDS, {}).clear()
        with self._hearing(told), _without_autocast_cache(), _holding(self.stack.module, self.own):
            output = self.stack.call(*args, **kwargs)
        said = [] if self.stack.context is None else self.stack.context.losses.statements.values()
        statements = [tuple(getattr(statement, name) for name in SAID) for statement in said]
        leaves, self.shape_of_output = tree_flatten((output, statements))
        if any(not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))) for leaf in leaves):
            raise RuntimeError("the blocks return something that is neither a tensor nor a plain value")
        self.plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        outputs = [leaves[place] for place in self.places]
        self.live = [output for output in outputs if output.requires_grad]
        return outputs

    def _backward(self) -> list[Tensor]:
        """The gradients of all sources that have one: one tensor for each dtype."""
        found = torch.autograd.grad(self.live, self.sources, self.upstream, allow_unused=True)
        self.used = [place for place, gradient in enumerate(found) if gradient is not None]
        kinds = dict.fromkeys(self.sources[place].dtype for place in self.used)
        self.kinds = [[place for place in self.used if found[place].dtype == kind] for kind in kinds]
        return [torch.cat([found[place].reshape(-1) for place in places]) for places in self.kinds]

    def run(self, leaves: list[Any]) -> tuple[Any, Flight]:
        """The outputs for other inputs, and what must not be overwritten before its backward."""
        given = [value for value in leaves if isinstance(value, Tensor)]
        with torch.no_grad():
            torch._foreach_copy_(self.inputs, given)
        self.forward.replay()
        flight = Flight()
        asked = [value for value in given if value.requires_grad]
        direct = self.stack.direct and not any(map(_has_hooks, self.trained))
        outputs = _Replayed.apply(self, flight, direct, *asked, *([self.anchor] if direct else self.trained))
        flat = list(self.plain)
        for place, output in zip(self.places, outputs, strict=True):
            flat[place] = output
        output, said = tree_unflatten(flat, self.shape_of_output)
        if self.stack.context is not None:
            for statement, words in zip(self.stack.context.losses.statements.values(), said, strict=True):
                for name, tensor in zip(SAID, words, strict=True):
                    setattr(statement, name, tensor)
        return output, flight

    def gradients(self, upstream: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """What arrives at the sources, from what arrives at the outputs."""
        arriving = [gradient for gradient, wanted in zip(upstream, self.differentiable, strict=True) if wanted]
        for kept, gradient in zip(self.upstream, arriving, strict=True):
            kept.zero_() if gradient is None else kept.copy_(gradient)
        self.backward.replay()
        found: list[Tensor | None] = [None] * len(self.sources)
        for places, values in zip(self.kinds, self.flat, strict=True):
            parts = unflatten(values.clone(), [self.sources[place] for place in places])
            for place, part in zip(places, parts, strict=True):
                found[place] = part
        return found

    def deliver(self, found: list[Tensor | None]) -> None:
        """Add gradients to those of the parameters, as autograd would after several hundred calls."""
        there, more = list[Tensor](), list[Tensor]()
        for parameter, gradient in zip(self.trained, found, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                there.append(parameter.grad)
                more.append(gradient)
        if there:
            torch._foreach_add_(there, more)

    @contextmanager
    def _hearing(self, told: dict[str, Any]) -> Iterator[None]:
        """The call around has these tensors, which stay where they are, in the place of its own."""
        call = None if self.stack.context is None else calls_of(self.stack.context)
        if call is None or self.stack.context is None:
            yield
            return
        before: dict[str, Any] = {name: getattr(call, name) for name in (*TOLD, "seeds", "recorded")}
        call.recorded = True
        vars(call).update({name: told[name] for name in TOLD if name in told})
        if told.get("seeds") is not None:
            call.seeds = Seeds.of(told["seeds"])
            self.stack.context.shared_inputs.hand_out(call)
        try:
            yield
        finally:
            vars(call).update(before)


class _Replayed(torch.autograd.Function):
    """The outputs of a replayed forward; its backward is another replay."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, flight: Flight, direct: bool, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.recorded, ctx.flight, ctx.direct = recorded, flight, direct
        ctx.set_materialize_grads(False)
        outputs = tuple(output.clone() for output in recorded.outputs)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, recorded.differentiable, strict=True) if not d))
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        if ctx.flight.landed:
            raise RuntimeError("a captured forward has one backward: what the second needs has been overwritten.")
        ctx.flight.landed = True
        found = ctx.recorded.gradients(upstream)
        if ctx.direct:
            asked = ctx.recorded.asked
            ctx.recorded.deliver(found[asked:])
            found = [*found[:asked], None]
        return None, None, None, *found


def _has_hooks(parameter: Tensor) -> bool:
    """Whether somebody wants to hear of the gradient of a parameter, which only autograd tells."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


@contextmanager
def _holding(module: nn.Module, others: dict[Tensor, nn.Parameter]) -> Iterator[None]:
    """The modules have these parameters in the place of theirs."""
    parts = module.modules() if others else ()
    places = [(part._parameters, name) for part in parts for name, p in part._parameters.items() if p in others]
    before: list[tuple[dict[str, Any], str, Any]] = [(held, name, held[name]) for held, name in places]
    for held, name, parameter in before:
        held[name] = others[parameter]
    try:
        yield
    finally:
        for held, name, parameter in before:
            held[name] = parameter


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """A copy of a weight that autocast keeps would lie in the memory of the graph."""
    before = torch.is_autocast_cache_enabled()
    # without autocast nothing is kept, and compiled code would be made again for the other setting
    torch.set_autocast_cache_enabled(before and not torch.is_autocast_enabled("cuda"))
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """What is done inside changes no buffer and draws no random number."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {buffer.device for buffer in module.parameters() if buffer.is_cuda}
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        for buffer, values in before:
            buffer.data.copy_(values)


@contextmanager
def _without_random_states(module: nn.Module) -> Iterator[None]:
    """Checkpoints that do not save the states of random generators, which a recording cannot read."""
    holders = [(part, name) for part in module.modules() for name in HOLDERS if vars(part).get(name) is not None]
    layers = [part for part in module.modules() if isinstance(part, FasterLinear)] if holders else []
    ours = {id(drop) for layer in layers for drop in layer.modules() if isinstance(drop, nn.Dropout)}
    drops = [part for part in module.modules() if isinstance(part, nn.Dropout) and part.p and part.training]
    if holders and any(id(drop) not in ours for drop in drops):
        raise RuntimeError("gradient checkpointing cannot repeat the model's own dropout in a graph")
    with ExitStack() as stack:
        for layer in layers:
            setattr(layer, SEEDS, {})
            stack.callback(delattr, layer, SEEDS)
        for part, name in holders:
            checkpoint, options = getattr(part, name), {"preserve_rng_state": False}
            stack.callback(setattr, part, name, checkpoint)
            carries = isinstance(checkpoint, CarriesCall)
            setattr(part, name, checkpoint.with_options(**options) if carries else partial(checkpoint, **options))
        yield
