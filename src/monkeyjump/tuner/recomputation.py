"""Gradient checkpointing: a block that is computed again belongs to the forward that it was first computed in.

Between the two, other forwards may have moved the centres and brought other masks and task ids, and activations may
have been offloaded, so nothing about the second computation tells which forward it repeats. The checkpointed function
does: checkpointing keeps it until the backward. Whatever checkpoints a block (Transformers' `gradient_checkpointing`,
torch's `CheckpointWrapper`) is therefore given a function that takes the call along.

A block's routers are hooks on its call. Transformers up to 5.22 checkpoints the call, hooks included; since 5.23 its
layers checkpoint their forward, and the hooks stay outside. There the hooks of routers leave their work to the
checkpointed function, so that in every version gates are made inside of what is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from monkeyjump.errors import ConfigError
from monkeyjump.tuner.call import BlocksCall, ModelCall, in_backward, inside, running

if TYPE_CHECKING:
    from monkeyjump.tuner.routers.base import BlockRouter

# Attributes that hold a module's checkpoint function: of Transformers' blocks and models, of torch's CheckpointWrapper.
HOLDERS = ("_gradient_checkpointing_func", "checkpoint_fn")
CHECKPOINTS_FORWARD = "__call__" not in vars(GradientCheckpointingLayer)


class CarriesCall:
    """A checkpoint function that runs its block inside the same call both times, in the forward and in the backward."""

    def __init__(self, checkpoint: Callable[..., Any], routers: Sequence[BlockRouter] | None = None) -> None:
        self.checkpoint = checkpoint
        self.routers = routers  # of a block whose forward alone is checkpointed; None: its call is

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        here = running()
        if self.routers is not None:
            function = functools.partial(_routed, self.routers, function)
        if here.call is not None:
            function = functools.partial(_in_its_call, here.call, here.blocks, function)
        return self.checkpoint(function, *args, **kwargs)

    def with_options(self, **options: Any) -> CarriesCall:
        """The same with other options of the checkpoint function."""
        return CarriesCall(functools.partial(self.checkpoint, **options), self.routers)


def recomputes_forward(block: Any) -> bool:
    """Whether this block is about to checkpoint its forward without the hooks around it."""
    return (
        CHECKPOINTS_FORWARD
        and isinstance(block, GradientCheckpointingLayer)
        and block.gradient_checkpointing
        and block.training
        and isinstance(block._gradient_checkpointing_func, CarriesCall)
    )


def _routed(routers: Sequence[BlockRouter], forward: Any, *args: Any) -> Any:
    """The forward of a block and its routers; `forward` is the partial function that Transformers checkpoints."""
    block, kwargs = forward.args[0], forward.keywords
    compiled = getattr(block._compiled_call_impl, "routed_forward", routed_forward)
    return compiled(block, forward.func, routers, args, kwargs)


def routed_forward(
    block: nn.Module,
    forward: Callable[..., Any],
    routers: Sequence[BlockRouter],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """The forward of a block between the hooks of its routers."""
    for router in routers:
        changed = router.begin(block, args, kwargs)
        args, kwargs = (args, kwargs) if changed is None else changed
    output = forward(block, *args, **kwargs)
    for router in routers:
        router.end(block, args, output)
    return output


def _in_its_call(
    call: ModelCall, blocks: BlocksCall | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not in_backward():
        return function(*args, **kwargs)
    if blocks is not None and not blocks.gates_of and blocks.commits != blocks.blocks.schedule.commits:
        raise ConfigError(
            f"compiled blocks of {blocks.blocks.path!r} are recomputed after a later training forward has moved their "
            "centres: run each backward before the next forward, or leave out compiling or gradient checkpointing."
        )
    call.context.shared_inputs.hand_out(call)
    with inside(call, None if blocks is None else blocks.again()):
        return function(*args, **kwargs)


def carry_calls(modules: Iterable[nn.Module], routers: Iterable[BlockRouter]) -> None:
    """Wrap the checkpoint functions of these modules, if they have any. Every training forward does so again."""
    for module in modules:
        for name in HOLDERS:
            checkpoint = vars(module).get(name)
            if checkpoint is None:
                continue
            if not isinstance(checkpoint, CarriesCall):
                checkpoint = CarriesCall(checkpoint)
                setattr(module, name, checkpoint)
            if CHECKPOINTS_FORWARD and isinstance(module, GradientCheckpointingLayer):
                checkpoint.routers = [router for router in routers if router.module is module]


def forget_calls(modules: Iterable[nn.Module]) -> None:
    """Give the modules their own checkpoint functions back."""
    for module in modules:
        for name in HOLDERS:
            checkpoint = vars(module).get(name)
            if isinstance(checkpoint, CarriesCall):
                setattr(module, name, checkpoint.checkpoint)


def refuse_unknown_recomputation(path: str) -> None:
    """Refuse to run in a backward pass: nothing tells which forward a checkpoint repeats that was not wrapped."""
    if in_backward():
        raise ConfigError(
            f"{path!r} is computed again in a backward pass by a checkpoint() that the routing cannot follow: its "
            "centres, mask and task ids may no longer be those of the forward. Use "
            "model.gradient_checkpointing_enable(), or torch's checkpoint_wrapper on the blocks."
        )
