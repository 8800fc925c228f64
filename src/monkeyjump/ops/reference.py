"""The torch definition of every op: the specification that faster kernels are tested against, and the fallback.

Shapes: B batch, T tokens, D hidden width, E routed experts, K top-k, R rank, O output width; `...`: any leading shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-12


def features(h: Tensor, mean: Tensor | None, normalize: bool) -> Tensor:
    """The token as the router sees it, fp32: h, less its share of the mean direction, on the unit sphere if asked.

    `mean` is the mean of the unit tokens. Subtracting it from directions, not from raw states, keeps the few attention
    sinks (norms a hundred times the rest) from being the mean.
    """
    u = h.float()
    if mean is not None:
        u = u - u.norm(dim=-1, keepdim=True) * mean
    if normalize:
        u = u / u.norm(dim=-1, keepdim=True).clamp_min(EPS)
    return u


def similarity_logits(u: Tensor, centers: Tensor, similarity: str) -> Tensor:
    """u [..., D] against centers [E, D] -> [..., E]; distances enter with a minus sign."""
    if similarity == "cosine":
        return F.normalize(u, dim=-1, eps=EPS) @ F.normalize(centers, dim=-1, eps=EPS).T
    if similarity == "dot":
        return u @ centers.T
    # The differences are [..., E, D]: E is at most a handful of projections. `cdist` would save that memory but its
    # matmul form loses the small distances that matter.
    difference = u.unsqueeze(-2) - centers
    if similarity == "euclidean":
        return -difference.square().sum(-1).sqrt()
    if similarity == "l1":
        return -difference.abs().sum(-1)
    raise ValueError(f"unknown similarity {similarity!r}")


def top_k_mask(logits: Tensor, k: int | None) -> Tensor:
    """True on the k (None: all) largest entries of the last dimension; ties go to the lower index, on every device."""
    E = logits.shape[-1]
    if k is None or k >= E:
        return torch.ones_like(logits, dtype=torch.bool)
    mine, other = logits.unsqueeze(-1), logits.unsqueeze(-2)
    earlier = torch.ones(E, E, dtype=torch.bool, device=logits.device).tril(-1)  # earlier[e, j]: j comes before e
    beaten_by = (other > mine) | ((other == mine) & earlier)
    return beaten_by.sum(-1) < k


def gates(logits: Tensor, k: int | None, temperature: float, renormalize: bool) -> Tensor:
    """softmax(logits / temperature) over all experts, kept on the top k and zero elsewhere."""
    p = torch.softmax(logits / temperature, dim=-1)
    m = p * top_k_mask(logits, k)
    if renormalize:
        m = m / m.sum(-1, keepdim=True).clamp_min(EPS)
    return m


def cluster_sums(u: Tensor, members: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum and number of the tokens of each expert: u [..., D], members [..., E] bool, queries [...] bool or None = all.

    A token that is no query contributes an exact zero, whatever it holds (padding may be NaN).
    """
    if queries is not None:
        u = u.masked_fill(~queries.unsqueeze(-1), 0.0)
        members = members & queries.unsqueeze(-1)
    weight_TE = members.reshape(-1, members.shape[-1]).float()
    return weight_TE.T @ u.reshape(-1, u.shape[-1]), weight_TE.sum(0)


def gated_lora(x: Tensor, A: Tensor, B: Tensor, gate: Tensor | float, dropout: float = 0.0) -> Tensor:
    """gate * B A dropout(x), computed in the dtype of x; the gate (any scale included) acts on the rank-R activation.

    x [..., D], A [R, D], B [O, R], gate a number, [..., 1] or [..., R].
    """
    z = F.linear(F.dropout(x, dropout) if dropout > 0 else x, A.to(x.dtype))
    return project_up(z, B, gate)


def project_up(z: Tensor, B: Tensor, gate: Tensor | float) -> Tensor:
    """B (gate * z): the product with an fp32 gate is rounded once, to the dtype of z."""
    return F.linear((z * gate).to(z.dtype), B.to(z.dtype))


def project_up_each(z: Tensor, B: Tensor, gates: Tensor) -> Tensor:
    """sum_g gates_g B_g z of G up-projections that share their z: z [..., R], B [O, G * R], gates [..., G] or [G]."""
    return F.linear((gates.unsqueeze(-1) * z.unsqueeze(-2)).flatten(-2).to(z.dtype), B.to(z.dtype))


def hashed_bits(count: int, seed: Tensor) -> Tensor:
    """`count` pseudo-random 32-bit numbers, entry i a pure function of (seed, i): the murmur3 finaliser.

    It uses integer arithmetic only, so it gives the same bits on every device, in every kernel and in every version.
    """
    low32 = 0xFFFFFFFF
    bits = torch.arange(count, device=seed.device, dtype=torch.int64)
    bits = (bits * 0x9E3779B1 + seed) & low32
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & low32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & low32
    return bits ^ (bits >> 16)


def hashed_uniform(shape: torch.Size, seed: Tensor) -> Tensor:
    """fp32 numbers in [-1, 1) from the upper 24 bits, which fp32 holds exactly; a longer first dimension only adds."""
    return ((hashed_bits(shape.numel(), seed) >> 8).float() * 2.0**-23 - 1).view(shape)


def row_norms(weight: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """||W|| and ||W + B A|| of each row, [O], in the dtype of A: W [O, D], A [..., R, D], B [..., O, R].

    From ||W||^2 + <2 W A^T + B A A^T, B>: the sum W + B A is not formed, and B = 0 gives the same number twice.
    """
    weight = weight.to(A.dtype)
    square = weight.square().sum(1)
    both = square + ((2 * (weight @ A.mT) + B @ (A @ A.mT)) * B).sum(-1)
    return square.sqrt(), both.clamp_min(0).sqrt()


def keep_mask(shape: torch.Size, seed: Tensor, dropout: float) -> Tensor:
    """A Bernoulli(1 - dropout) mask that a backward pass can make again from its seed instead of keeping it.

    It mixes once, where `hashed_bits` mixes twice: a mask is made anew in every pass over x, and on a GPU, counting
    instructions, the integer work of two rounds takes about as long as reading x.
    """
    low32 = 0xFFFFFFFF
    bits = torch.arange(shape.numel(), device=seed.device, dtype=torch.int64)
    # The seed comes before the factor: inductor would fold the factor into a 32-bit index expression.
    bits = ((bits + seed) * 0x9E3779B1) & low32
    # It is added again after the factor, or the masks of all seeds would be windows of one sequence.
    bits = (((bits ^ (bits >> 15)) + seed * 0xC2B2AE35) * 0x85EBCA6B) & low32
    return (bits >= int(dropout * 2**32)).view(shape)


class SeededDropoutLinear(torch.autograd.Function):
    """A dropout(x) for a frozen A. Backward keeps the seed, and neither x nor its mask, which is as large as x."""

    @staticmethod
    def forward(x: Tensor, A: Tensor, seed: Tensor, dropout: float) -> Tensor:
        kept = x * keep_mask(x.shape, seed, dropout)
        return F.linear(kept, A.to(x.dtype)) / (1 - dropout)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, A, seed, dropout = inputs
        ctx.save_for_backward(A, seed)
        ctx.x_shape, ctx.x_dtype, ctx.dropout = x.shape, x.dtype, dropout

    @staticmethod
    def backward(ctx, grad):
        A, seed = ctx.saved_tensors
        # d x = mask * (A^T d z) / (1 - p)
        grad_x = (grad @ A.to(grad.dtype)).to(ctx.x_dtype) * keep_mask(ctx.x_shape, seed, ctx.dropout)
        return grad_x / (1 - ctx.dropout), None, None, None


def power_minus_one(offset: Tensor, degree: int) -> Tensor:
    """(1 + offset) ** degree - 1, of which a scaling far below the resolution of fp32 around 1 survives."""
    return PowerMinusOne.apply(offset, degree)


class PowerMinusOne(torch.autograd.Function):
    """Repeated squaring: a compiler repeats this for every token, and log1p and expm1 would cost more than the rest.

    Backward keeps the offset alone, since the derivative needs no steps of the forward.
    """

    @staticmethod
    def forward(offset: Tensor, degree: int) -> Tensor:
        f = offset.clone() if degree == 1 else offset  # autograd wants an output that is not the input
        for bit in f"{degree:b}"[1:]:
            f = f * (f + 2)  # (1 + f) ** 2 - 1
            if bit == "1":
                f = f + offset * (f + 1)  # (1 + f) (1 + o) - 1
        return f

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        offset, ctx.degree = inputs
        ctx.save_for_backward(offset)

    @staticmethod
    def backward(ctx, grad):
        (offset,) = ctx.saved_tensors
        # d/do (1 + o) ** n = n (1 + o) ** (n - 1), by products and not by a logarithm: 1 + o may have any sign
        p, power = 1 + offset, torch.ones_like(offset)
        for bit in f"{ctx.degree - 1:b}":
            power = power * power
            if bit == "1":
                power = power * p
        return grad * (ctx.degree * power), None


def scale_output(y: Tensor, offset: Tensor, degree: int, gate: Tensor | float) -> Tensor:
    """gate * ((1 + offset) ** degree - 1) * y: what Propulsion adds to the output y."""
    return (y * (power_minus_one(offset, degree) * gate)).to(y.dtype)
