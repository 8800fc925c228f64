"""Hooks on the whole model: they open the call of a forward, take the arguments for routing, and add router losses.

Routing state is three kinds of plain objects on hooks (bound methods, so that a deep copy routes with its own centres):
`RoutingContext`, one per base model; `BlockList`, one per list of blocks; `BlockRouter`, one per block. None of them
holds anything of one forward (`call.py` does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from monkeyjump.routing.granularity import IGNORE, KINDS
from monkeyjump.tuner.block_list import BlockList
from monkeyjump.tuner.call import Generation, ModelCall, belonging_to, calls_of, running
from monkeyjump.tuner.fast.shared_inputs import SharedInputs
from monkeyjump.tuner.placement import Block
from monkeyjump.tuner.routers.base import BlockRouter
from monkeyjump.tuner.training.regularizer import auxiliary_loss
from monkeyjump.tuner.training.router_losses import CarriedLoss, RouterLosses

if TYPE_CHECKING:
    from monkeyjump.tuner.centers.sample import TokenCollector
    from monkeyjump.tuner.mixed_batch import RowAdapters
    from monkeyjump.tuner.trace import RoutingTrace


class RoutingContext:
    """The routing of one base model: its lists of blocks, and what is known of it beside any one forward."""

    def __init__(self, model: nn.Module) -> None:
        self.losses = RouterLosses()
        self.accumulation = 1  # micro-batches per optimiser step, set by a trainer that computes its own loss
        self.regularized = False  # whether some adapter has a loss of its own
        self.regularizer_due = False  # whether a training forward could not add it
        self.replays = False  # whether training forwards of blocks may be replayed, of which the host hears nothing
        self.watches_load = False  # whether somebody will ask for the load of the next training forward
        self.trace: RoutingTrace | None = None
        self.collector: TokenCollector | None = None
        self.lists: dict[str, BlockList] = {}
        self.shared_inputs = SharedInputs()
        config = getattr(model, "config", None)
        can_generate = getattr(model, "can_generate", None)
        self.encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.causal = can_generate is not None and can_generate() and not self.encoder_decoder
        # the ids that stand for parts of pictures and clips, each with the place of its kind in KINDS
        found = [(place, getattr(config, f"{kind}_token_id", None)) for place, kind in enumerate(KINDS)]
        self.kind_ids = [(place, token) for place, token in found[1:] if isinstance(token, int)]
        self.base = model
        self.outermost = model  # with PEFT's wrapper, where there is one
        self._users_generate: Callable[..., Any] | None = vars(model).get("generate")
        if can_generate is not None and can_generate():
            # `generate` has no hooks, and only it knows where the prompt ends and takes `task_ids`. It is shadowed on
            # the instance, so that every way to it (PEFT's wrappers, a model with native adapters) passes here.
            model.generate = self.generate  # type: ignore[assignment]
        self._handles = [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, with_kwargs=True),
            model.register_forward_hook(self.leave, always_call=True),
        ]

    def router(self, model: nn.Module, block: Block, kind: type[BlockRouter]) -> BlockRouter:
        """The router of this kind for a block; it is made and hooked in when it is first asked for."""
        blocks = self.block_list(model, block.owner)
        key = f"{block.path}:{kind.__name__}"
        if key not in blocks.routers:
            blocks.routers[key] = kind(blocks, block, model.get_submodule(block.path))
        return blocks.routers[key]

    def block_list(self, model: nn.Module, owner: str) -> BlockList:
        """The blocks that the module `owner` runs; they are hooked when they are first asked for."""
        if owner not in self.lists:
            self.lists[owner] = BlockList(self, model.get_submodule(owner), owner)
        return self.lists[owner]

    def routers(self) -> Iterator[BlockRouter]:
        for blocks in self.lists.values():
            yield from blocks.routers.values()

    def remove(self) -> None:
        """Take every hook off the model."""
        if vars(self.base).get("generate") == self.generate:
            del self.base.generate
            if self._users_generate is not None:
                self.base.generate = self._users_generate  # type: ignore[assignment]
        holders: list[RoutingContext | BlockRouter] = [self, *self.routers()]
        for holder in holders:
            for handle in holder._handles:
                handle.remove()
            holder._handles = []
        for blocks in self.lists.values():
            blocks.remove()
        self.lists = {}

    def adopt(self, peft_model: nn.Module) -> None:
        """PEFT's causal-LM wrapper drops `task_ids` for methods it does not know: take them before it does."""
        self.outermost = peft_model
        self._handles += [
            peft_model.register_forward_pre_hook(self.before_wrapper, with_kwargs=True),
            peft_model.register_forward_hook(self.leave_wrapper, always_call=True),
        ]

    def open(self, wrapped: bool = False) -> ModelCall:
        """Open a call of this model, and forget one that an interrupted forward has left."""
        here = running()
        around, generation = here.call, here.generation
        call = ModelCall(self, generation=generation, wrapped=wrapped, knocked_out=here.knocked_out.get(self))
        call.row_adapters = here.row_adapters.get(self)
        if generation is not None:
            call.task_ids, call.prompt_lengths = generation.task_ids, generation.prompt_lengths
        call.outer = None if around is None or around.context is self else around
        here.call, here.blocks = call, None
        return call

    def close(self, call: ModelCall) -> None:
        running().call = call.outer

    def before_wrapper(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, _take_extras(self.open(wrapped=True), kwargs)

    def leave_wrapper(self, module: nn.Module, args: tuple, output: Any) -> None:
        call = calls_of(self)
        if call is not None:
            self.close(call)

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        call = calls_of(self)
        if call is None or not call.wrapped or call.entered:
            call = self.open()
        call.entered = True
        # PEFT names them inside its wrapper, which opened the call
        call.row_adapters = running().row_adapters.get(self)
        if call.row_adapters is not None and call.generation is None:
            _check_rows(call.row_adapters, args, kwargs)
        call.labels = kwargs.get("labels")
        if self.kind_ids:
            call.token_ids = kwargs.get("input_ids", args[0] if args else None)
        if module.training and torch.is_grad_enabled():
            self.losses.clear()
            self.shared_inputs.draw_seeds(call)
        return args, _take_extras(call, kwargs)

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Add the auxiliary losses. This runs only after a forward that finished."""
        call = calls_of(self)
        if call is not None and module.training and torch.is_grad_enabled():
            output = self._with_auxiliary_loss(module, call.labels, kwargs, output)
        return output

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """End the call. This also runs after a forward that raised."""
        call = calls_of(self)
        if call is not None and not call.wrapped:
            self.close(call)

    def regularizer(self, model: nn.Module) -> Tensor | None:
        """The adapters' losses on their own tensors, if they have any."""
        return auxiliary_loss(model) if self.regularized else None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` of the base model, and note the end of its prompt, from which sequence routing decides."""
        inputs = [*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
        width = next((tensor.shape[1] for tensor in inputs if isinstance(tensor, Tensor)), None)
        if (rows := running().row_adapters.get(self)) is not None:
            _check_rows(rows, args, kwargs)
        generation = Generation(
            None if self.encoder_decoder else width, kwargs.pop("task_ids", None), kwargs.pop("prompt_lengths", None)
        )
        with self.generating(generation):
            if self._users_generate is not None:
                return self._users_generate(*args, **kwargs)
            return type(self.base).generate(self.base, *args, **kwargs)  # type: ignore[attr-defined]

    @contextmanager
    def generating(self, generation: Generation) -> Iterator[None]:
        """Every forward that this thread runs inside the `with` belongs to one generation."""
        self.shared_inputs.prepare()  # Transformers may compile the decoding step
        try:
            with belonging_to(generation):
                yield
        finally:
            self.shared_inputs.release()  # weights may now be merged or moved, which compiled code does not notice

    def _with_auxiliary_loss(
        self, module: nn.Module, labels: Tensor | None, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Add the losses of routers and the adapters' own regularisers to the loss the model returns."""
        routing = self.losses.take()
        if not self.regularized and routing is None:
            return output
        as_tuple = isinstance(output, tuple)
        first = output[0] if as_tuple and labels is not None and output else None
        loss = first if as_tuple else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or hasattr(output, "log_probs"):
            # The trainer makes the loss itself, from logits or (TRL) log-probabilities: the callback adds this there.
            self.regularizer_due = self.regularized
            return output if routing is None else _carrying(output, routing / self.accumulation)
        extra = self.regularizer(module)
        if routing is not None:
            extra = routing.to(loss.device) if extra is None else extra + routing.to(extra.device)
        if extra is None:
            return output
        items = kwargs.get("num_items_in_batch")
        if items is not None and labels is not None:
            # The loss is a share of an accumulated batch; so must this be, or it grows with the accumulation steps.
            extra = extra * ((labels[..., 1:] != IGNORE).sum() / items)
        if as_tuple:
            return (loss + extra, *output[1:])
        output.loss = loss + extra
        return output


def _check_rows(rows: RowAdapters, args: tuple, kwargs: dict[str, Any]) -> None:
    """Compare the adapters of the rows with the rows that the model, or `generate`, was called with."""
    named = (kwargs.get(name) for name in ("input_ids", "inputs_embeds", "inputs", "input_features"))
    given = (*args[:1], *named, *kwargs.values())
    tensor = next((value for value in given if isinstance(value, Tensor) and value.dim()), None)
    if tensor is not None:
        rows.check_rows(tensor.shape[0])


def _take_extras(call: ModelCall, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Move the arguments that only routing reads into the call, and return the others."""
    if "task_ids" in kwargs or "prompt_lengths" in kwargs:
        kwargs = dict(kwargs)
        call.task_ids = kwargs.pop("task_ids", call.task_ids)
        call.prompt_lengths = kwargs.pop("prompt_lengths", call.prompt_lengths)
    return kwargs


def _carrying(output: Any, loss: Tensor) -> Any:
    """Attach `loss` to the scores of the output: a loss that is computed from them then trains it too, at weight 1."""
    if isinstance(output, tuple):
        return (CarriedLoss.apply(output[0], loss), *output[1:]) if output else output
    for name in ("log_probs", "logits", "last_hidden_state"):
        scores = getattr(output, name, None)
        if isinstance(scores, Tensor) and scores.requires_grad:
            setattr(output, name, CarriedLoss.apply(scores, loss))
            break
    return output
