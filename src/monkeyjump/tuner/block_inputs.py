"""What blocks and the models around them are called with, in the many forms Transformers has for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monkeyjump.errors import ConfigError


def in_backward() -> bool:
    """Whether this code runs inside a backward pass: gradient checkpointing is recomputing a block."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def recomputed(module: nn.Module) -> bool:
    """Whether backward runs the forward of this module again: transformers' checkpointing, or torch's wrapper."""
    return getattr(module, "gradient_checkpointing", False) is True or hasattr(module, "_checkpoint_wrapped_module")


def hidden_states(args: tuple, kwargs: dict[str, Any], path: str) -> torch.Tensor:
    """The hidden state a block was called with."""
    h = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
    if not isinstance(h, torch.Tensor) or h.dim() != 3:
        raise ConfigError(
            f"block {path!r} was not called with a [batch, tokens, width] hidden state: this architecture cannot be "
            "routed; set layers_to_route=[] for adapters that are always on."
        )
    return h


def real_tokens(mask: Any, shape: Any) -> torch.Tensor | None:
    """[B, T] True on real tokens, from any mask a Transformers model is called with; None = all real."""
    if isinstance(mask, dict):  # one mask per attention type
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        return None
    T = shape[1]
    if mask.dim() == 4:  # [B, 1, T, S]: a token is real if it may attend to itself; a lone decoded token always is
        if T == 1:
            return None
        own = mask[:, 0, :, :T].diagonal(dim1=-2, dim2=-1)
        return (own if own.dtype == torch.bool else own == 0).expand(shape[0], T)
    if mask.dim() != 2 or mask.shape[1] < T:
        raise ConfigError(
            f"attention_mask of shape {tuple(mask.shape)} does not cover {T} tokens: pass the [batch, tokens] mask of "
            "the tokens that enter the blocks."
        )
    return mask[:, -T:].bool()


def expanded_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeat per-row values for a batch that `generate` widened (beams, several returned sequences)."""
    if tensor.shape[0] == rows or rows % tensor.shape[0] != 0:
        return tensor
    return tensor.repeat_interleave(rows // tensor.shape[0], dim=0)
