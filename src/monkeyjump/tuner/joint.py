"""The regulariser of all adapters and the tensors it reads, out of one node of the autograd graph.

A tensor with two readers, a projection and the regulariser, has two gradients, and autograd adds them with one kernel
per tensor: hundreds in a model. Here both readers read outputs of the same node, which gets all gradients at once and
adds them with a few kernels. To autograd nothing is special: `grad`, loss scales, accumulation and data-parallel
hooks see one gradient per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from monkeyjump.adapters import Adapter
from monkeyjump.tuner.training.regularizer import active_adapters, auxiliary_loss
from monkeyjump.tuner.inputs import recomputed

Place = tuple[Adapter, str]  # where a parameter hangs


class JointRegularizer:
    """Adapters read stand-ins of their parameters until `release`; `loss` is what `auxiliary_loss` would be."""

    def __init__(self, model: nn.Module, places: list[Place]) -> None:
        self.places = places
        parameters = [adapter._parameters[name] for adapter, name in places]

        def loss_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
            with _standing_in(places, tensors):
                return auxiliary_loss(model)

        loss, *self.tensors = _Joint.apply(loss_of, *parameters)
        self.loss: torch.Tensor = loss
        _stand_in(places, self.tensors)

    @classmethod
    def of(cls, model: nn.Module) -> JointRegularizer | None:
        """None where there is nothing to join, or the tensors are not simply there: sharded, offloaded, elsewhere."""
        if torch.compiler.is_compiling():
            return None  # a compiler that sees both readers adds where it has the gradient at hand
        if any(recomputed(module) for module in model.modules()):
            return (
                None  # the second forward of a compiled block would read the parameters: another graph than the first
            )
        adapters = [
            adapter
            for _, adapter in active_adapters(model)
            if type(adapter).auxiliary_loss is not Adapter.auxiliary_loss
        ]
        places = [
            (adapter, name)
            for adapter in adapters
            for name, parameter in adapter.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        parameters = [adapter._parameters[name] for adapter, name in places]
        plain = all(type(parameter) is nn.Parameter and not parameter.is_meta for parameter in parameters)
        if not plain or len({parameter.device for parameter in parameters if parameter is not None}) != 1:
            return None
        return None if any(name in vars(adapter) for adapter, name in places) else cls(model, places)

    def release(self) -> None:
        for (adapter, name), tensor in zip(self.places, self.tensors, strict=True):
            if vars(adapter).get(name) is tensor:
                del vars(adapter)[name]


def _stand_in(places: list[Place], tensors: Sequence[torch.Tensor]) -> None:
    """An attribute of the instance is found before a parameter of the same name, which stays where it is."""
    for (adapter, name), tensor in zip(places, tensors, strict=True):
        vars(adapter)[name] = tensor


@contextmanager
def _standing_in(places: list[Place], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    before = [vars(adapter).get(name) for adapter, name in places]
    _stand_in(places, tensors)
    try:
        yield
    finally:
        for (adapter, name), tensor in zip(places, before, strict=True):
            if tensor is None:
                vars(adapter).pop(name)
            else:
                vars(adapter)[name] = tensor


class _Joint(torch.autograd.Function):
    """(the loss, every parameter as it is). The gradients of the loss, as large as the adapters, wait for backward."""

    @staticmethod
    def forward(ctx, loss_of: Callable, *parameters: torch.Tensor):
        ctx.loss_of = loss_of
        ctx.set_materialize_grads(False)
        loss, slopes = _slopes(loss_of, parameters, differentiable=False)
        ctx.slopes = slopes
        ctx.save_for_backward(*parameters)
        return (loss.detach(), *(parameter.view_as(parameter) for parameter in parameters))

    @staticmethod
    def backward(ctx, scale, *gradients):
        if scale is None:
            return None, *gradients
        slopes = ctx.slopes
        if torch.is_grad_enabled():  # create_graph: the slopes as functions of the parameters
            _, slopes = _slopes(ctx.loss_of, ctx.saved_tensors, differentiable=True)
        own = [index for index, slope in enumerate(slopes) if slope is not None]
        scaled = torch._foreach_mul([slopes[index] for index in own], scale)
        both = [k for k, index in enumerate(own) if gradients[index] is not None]
        sums = torch._foreach_add([gradients[own[k]] for k in both], [scaled[k] for k in both]) if both else ()
        found = list(gradients)
        for k, index in enumerate(own):
            found[index] = scaled[k]
        for k, total in zip(both, sums, strict=True):
            found[own[k]] = total
        return None, *found


def _slopes(loss_of: Callable, parameters: Sequence[torch.Tensor], differentiable: bool):
    """The loss at the parameters and its gradient for each, None for one that it does not read."""
    with torch.enable_grad():
        leaves = parameters if differentiable else [parameter.detach().requires_grad_() for parameter in parameters]
        loss = loss_of(leaves)
        return loss, torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=differentiable)
