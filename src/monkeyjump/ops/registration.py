"""Registers the ops that torch.compile sees, so that a call costs the host little.

`torch.library.custom_op` puts Python around every call, for what a compiled graph has no use for: a gradient formula
that was taken apart when the graph was traced, a search for outputs that are inputs, a switch between implementations.
Here the dispatcher calls the function itself. What the wrapper looked after is then up to the functions: none returns
an input or a view of one, and those that are not composed are called where no gradient is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monkeyjump import __version__

LIBRARY = torch.library.Library("monkeyjump", "FRAGMENT")
Function = Callable[..., Any]


def registered(
    name: str, mutates: Sequence[str] = (), tags: Sequence[torch.Tag] = ()
) -> Callable[[Function], torch._ops.OpOverload]:
    """Make a function one node of a compiled graph; `mutates`: its arguments that it writes into, all lists."""

    def register(function: Function) -> torch._ops.OpOverload:
        op = _defined(name, function, mutates, tags)
        LIBRARY.impl(name, _counting_writes(op, function) if mutates else function, "CompositeExplicitAutograd")
        return op

    return register


def composed(name: str) -> Callable[[Function], torch._ops.OpOverload]:
    """Make a function of autograd functions and registered ops one node where a model is traced.

    It is taken apart with its gradient before the graph is compiled, which is left with the ops alone. The compiler
    keeps its results on disk by the name of what was traced. So the name has the version of the package; who takes it
    apart in another way between two versions, or changes the arguments of the ops, gives it another name.
    """
    name = f"{name}_{__version__.replace('.', '_')}"

    def register(function: Function) -> torch._ops.OpOverload:
        op = _defined(name, function)
        LIBRARY.impl(name, function, "CompositeImplicitAutograd")
        return op

    return register


def shapes_of(op: torch._ops.OpOverload) -> Callable[[Function], Function]:
    """What a compiler calls in place of the op: the same shapes and dtypes, no values."""
    return torch.library.register_fake(op, lib=LIBRARY)


def _defined(
    name: str, function: Function, mutates: Sequence[str] = (), tags: Sequence[torch.Tag] = ()
) -> torch._ops.OpOverload:
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    return getattr(torch.ops.monkeyjump, name).default


def _counting_writes(op: torch._ops.OpOverload, function: Function) -> Function:
    """The function, which afterwards tells autograd that the tensors it has written hold other values."""
    arguments = op._schema.arguments
    places = [i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]

    def counting(*args: Any) -> Any:
        result = function(*args)
        for place in places:
            torch.autograd.graph.increment_version(args[place])
        return result

    return counting
