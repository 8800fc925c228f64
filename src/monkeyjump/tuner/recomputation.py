"""Gradient checkpointing: a block that is computed again belongs to the forward that it was first computed in.

Between the two, other forwards may have moved the centres and brought other masks and task ids, and activations may
have been offloaded, so nothing about the second computation tells which forward it repeats. The checkpointed function
does: checkpointing keeps it until the backward. Whatever checkpoints a block (Transformers' `gradient_checkpointing`,
torch's `CheckpointWrapper`) is therefore given a function that takes the call along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from monkeyjump.errors import ConfigError
from monkeyjump.tuner.call import BlocksCall, ModelCall, in_backward, inside, running

# Attributes that hold a module's checkpoint function: of Transformers' blocks and models, of torch's CheckpointWrapper.
HOLDERS = ("_gradient_checkpointing_func", "checkpoint_fn")


class CarriesCall:
    """A checkpoint function that runs its block inside the same call both times, in the forward and in the backward."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        here = running()
        if here.call is not None:
            function = functools.partial(_in_its_call, here.call, here.blocks, function)
        return self.checkpoint(function, *args, **kwargs)


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


def carry_calls(modules: Iterable[nn.Module]) -> None:
    """Wrap the checkpoint functions of these modules, if they have any. Every training forward does so again."""
    for module in modules:
        for name in HOLDERS:
            checkpoint = vars(module).get(name)
            if checkpoint is not None and not isinstance(checkpoint, CarriesCall):
                setattr(module, name, CarriesCall(checkpoint))


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
