"""Training forwards and backwards of the stack of blocks, each replayed from a CUDA graph as one launch.

Only the blocks are captured, from the token ids to the last hidden state: that is where the host would wait on hundreds
of launches. Heads, losses, accumulation, clipping and the optimiser stay as they are, so that this works in any loop.
The call of the stack is taken over where torch itself puts a compiled one.

A graph belongs to the shapes of its inputs. It is recorded when a shape comes for the second time; until then, and
where a call cannot be recorded, the stack runs as it is. A graph also belongs to the tensors it was recorded with:
when parameters have moved, or others are trained, all graphs are recorded again.

What a graph keeps for its backward is overwritten by the next forward. A forward that comes before the last one's
backward is therefore not replayed.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from monkeyjump.training.progress import say
from monkeyjump.tuner.call import ModelCall, calls_of
from monkeyjump.tuner.context import RoutingContext
from monkeyjump.tuner.fast.packed_weights import managed
from monkeyjump.tuner.fast.shared_inputs import Seeds
from monkeyjump.tuner.model import find_context
from monkeyjump.tuner.recomputation import HOLDERS

WARM_UP = 1  # calls of a shape before it is recorded
MOST_GRAPHS = 16
TOLD = ("labels", "task_ids", "prompt_lengths")  # what the stack reads of the call around it
SAID = ("load", "probability", "contrastive")  # what learned routers say to the top of the model
Key = tuple[Any, ...]


class Graph(Protocol):
    """Work that is done again, into the same tensors, whenever it is replayed."""

    def rehearse(self, work: Callable[[], None]) -> None: ...

    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]: ...

    def replay(self) -> None: ...


class Memory:
    """What all graphs of a model share, since only one of them runs at a time: a pool of memory and a stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.renew()

    def renew(self) -> None:
        """After a recording that failed, the pool cannot be used again, and random numbers belong to no graph."""
        self.pool = torch.cuda.graph_pool_handle()
        for generator in torch.cuda.default_generators:
            generator.graphsafe_set_state(generator.clone_state())


class CudaGraph:
    """One CUDA graph."""

    def __init__(self, memory: Memory) -> None:
        self._graph, self._memory = torch.cuda.CUDAGraph(), memory

    def rehearse(self, work: Callable[[], None]) -> None:
        """Do the work on the stream that will be recorded: libraries keep things for each stream."""
        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        memory, mode = self._memory, "thread_local"  # other threads may load data meanwhile
        try:
            with torch.cuda.graph(self._graph, pool=memory.pool, stream=memory.stream, capture_error_mode=mode):
                return work()
        except RuntimeError:
            torch.cuda.empty_cache()
            memory.renew()
            raise

    def replay(self) -> None:
        self._graph.replay()


@dataclass
class CaptureReport:
    """What was replayed, and what ran otherwise for which reason."""

    graphs: int = 0
    replayed: int = 0
    others: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        first = f"{self.replayed} forwards replayed from {self.graphs} CUDA graph{'s' if self.graphs != 1 else ''}"
        return "; ".join([first, *(f"{count} not ({reason})" for reason, count in self.others.items())])


@dataclass(eq=False)
class Flight:
    """A replayed forward whose backward has not come yet. It ends with the tensors that hold it."""

    landed: bool = False


@contextmanager
def captured(model: Any, parts: list[Any], new_graph: Callable[[], Graph] | None = None) -> Iterator[CaptureReport]:
    """Replay training forwards of these stacks of blocks of a model inside."""
    new_graph = new_graph or partial(CudaGraph, Memory())
    report, context = CaptureReport(), find_context(model)
    before = [vars(part).get("_compiled_call_impl") for part in parts]
    if managed(model):
        report.others["weights are gathered for every call"] += 1
        parts = []
    if any(getattr(module, "per_token", False) for module in model.modules()):
        report.others["AdaLoRA counts the tokens of its experts"] += 1
        parts = []
    for part in parts:
        part._compiled_call_impl = CapturedCall(part, context, report, new_graph)
    if context is not None:  # the schedule of the centres must not ask the host
        context.shared_inputs.prepare()
    try:
        yield report
    finally:
        if context is not None:
            context.shared_inputs.release()
        for part, call in zip(parts, before, strict=False):
            del part._compiled_call_impl
            if call is not None:
                part._compiled_call_impl = call


class CapturedCall:
    """Stands for the call of one stack of blocks: replays training forwards, and passes everything else on."""

    def __init__(
        self,
        module: Any,
        context: RoutingContext | None,
        report: CaptureReport,
        new_graph: Callable[[], Graph],
    ) -> None:
        self.module, self.context, self.report, self.new_graph = module, context, report, new_graph
        self.flight: weakref.ref[Flight] | None = None
        self._caches = "use_cache" in inspect.signature(module.forward).parameters
        self._compiled = vars(module).get("_compiled_call_impl") or module._call_impl
        self._seen: Counter[Key] = Counter()
        self._graphs: dict[Key, Recorded | None] = {}  # None: cannot be recorded
        self._parameters = list(module.parameters())
        self._tensors: tuple[Any, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.module._call_impl(*args, **kwargs)
        kwargs.pop("num_items_in_batch", None)  # the loss reads it; here every number would be another shape
        if self._caches and kwargs.get("past_key_values") is None:
            kwargs["use_cache"] = False  # nobody generates here, and a graph gives no cache
        leaves, spec = tree_flatten((args, kwargs, self.told()))
        key = _key(leaves, spec)
        if key is None:
            return self._as_it_is("an argument is neither a tensor nor a plain value", args, kwargs)
        self._forget_if_moved()
        self._seen[key] += 1
        if key not in self._graphs:
            if self._seen[key] <= WARM_UP:
                return self._as_it_is("first batches of a shape", args, kwargs)
            if len(self._graphs) >= MOST_GRAPHS:
                return self._as_it_is("more shapes than graphs", args, kwargs)
            self._graphs[key] = self._record(leaves, spec)
        recorded = self._graphs[key]
        if recorded is None:
            return self._as_it_is("cannot be captured", args, kwargs)
        flight = None if self.flight is None else self.flight()
        if flight is not None and not flight.landed:
            return self._as_it_is("another forward waits for its backward", args, kwargs)
        self.report.replayed += 1
        return recorded.run(leaves)

    def told(self) -> dict[str, Any]:
        """What the stack reads of the call around it."""
        call = None if self.context is None else calls_of(self.context)
        if call is None:
            return {}
        told = {name: getattr(call, name) for name in TOLD}
        return told | {"seeds": None if call.seeds is None else call.seeds.drawn()}

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self._compiled(*args, **kwargs)

    def _as_it_is(self, reason: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.report.others[reason] += 1
        return self.call(args, kwargs)

    def _forget_if_moved(self) -> None:
        found = tuple((parameter.data_ptr(), parameter.requires_grad) for parameter in self._parameters)
        if found != self._tensors:
            self._tensors = found
            self._graphs.clear()
            self._seen.clear()

    def _record(self, leaves: list[Any], spec: Any) -> Recorded | None:
        try:
            recorded = Recorded(self, leaves, spec)
        except torch.OutOfMemoryError:
            shape = tuple(next(value.shape for value in leaves if isinstance(value, Tensor)))
            say(f"no memory to capture batches of shape {shape}, which run without: lower batch_size or max_length")
            return None
        except RuntimeError as error:
            say(f"a step cannot be captured and runs without: {str(error).splitlines()[0]}")
            return None
        self.report.graphs += 1
        return recorded


class Recorded:
    """The forward and the backward of one shape of inputs."""

    def __init__(self, owner: CapturedCall, leaves: list[Any], spec: Any) -> None:
        self.owner, self.spec = owner, spec
        self.leaves = [_own(value) if isinstance(value, Tensor) else value for value in leaves]
        self.inputs = [value for value in self.leaves if isinstance(value, Tensor)]
        self.trained = [p for p in owner.module.parameters() if p.requires_grad]
        self.sources = [*(value for value in self.inputs if value.requires_grad), *self.trained]
        self.live: list[Tensor] = []  # the outputs that have a gradient, with the graph behind them
        self.shape_of_output: Any = None
        self.upstream: list[Tensor] = []
        self.used: list[int] = []
        self.forward, self.backward = owner.new_graph(), owner.new_graph()
        with _without_random_states(owner.module):
            with _undone(owner.module):  # a recording can load no kernel and compile nothing
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
        with self._hearing(told), _without_autocast_cache():
            output = self.owner.call(args, kwargs)
        said = [] if self.owner.context is None else self.owner.context.losses.statements.values()
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
        return [torch.cat([found[i].reshape(-1) for i in self.used if found[i].dtype == kind]) for kind in kinds]

    def run(self, leaves: list[Any]) -> Any:
        given = [value for value in leaves if isinstance(value, Tensor)]
        with torch.no_grad():
            torch._foreach_copy_(self.inputs, given)
        self.forward.replay()
        flight = Flight()
        self.owner.flight = weakref.ref(flight)
        asked = [value for value in given if value.requires_grad]
        outputs = _Replayed.apply(self, flight, *asked, *self.trained)
        flat = list(self.plain)
        for place, output in zip(self.places, outputs, strict=True):
            flat[place] = output
        output, said = tree_unflatten(flat, self.shape_of_output)
        if self.owner.context is not None:
            for statement, words in zip(self.owner.context.losses.statements.values(), said, strict=True):
                for name, tensor in zip(SAID, words, strict=True):
                    setattr(statement, name, tensor)
        return output

    def gradients(self, upstream: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """What arrives at the sources, from what arrives at the outputs."""
        arriving = [gradient for gradient, wanted in zip(upstream, self.differentiable, strict=True) if wanted]
        for kept, gradient in zip(self.upstream, arriving, strict=True):
            kept.zero_() if gradient is None else kept.copy_(gradient)
        self.backward.replay()
        found: list[Tensor | None] = [None] * len(self.sources)
        for values in self.flat:
            places = [place for place in self.used if self.sources[place].dtype == values.dtype]
            parts = values.clone().split([self.sources[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                found[place] = part.view(self.sources[place].shape)
        return found

    @contextmanager
    def _hearing(self, told: dict[str, Any]) -> Iterator[None]:
        """The call around has these tensors, which stay where they are, in the place of its own."""
        call = None if self.owner.context is None else calls_of(self.owner.context)
        if call is None or self.owner.context is None:
            yield
            return
        before: dict[str, Any] = {name: getattr(call, name) for name in (*TOLD, "seeds")}
        _set(call, {name: told[name] for name in TOLD if name in told})
        if told.get("seeds") is not None:
            call.seeds = Seeds.of(told["seeds"])
            self.owner.context.shared_inputs.hand_out(call)
        try:
            yield
        finally:
            _set(call, before)


class _Replayed(torch.autograd.Function):
    """The outputs of a replayed forward; its backward is another replay."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, flight: Flight, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.recorded, ctx.flight = recorded, flight
        ctx.set_materialize_grads(False)
        outputs = tuple(output.clone() for output in recorded.outputs)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, recorded.differentiable, strict=True) if not d))
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        if ctx.flight.landed:
            raise RuntimeError("a captured forward has one backward: what the second needs has been overwritten.")
        ctx.flight.landed = True
        return None, None, *ctx.recorded.gradients(upstream)


def _set(call: ModelCall, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(call, name, value)


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _key(leaves: list[Any], spec: Any) -> Key | None:
    """What a graph is made for: the shapes of tensors, the values of all else; None where something is neither."""
    parts: list[Any] = [spec, torch.is_autocast_enabled("cuda")]
    for value in leaves:
        if isinstance(value, Tensor):
            parts.append((tuple(value.shape), value.dtype, value.device, value.requires_grad))
        elif value is None or isinstance(value, (bool, int, float, str)):
            parts.append(value)
        else:
            return None
    return tuple(parts)


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
    if holders and any(isinstance(part, nn.Dropout) and part.p and part.training for part in module.modules()):
        raise RuntimeError("gradient checkpointing cannot repeat the model's own dropout in a graph")
    with ExitStack() as stack:
        for part, name in holders:
            checkpoint = getattr(part, name)
            stack.callback(setattr, part, name, checkpoint)
            setattr(part, name, partial(checkpoint, preserve_rng_state=False))
        yield
