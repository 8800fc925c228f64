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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils._pytree import tree_flatten

from monkeyjump.training.cuda_graphs import CudaGraph, Memory
from monkeyjump.training.progress import say
from monkeyjump.training.recorded import TOLD, Flight, Recorded, Stack
from monkeyjump.tuner.call import calls_of, running
from monkeyjump.tuner.centers.pool_ranks import several_ranks
from monkeyjump.tuner.fast.packed_weights import managed
from monkeyjump.tuner.model import find_context

WARM_UP = 1  # calls of a shape before it is recorded
MOST_GRAPHS = 16
Key = tuple[Any, ...]


@dataclass
class CaptureReport:
    """What was replayed, and what ran otherwise for which reason."""

    graphs: int = 0
    replayed: int = 0
    others: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        first = f"{self.replayed} forwards replayed from {self.graphs} CUDA graph{'s' if self.graphs != 1 else ''}"
        return "; ".join([first, *(f"{count} not ({reason})" for reason, count in self.others.items())])


@contextmanager
def captured(
    model: Any, parts: list[Any], new_graph: Callable[[], CudaGraph] | None = None, direct: bool = False
) -> Iterator[CaptureReport]:
    """Replay training forwards of these stacks of blocks of a model inside.

    With `direct` a backward writes gradients to the parameters by itself: autograd would need several calls for each.
    `torch.autograd.grad` does not see the parameters then.
    """
    new_graph = new_graph or partial(CudaGraph, Memory())
    report, context = CaptureReport(), find_context(model)
    before = [vars(part).get("_compiled_call_impl") for part in parts]
    counted = any(getattr(module, "per_token", False) for module in model.modules())
    if managed(model) or counted:
        reason = "AdaLoRA counts the tokens of its experts" if counted else "weights are gathered for every call"
        report.others[reason] += 1
        parts = []
    for part, call in zip(parts, before, strict=False):
        stack = Stack(part, call or part._call_impl, context, new_graph, direct)
        part._compiled_call_impl = CapturedCall(stack, report)
    if context is not None:  # the schedule of the centres must not ask the host
        context.shared_inputs.prepare()
        context.replays = True
    try:
        yield report
    finally:
        if context is not None:
            context.shared_inputs.release()
            context.replays = False
        for part, call in zip(parts, before, strict=False):
            del part._compiled_call_impl
            if call is not None:
                part._compiled_call_impl = call


class CapturedCall:
    """Stands for the call of one stack of blocks: replays training forwards, and passes everything else on."""

    def __init__(self, stack: Stack, report: CaptureReport) -> None:
        self.stack, self.report = stack, report
        self._flight: weakref.ref[Flight] | None = None
        self._caches = "use_cache" in inspect.signature(stack.module.forward).parameters
        self._seen: Counter[Key] = Counter()
        self._graphs: dict[Key, Recorded | None] = {}  # None: cannot be recorded
        self._parameters = list(stack.module.parameters())
        self._tuner = next((part for part in stack.module.modules() if isinstance(part, BaseTunerLayer)), None)
        self._tensors: tuple[Any, ...] = ()
        lists = stack.context.lists.values() if stack.context is not None and several_ranks() else ()
        self._lists = [blocks for blocks in lists if blocks.owner is stack.module]
        self._prepared = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.stack.module.training and torch.is_grad_enabled()):
            return self.stack.module._call_impl(*args, **kwargs)
        kwargs.pop("num_items_in_batch", None)  # the loss reads it; here every number would be another shape
        if self._caches and kwargs.get("past_key_values") is None:
            kwargs["use_cache"] = False  # nobody generates here, and a graph gives no cache
        leaves, spec = tree_flatten((args, kwargs, self._told()))
        recorded = self._recorded(leaves, spec)
        if isinstance(recorded, str):
            self.report.others[recorded] += 1
            return self.stack.call(*args, **kwargs)
        self.report.replayed += 1
        output, flight = recorded.run(leaves)
        self._flight = weakref.ref(flight)
        for blocks in self._lists:
            blocks.after_replay()
        return output

    def _recorded(self, leaves: list[Any], spec: Any) -> Recorded | str:
        """The graphs of these inputs, or why there are none."""
        context, key = self.stack.context, _key(leaves, spec)
        if key is None:
            return "an argument is neither a tensor nor a plain value"
        if context is not None and (context.trace is not None or context.collector is not None):
            return "somebody looks at the routing"
        if self._lists and calls_of(self._lists[0].context) is None:
            return "ranks tell each other of a forward that nothing stands around"
        if context in running().knocked_out:
            return "experts are knocked out"
        self._forget_if_moved()
        if self._tuner is not None:  # others may be active, or none
            key = (*key, self._tuner.disable_adapters, tuple(self._tuner.active_adapters), bool(self._tuner.merged))
        if not self._prepared:
            self._prepared = True
            with suppress(RuntimeError):  # whatever it is, a real step will meet it again
                Recorded(self.stack, leaves, spec).prepare()
        self._seen[key] += 1
        if key not in self._graphs:
            if self._seen[key] <= WARM_UP:
                return "first batches of a shape"
            if len(self._graphs) >= MOST_GRAPHS:
                return "more shapes than graphs"
            self._graphs[key] = self._record(leaves, spec)
        flight = None if self._flight is None else self._flight()
        if flight is not None and not flight.landed:
            return "another forward waits for its backward"
        return self._graphs[key] or "cannot be captured"

    def _told(self) -> dict[str, Any]:
        """What the stack reads of the call around it."""
        call = None if self.stack.context is None else calls_of(self.stack.context)
        if call is None:
            return {}
        told = {name: getattr(call, name) for name in TOLD}
        return told | {"seeds": None if call.seeds is None else call.seeds.drawn()}

    def _forget_if_moved(self) -> None:
        found = tuple((parameter.data_ptr(), parameter.requires_grad) for parameter in self._parameters)
        if found != self._tensors:
            self._tensors = found
            self._graphs.clear()
            self._seen.clear()

    def _record(self, leaves: list[Any], spec: Any) -> Recorded | None:
        for own_leaves in (False, True):
            try:
                recorded = Recorded(self.stack, leaves, spec, own_leaves)
                recorded.record()
            except torch.OutOfMemoryError:
                shape = tuple(next(value.shape for value in leaves if isinstance(value, Tensor)))
                say(f"no memory to capture batches of shape {shape}, which run without: lower batch_size or max_length")
                return None
            except RuntimeError as error:
                while isinstance(error.__context__, RuntimeError):  # ending a recording that failed fails, too
                    error = error.__context__
                reason = str(error).splitlines()[0]
            else:
                self.report.graphs += 1
                return recorded
        say(f"a step cannot be captured and runs without: {reason}")
        return None


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
