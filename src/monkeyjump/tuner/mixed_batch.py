"""Batches whose rows belong to different adapters: the argument `adapter_names` of PEFT, for inference.

A row's adapter is a fact of one call, so it is in the call and not on the model: two threads may run different mixtures
at once. Routers make the gates of every adapter that some row has, and a projection computes each adapter for its own
rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.tuner.call import calls_of, running
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.module_paths import outside_language

if TYPE_CHECKING:
    from monkeyjump.tuner.context import RoutingContext

BASE = "__base__"  # PEFT's name for a row without an adapter


class RowAdapters:
    """The adapter of each row of a batch."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.used = [name for name in dict.fromkeys(names) if name != BASE]
        self.mixed = len(set(names)) > 1
        self._positions: dict[tuple[str, int, torch.device], Tensor] = {}

    def check_rows(self, rows: int) -> None:
        """Refuse a batch of another number of rows."""
        if rows != len(self.names):
            raise ConfigError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(self.names)} and {rows} respectively: give one per row of the input, before beams or returned "
                "sequences multiply them."
            )

    def positions(self, name: str, x: Tensor) -> Tensor:
        """Which rows of x [rows, ...] belong to this adapter. Beams, and flattened tokens, repeat every row."""
        key = name, x.shape[0], x.device
        if key not in self._positions:
            each = self.of_rows(x)
            own = [place for place, row_name in enumerate(each) if row_name == name]
            self._positions[key] = torch.tensor(own, dtype=torch.long, device=x.device)
        return self._positions[key]

    def of_rows(self, x: Tensor) -> list[str]:
        """The adapter of each row of x."""
        here, times = running(), x.shape[0] // len(self.names)
        flattened = x.dim() == 2 and x.is_floating_point()
        if flattened:
            whole = here.blocks is not None and x.shape[0] == here.blocks.shape[0] * here.blocks.shape[1]
        else:
            whole = here.generation is not None
        if x.shape[0] != times * len(self.names) or (times != 1 and not whole):
            raise ConfigError(
                f"a module of the model sees tokens of shape {tuple(x.shape[:-1])}, from which the rows of "
                f"adapter_names={list(self.names)} cannot be told apart: call the model once per adapter."
            )
        return [name for name in self.names for _ in range(times)]

    def chosen(self, name: str, changed: Tensor, x: Tensor) -> Tensor:
        """`changed` in the rows of this adapter, x in the others."""
        return changed if not self.mixed else x.index_copy(0, self.positions(name, x), changed[self.positions(name, x)])


def check(model: nn.Module, adapter_names: Any, language: str | None) -> RowAdapters:
    """The adapters of the rows, if this model can mix them now; every problem at once if not, in PEFT's words first."""
    if not isinstance(adapter_names, list | tuple) or not all(isinstance(name, str) for name in adapter_names):
        raise ConfigError(f"adapter_names={adapter_names!r} must be a list of adapter names, one per row of the batch.")
    layers = [module for module in model.modules() if isinstance(module, MonkeyJumpLayer)]
    known = {name for layer in layers for name in layer.monkeyjump_adapter}
    rows, problems = RowAdapters(adapter_names), []
    if model.training:
        problems.append("Cannot pass `adapter_names` when the model is in training mode. Call model.eval() first.")
    unknown = [name for name in rows.used if name not in known]
    if unknown:
        hint = did_you_mean(unknown[0], sorted(known))
        problems.append(
            f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}.{hint} There are "
            f"{', '.join(sorted(known))}, and {BASE!r} for a row without an adapter."
        )
    if any(layer.merged for layer in layers):
        problems.append(
            "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
        )
    if rows.mixed:
        problems += _unmixable(rows, layers, language)
    if problems:
        raise ConfigError(problems, title="adapter_names cannot be used")
    return rows


def _unmixable(rows: RowAdapters, layers: list[MonkeyJumpLayer], language: str | None) -> Iterator[str]:
    """Adapters whose rows cannot share a batch with those of another."""
    for name in rows.used:
        own = [layer for layer in layers if name in layer.monkeyjump_adapter]
        if any(outside_language(layer.path, language) for layer in own):
            yield (
                f"adapter {name!r} changes a tower whose tokens belong to no row of the batch: it cannot share a batch "
                "with others; call the model once per adapter."
            )
        if any(
            router.configs[name].placement == "ffn"
            for layer in own
            for router, _ in layer.routers.values()
            if name in router.configs
        ):
            yield (
                f"adapter {name!r} holds whole feed-forwards (placement='ffn'), which repeat the rows of the batch: it "
                "cannot share a batch with others; call the model once per adapter."
            )


@contextmanager
def mixing(context: RoutingContext, model: nn.Module, rows: RowAdapters) -> Iterator[None]:
    """Inside the `with`, the rows of the calls of this thread belong to these adapters."""
    here = running()
    before, here.row_adapters[context] = here.row_adapters.get(context), rows

    def tell(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Tell a module that was trained as a whole which copy each row of this thread's call uses."""
        call = calls_of(context)
        if not args or call is None or call.row_adapters is None or "adapter_names" in kwargs:
            return args, kwargs
        names = [name if name in module._adapters else BASE for name in call.row_adapters.of_rows(args[0])]
        return args, {**kwargs, "adapter_names": names}

    wrappers = [module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    handles = [wrapper.register_forward_pre_hook(tell, with_kwargs=True) for wrapper in wrappers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if before is None:
            del here.row_adapters[context]
        else:
            here.row_adapters[context] = before
