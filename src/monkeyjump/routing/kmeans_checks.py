"""Checks of the arguments and tokens of k-means, with errors that say what to change.

Shapes: L blocks, N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monkeyjump.errors import ConfigError


def check_arguments(x: Tensor, k: int, restarts: int, max_iter: int, tol: float) -> None:
    problems = [
        f"{name} is {value}; it must be at least 1."
        for name, value in (("k", k), ("restarts", restarts), ("max_iter", max_iter))
        if value < 1
    ]
    if not tol >= 0:
        problems.append(f"tol is {tol}; it must be 0 or more.")
    if x.dim() not in (2, 3) or 0 in x.shape:
        problems.append(f"x has shape {list(x.shape)}; expected [blocks, tokens, hidden] or [tokens, hidden].")
    elif x.shape[-2] < k:
        problems.append(f"x has {x.shape[-2]} tokens for {k} clusters; collect more tokens or lower k.")
    if not x.is_floating_point():
        problems.append(f"x is {x.dtype}; expected floating-point hidden states.")
    if problems:
        raise ConfigError(problems, title="cannot cluster these tokens")


def check_tokens(norms_LN: Tensor, k: int) -> None:
    """Refuse NaN, inf and blocks with too few tokens to cluster; waits for the device once."""
    n_tokens = norms_LN.shape[1]
    bad, usable = torch.stack([(~norms_LN.isfinite()).sum(1), (norms_LN > 0).sum(1)]).tolist()
    problems = []
    for block, (n_bad, n_usable) in enumerate(zip(bad, usable, strict=True)):
        if n_bad:
            problems.append(
                f"block {block}: {n_bad} of {n_tokens} tokens hold NaN or inf, or a norm beyond fp32; "
                "the likely cause is fp16 overflow, run the model in bf16 or fp32."
            )
        elif n_usable < k:
            problems.append(
                f"block {block}: {n_usable} of {n_tokens} tokens have a norm above 0, too few for {k} clusters; "
                "collect more tokens or lower k."
            )
    if problems:
        raise ConfigError(problems, title="cannot cluster these tokens")
