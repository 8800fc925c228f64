"""Registration of the ops that torch.compile sees, so that a call costs the host little.

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

    The compiler decomposes it, with its gradient, before it compiles the graph, in which only the ops remain. It keeps
    results on disk by the name of what was traced, so the name holds the version of the package. Whoever changes the
    decomposition, or the arguments of the ops, between two versions must change the name.
    """
    name = f"{name}_{__version__.replace('.', '_')}"

    def register(function: Function) -> torch._ops.OpOverload:
        op = _defined(name, function)
        LIBRARY.impl(name, function, "CompositeImplicitAutograd")
        return op

    return register


def shapes_of(op: torch._ops.OpOverload) -> Callable[[Function], Function]:
    """Register what a compiler calls in place of the op: it gives tensors of the same shapes and dtypes, no values."""
    return torch.library.register_fake(op, lib=LIBRARY)


def _defined(
    name: str, function: Function, mutates: Sequence[str] = (), tags: Sequence[torch.Tag] = ()
) -> torch._ops.OpOverload:
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    return getattr(torch.ops.monkeyjump, name).default


def _counting_writes(op: torch._ops.OpOverload, function: Function) -> Function:
    """Wrap the function so that it tells autograd afterwards which tensors it has written."""
    arguments = op._schema.arguments
    places = [i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]

    def counting(*args: Any) -> Any:
        result = function(*args)
        for place in places:
            torch.autograd.graph.increment_version(args[place])
        return result

    return counting
