"""The base class of adapters: small modules that add their part to the output of one frozen linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_options import ADAPTER_OPTIONS
from monkeyjump.config_rules import value_problems
from monkeyjump.ops.precision import Fp32Module
from monkeyjump.registry import ADAPTERS as ALL_ADAPTERS
from monkeyjump.registry import Registry, did_you_mean

AdapterClass = TypeVar("AdapterClass", bound="Adapter")

# Gates reach an adapter as None (always on) or as a tensor that broadcasts against [..., 1].
Gate = Tensor | None


def fits_tokens(gate: Gate, x: Tensor) -> bool:
    """Whether every row of the gate is for one token of x [..., D], or for all tokens of one sequence."""
    return gate is None or (
        gate.dim() == x.dim() and gate.shape[0] == x.shape[0] and gate.shape[-2] in (1, x.shape[-2])
    )


class BaseLinear(Protocol):
    """The frozen linear under an adapter, as far as an adapter may know it; quantised weights come dequantised."""

    path: str  # where the linear is in the model, e.g. "model.layers.0.mlp.down_proj"
    in_features: int
    out_features: int

    def weight(self) -> Tensor:
        """[O, D], detached, in the dtype it has or is dequantised to."""

    def bias(self) -> Tensor | None:
        """[O], detached."""


class Adapter(Fp32Module):
    """The delta of one expert on one projection.

    A subclass creates its tensors in `__init__` (fp32; a frozen one as a persistent buffer) and fills them in
    `reset_parameters` so that the delta is zero: every adapter starts as the identity. One that needs more of the
    linear than its widths (its weight, its place in the model) overrides `for_linear`.
    """

    name: ClassVar[str]
    # makes one adapter of N experts of this kind on one linear, from the linear, the config and N; its gate is [..., N]
    mixture: ClassVar[Callable[[BaseLinear, MonkeyJumpConfig, int], Adapter] | None] = None
    by_token: ClassVar[bool] = False  # whether it adds another weight for every token, so that there is none to merge
    # settings of its own, set by config.adapter_options: a default, or a `setting` with its help and its rule
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    @classmethod
    def for_linear(cls, linear: BaseLinear, config: MonkeyJumpConfig) -> Self:
        """The adapter of one linear of a model."""
        return cls(linear.in_features, linear.out_features, config)

    @classmethod
    def default(cls, name: str) -> Any:
        """The default of a setting, which `options` holds by itself or with its help and its rule."""
        value = cls.options[name]
        return value.default if isinstance(value, Field) else value

    @classmethod
    def option(cls, name: str, config: MonkeyJumpConfig) -> Any:
        """A setting of this adapter: what `config.adapter_options` says, else the default."""
        given = config.adapter_options if config.adapter == cls.name else None
        return (given or {}).get(name, cls.default(name))

    @classmethod
    def option_problems(cls, options: dict[str, Any]) -> list[str]:
        """What is wrong with these `adapter_options`; a subclass adds checks that its `options` hold no rule for."""
        known = {name: value for name, value in cls.options.items() if isinstance(value, Field)}
        found = value_problems({name: value for name, value in options.items() if name in known}, known)
        for name in options:
            if name not in cls.options:
                fix = f"use adapter={ADAPTER_OPTIONS[name]!r}, or drop it" if name in ADAPTER_OPTIONS else "drop it"
                found.append(
                    f"adapter_options names {name!r}, which adapter {cls.name!r} does not have (its settings are "
                    f"{', '.join(cls.options) or '(none)'}): {fix}.{did_you_mean(str(name), list(cls.options))}"
                )
        return found

    @classmethod
    def config_problems(cls, config: MonkeyJumpConfig) -> list[str]:
        """What is wrong with a configuration that has this adapter and options for it."""
        return cls.option_problems(config.adapter_options or {})

    def reset_parameters(self) -> None:
        raise NotImplementedError

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        """What to add to `base`, the frozen output for input `x`, in the dtype of the computation."""
        raise NotImplementedError

    def forward(self, x: Tensor, base: Tensor, out: Tensor, gate: Gate) -> Tensor:
        """`out` (the base output plus earlier adapters) with this adapter's part added, in the dtype of `out`."""
        return out + self.delta(x, base, gate).to(out.dtype)

    def merged(self, weight: Tensor, bias: Tensor | None, sign: int) -> tuple[Tensor, Tensor | None]:
        """The base's `weight` [O, D] and `bias`, at least fp32, with the adapter added (sign +1) or taken out (-1)."""
        raise NotImplementedError

    def auxiliary_loss(self) -> Tensor | None:
        """A regulariser on this adapter's own tensors, or None; the loss has the mean, times an `orth_reg_weight`."""
        return None

    @classmethod
    def auxiliary_total(cls, adapters: Sequence[Self]) -> tuple[Tensor, int] | None:
        """The sum of the regularisers of adapters of this kind on one device, and how many have one; None if none has.

        An override may take fewer operations than one adapter after the other.
        """
        losses = [loss for adapter in adapters if (loss := adapter.auxiliary_loss()) is not None]
        return (torch.stack(losses).sum(), len(losses)) if losses else None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


ADAPTERS: Registry[type[Adapter]] = ALL_ADAPTERS


def register(cls: type[AdapterClass]) -> type[AdapterClass]:
    """Make an adapter known under its `name`: a class decorator, for the library's own adapters and for yours."""
    ADAPTERS.add(cls.name, cls)
    return cls
