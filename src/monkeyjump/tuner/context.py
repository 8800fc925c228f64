"""What only the top of the model is told: labels, task ids, the start of a generation.

Routing state is three kinds of plain objects on hooks (bound methods, so that a deep copy routes with its own centres):
`RoutingContext`, one per base model; `BlockGroup`, one per list of blocks; `BlockRouter`, one per block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from monkeyjump.routing.granularity import IGNORE
from monkeyjump.tuner.training.regularizer import auxiliary_loss
from monkeyjump.tuner.routers.centroid import BlockRouter
from monkeyjump.tuner.block_list import BlockGroup
from monkeyjump.tuner.joint import JointRegularizer
from monkeyjump.tuner.training.router_losses import CarriedLoss, RouterLosses
from monkeyjump.tuner.placement import Block
from monkeyjump.tuner.sharing import Sharing

if TYPE_CHECKING:
    from monkeyjump.tuner.centers.sample import TokenCollector
    from monkeyjump.tuner.trace import RoutingTrace


class RoutingContext:
    """What the top of the model knows about the current call."""

    def __init__(self, model: nn.Module) -> None:
        self.labels: torch.Tensor | None = None
        self.task_ids: torch.Tensor | None = None
        self.prompt_lengths: torch.Tensor | None = None
        self.generated_from: int | None = None
        self.generation = 0
        self.in_generation = False
        self.losses = RouterLosses()
        self.accumulation = 1  # micro-batches per optimiser step, where a trainer that makes its own loss tells
        self.regularized = False  # whether some adapter has a loss of its own
        self.joint: JointRegularizer | None = None  # that loss in one node with its tensors, during a training forward
        self.regularizer_due = False  # whether a training forward could not add it
        self.trace: RoutingTrace | None = None
        self.collector: TokenCollector | None = None
        self.groups: dict[str, BlockGroup] = {}
        self.sharing = Sharing()  # projections that may read the same tensor
        config = getattr(model, "config", None)
        can_generate = getattr(model, "can_generate", None)
        self.encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.causal = can_generate is not None and can_generate() and not self.encoder_decoder
        self._model = model
        self.outermost = model  # with PEFT's wrapper, where there is one
        if can_generate is not None and can_generate():
            # `generate` has no hooks, and only it knows where the prompt ends and takes `task_ids`. Shadowed on the
            # instance, so that every way there (PEFT's wrappers, a model with native adapters) passes through.
            model.generate = self.generate  # type: ignore[assignment]
        self._handles = [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            # also after a failed forward, whose labels and task ids must not reach the next
            model.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]

    def router(self, model: nn.Module, block: Block, kind: type[BlockRouter] = BlockRouter) -> BlockRouter:
        """The router of a block, one of each kind, made and hooked in at the first asking."""
        if block.owner not in self.groups:
            self.groups[block.owner] = BlockGroup(self, model.get_submodule(block.owner))
        group = self.groups[block.owner]
        key = block.path if kind is BlockRouter else f"{block.path}:{kind.__name__}"
        if key not in group.routers:
            group.routers[key] = kind(group, block, model.get_submodule(block.path))
        return group.routers[key]

    def routers(self) -> Iterator[BlockRouter]:
        for group in self.groups.values():
            yield from group.routers.values()

    def remove(self) -> None:
        """Take every hook off the model."""
        vars(self._model).pop("generate", None)
        holders: list[RoutingContext | BlockGroup | BlockRouter] = [self, *self.groups.values(), *self.routers()]
        for holder in holders:
            for handle in holder._handles:
                handle.remove()
            holder._handles = []
        self.groups = {}

    def adopt(self, peft_model: nn.Module) -> None:
        """PEFT's causal-LM wrapper drops `task_ids` for methods it does not know: take them before it does."""
        self.outermost = peft_model
        self._handles.append(peft_model.register_forward_pre_hook(self.before_wrapper, with_kwargs=True))

    def before_wrapper(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, self._take_extras(kwargs)

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self.labels = kwargs.get("labels")
        if module.training and torch.is_grad_enabled():
            self.losses.clear()
            if self.regularized and self.labels is not None:
                self.join_regularizer(module)
        return args, self._take_extras(kwargs)

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            output = self._with_auxiliary_loss(module, kwargs, output)
        self.release_regularizer()
        self.labels = None
        self.sharing.end()
        if not self.in_generation:
            self.task_ids = self.prompt_lengths = None
        return output

    def join_regularizer(self, model: nn.Module) -> None:
        """For one forward: adapters read their tensors from the node that also has their regulariser."""
        self.release_regularizer()
        self.joint = JointRegularizer.of(model)

    def regularizer(self, model: nn.Module) -> torch.Tensor | None:
        """The adapters' losses on their own tensors, if they have any."""
        if self.joint is not None:
            return self.joint.loss
        return auxiliary_loss(model) if self.regularized else None

    def release_regularizer(self) -> None:
        if self.joint is not None:
            self.joint.release()
            self.joint = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the base model; the end of its prompt is what sequence routing decides from."""
        inputs = [*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
        width = next((tensor.shape[1] for tensor in inputs if isinstance(tensor, torch.Tensor)), None)
        if self.encoder_decoder:
            width = None
        extras = kwargs.pop("task_ids", None), kwargs.pop("prompt_lengths", None)
        with self.generating(width, *extras):
            return type(self._model).generate(self._model, *args, **kwargs)  # type: ignore[attr-defined]

    @contextmanager
    def generating(
        self, prompt_width: int | None, task_ids: torch.Tensor | None, prompt_lengths: torch.Tensor | None
    ) -> Iterator[None]:
        """Every forward inside belongs to one generation from a prompt of this (padded) width."""
        self.generation += 1
        self.in_generation = True
        self.generated_from, self.task_ids, self.prompt_lengths = prompt_width, task_ids, prompt_lengths
        before = self.sharing.prepared
        self.sharing.prepare()  # Transformers may compile the decoding step
        try:
            yield
        finally:
            if not before:  # weights may now be merged or moved, and a compiler does not look
                self.sharing.release()
            self.in_generation = False
            self.generated_from = self.task_ids = self.prompt_lengths = None

    def _take_extras(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if "task_ids" in kwargs or "prompt_lengths" in kwargs:
            kwargs = dict(kwargs)
            self.task_ids = kwargs.pop("task_ids", self.task_ids)
            self.prompt_lengths = kwargs.pop("prompt_lengths", self.prompt_lengths)
        return kwargs

    def _with_auxiliary_loss(self, module: nn.Module, kwargs: dict[str, Any], output: Any) -> Any:
        """Add the losses of routers and the adapters' own regularisers to the loss the model returns."""
        routing = self.losses.take()
        if not self.regularized and routing is None:
            return output
        as_tuple = isinstance(output, tuple)
        loss = (
            (output[0] if self.labels is not None and output else None) if as_tuple else getattr(output, "loss", None)
        )
        if not isinstance(loss, torch.Tensor) or hasattr(output, "log_probs"):
            # The trainer makes the loss itself, from logits or (TRL) log-probabilities: the callback adds this there.
            self.regularizer_due = self.regularized
            return output if routing is None else _carrying(output, routing / self.accumulation)
        extra = self.regularizer(module)
        if routing is not None:
            extra = routing.to(loss.device) if extra is None else extra + routing.to(extra.device)
        if extra is None:
            return output
        items = kwargs.get("num_items_in_batch")
        if items is not None and self.labels is not None:
            # The loss is a share of an accumulated batch; so must this be, or it grows with the accumulation steps.
            extra = extra * ((self.labels[..., 1:] != IGNORE).sum() / items)
        if as_tuple:
            return (loss + extra, *output[1:])
        output.loss = loss + extra
        return output


def _carrying(output: Any, loss: torch.Tensor) -> Any:
    """The output with `loss` behind its scores: whoever makes a loss from them also trains this one, at weight 1."""
    if isinstance(output, tuple):
        return (CarriedLoss.apply(output[0], loss), *output[1:]) if output else output
    for name in ("log_probs", "logits", "last_hidden_state"):
        scores = getattr(output, name, None)
        if isinstance(scores, torch.Tensor) and scores.requires_grad:
            setattr(output, name, CarriedLoss.apply(scores, loss))
            break
    return output
