"""The frozen weights of projections that share an input, side by side in memory: one product instead of several.

Each linear keeps its weight under its name; the weight becomes a part of the common one, so nothing is held twice.
Whoever replaces a weight afterwards (a move to another device, a merge) takes it out again, which is noticed.

Shapes: D input width, O output width of one projection.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from monkeyjump.ops.lowrank import Frozen


class PackedWeights:
    """The common weight [sum of O, D] and bias [sum of O] of some linears."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        weight = _joined([linear.weight for linear in linears])
        bias = None if linears[0].bias is None else _joined([linear.bias for linear in linears])
        self.frozen = Frozen([weight], [bias])

    @staticmethod
    def possible(linears: Sequence[nn.Linear]) -> bool:
        """Whether the tensors are plain, alike, frozen, and alone in their memory, or there one after another already.

        They are so where an adapter was taken off and another put on.
        """
        weights: list[Any] = [linear.weight for linear in linears]
        biases: list[Any] = [linear.bias for linear in linears if linear.bias is not None]
        kinds = {(weight.dtype, weight.device, weight.shape[1]) for weight in weights}
        kinds |= {(bias.dtype, bias.device, weights[0].shape[1]) for bias in biases}
        alike = len(kinds) == 1 and len(biases) in (0, len(linears)) and all(map(_plain, [*weights, *biases]))
        return alike and all(_adjacent(tensors) or all(map(_alone, tensors)) for tensors in (weights, biases))

    def intact(self) -> bool:
        """Whether every linear still has its part of the common weight and bias."""
        frozen = self.frozen
        return _lies_in(frozen.weights[0], [linear.weight for linear in self.linears]) and (
            frozen.biases[0] is None or _lies_in(frozen.biases[0], [linear.bias for linear in self.linears])
        )


def managed(model: nn.Module) -> bool:
    """Whether something gathers the weights for a call and frees them after it: FSDP, ZeRO-3.

    A packed weight would stay behind, whole, on every rank.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who shards has imported it
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    sharded = any(isinstance(module, kinds) for module in model.modules())
    return sharded or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _plain(tensor: Tensor) -> bool:
    plain = type(tensor) is nn.Parameter and not tensor.requires_grad and tensor.is_contiguous()
    return plain and not tensor.is_meta


def _alone(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of one memory follow each other without a gap."""
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) != 1:
        return False
    return _lies_in(tensors[0], tensors)


@torch.no_grad()
def _joined(tensors: Sequence[Any]) -> Tensor:
    if _adjacent(tensors):
        shape = (sum(map(len, tensors)), *tensors[0].shape[1:])
        return tensors[0].data.as_strided(shape, tensors[0].stride())
    joined = torch.cat([tensor.data for tensor in tensors])
    for tensor, part in zip(tensors, joined.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = part
    return joined


def _lies_in(joined: Tensor, parts: Sequence[Any]) -> bool:
    start = joined.data_ptr()
    for part in parts:
        if part.data_ptr() != start or part.dtype != joined.dtype:
            return False
        start += part.numel() * part.element_size()
    return True
