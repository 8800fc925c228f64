"""PEFT's own LoRA layers computed by our kernels, for as long as one asks.

The parameters, their names, the configuration and what is saved stay PEFT's. Only the forward of each plain LoRA layer
is another: y = W x + scale * B A dropout(x) in the dtype of the model, without PEFT's copies of x in fp32. Outputs and
gradients are PEFT's up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora import Linear
from torch import Tensor, nn

from monkeyjump.ops import dispatch
from monkeyjump.ops.lowrank import new_seed

SEEDS = "seeds_of_recording"  # of a layer: what its dropout was drawn by, for a block that is computed again


class FasterLinear(Linear):
    """Ours where it is plain LoRA with one active adapter, else PEFT's."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        plain = len(names) == 1 and not (layer.disable_adapters or layer.merged or args or kwargs)
        if not plain or names[0] in layer.lora_variant or not dispatch.uses_kernels(x):
            return super().forward(x, *args, **kwargs)
        down, up, drop = layer.lora_A[names[0]], layer.lora_B[names[0]], layer.lora_dropout[names[0]]
        out = layer.base_layer(x)
        if up.bias is not None or out.dtype not in (x.dtype, dispatch.autocast_dtype(x)):
            return super().forward(x)
        from monkeyjump.ops.gated_lora import gated_lora

        dropout, seed = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0, None
        seeds = vars(self).get(SEEDS)
        if dropout and seeds is not None:
            seed = seeds.get(names[0])
            if seed is None:
                seed = seeds[names[0]] = new_seed(x.device)
        scale = layer.scaling[names[0]]
        return gated_lora(out, x.to(out.dtype), down.weight, up.weight, scale, dropout=dropout, seed=seed)


@contextmanager
def faster_lora(model: nn.Module) -> Iterator[None]:
    """Compute the LoRA layers of PEFT inside with our kernels.

    Their class is another inside: a compiler looks at the class, and one graph serves all blocks.
    """
    layers = [layer for layer in model.modules() if type(layer) is Linear]
    for layer in layers:
        layer.__class__ = FasterLinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = Linear
