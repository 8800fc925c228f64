"""PEFT's own LoRA layers computed by our kernels, for as long as one asks; nothing of the model is replaced.

The parameters, their names, the configuration and what is saved stay PEFT's. Only the forward of each plain LoRA layer
is shadowed: y = W x + scale * B A dropout(x) in the dtype of the model, without PEFT's copies of x in fp32. Outputs
and gradients are PEFT's up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora import Linear
from torch import Tensor, nn

from monkeyjump.ops import dispatch


@contextmanager
def faster_lora(model: nn.Module) -> Iterator[int]:
    """Compute the LoRA layers of PEFT inside with our kernels; yields how many there are."""
    layers = [layer for layer in model.modules() if type(layer) is Linear and "forward" not in vars(layer)]
    for layer in layers:
        layer.forward = _Forward(layer)  # type: ignore[method-assign]
    try:
        yield len(layers)
    finally:
        for layer in layers:
            del layer.forward


class _Forward:
    """The forward of one layer: ours where it is plain LoRA with one active adapter, else PEFT's."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.layer
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        plain = len(names) == 1 and not (layer.disable_adapters or layer.merged or args or kwargs)
        if not plain or names[0] in layer.lora_variant or not dispatch.uses_kernels(x):
            return type(layer).forward(layer, x, *args, **kwargs)
        name = names[0]
        down, up = layer.lora_A[name], layer.lora_B[name]
        out = layer.base_layer(x)
        if up.bias is not None or out.dtype not in (x.dtype, dispatch.autocast_dtype(x)):
            return type(layer).forward(layer, x)
        from monkeyjump.ops.gated_lora import gated_lora

        drop = layer.lora_dropout[name]
        dropout = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
        return gated_lora(out, x.to(out.dtype), down.weight, up.weight, layer.scaling[name], dropout=dropout)


def has_plain_lora(model: nn.Module) -> bool:
    """Whether a model carries LoRA layers of PEFT."""
    return any(type(layer) is Linear for layer in model.modules())
