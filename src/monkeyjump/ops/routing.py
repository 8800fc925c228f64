"""Routing over the Triton kernels, in eager mode and under torch.compile: no gradient, no parameters.

Shapes: B batch, T tokens, D hidden width, E experts.
"""

from __future__ import annotations

import torch

from monkeyjump.ops import custom, reference
from monkeyjump.ops.gated_lora import CHOICE, thin_product
from monkeyjump.ops.kernels import route as kernels
from monkeyjump.ops.kernels.route import Routing, supported

__all__ = ["Routing", "route", "route_and_sum", "supported"]


def route(h: torch.Tensor, centers: list[torch.Tensor], routing: Routing) -> torch.Tensor:
    """Gates [B, T, E] of h [B, T, D], fp32."""
    flat = h.reshape(-1, h.shape[-1])
    if torch.compiler.is_compiling():
        return _thin_gates(h, centers, routing)[0]
    gates = kernels.route(flat, centers, routing)
    return gates.view(*h.shape[:-1], len(centers))


def route_and_sum(
    h: torch.Tensor, centers: list[torch.Tensor], queries: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates [B, T, E]; sums [E, D] and counts [E] of the queries ([B, T] bool; None: every token) by expert."""
    flat = h.reshape(-1, h.shape[-1])
    if torch.compiler.is_compiling() and CHOICE["route"] == "thin":
        return _thin(h, centers, queries, routing)
    if queries is not None:
        queries = queries.expand(h.shape[:-1]).reshape(-1)
    if torch.compiler.is_compiling():
        gates, sums, counts = custom.route_and_sum(
            flat, centers, queries, routing.top_k, routing.temperature, routing.renormalize, routing.member_k,
            routing.unit,
        )  # fmt: skip
    else:
        sums = torch.empty(len(centers), h.shape[-1], device=h.device)
        counts = torch.empty(len(centers), device=h.device)
        gates = kernels.route_and_sum(flat, centers, queries, routing, sums.unbind(), counts.unbind())
    return gates.view(*h.shape[:-1], len(centers)), sums, counts


def _thin_gates(h, centers, routing):
    wide = h.float()
    norm = wide.square().sum(-1, keepdim=True).sqrt().clamp_min(reference.EPS)
    units = torch.nn.functional.normalize(torch.stack(centers), dim=-1, eps=reference.EPS)
    logits = thin_product(wide, units) / norm
    return reference.gates(logits, routing.top_k, routing.temperature, routing.renormalize), logits, norm


def _thin(h, centers, queries, routing):
    gates, logits, norm = _thin_gates(h, centers, routing)
    weight = reference.top_k_mask(logits, routing.member_k).float()
    if queries is not None:
        weight = weight * queries.unsqueeze(-1)
    counts = weight.flatten(0, -2).sum(0)
    if routing.unit:
        weight = weight / norm
    flat = h.reshape(-1, h.shape[-1])
    if queries is not None:
        flat = flat.masked_fill(~queries.reshape(-1, 1), 0.0)
    sums = custom.lora_down_backward(flat, [weight.reshape(flat.shape[0], -1)], None, 0.0)
    return gates, sums, counts
