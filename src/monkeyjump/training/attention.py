"""Attention for training batches whose padding is known: no mask is made, so that the fast kernels are not shut out.

Pads at the end of a row need no mask under causal attention: no real token comes after them. Sequences packed into one
row need none either where the kernel is told where each begins (`cu_seq_lens_q`); packed rows that do not tell it have
their mask. Elsewhere Transformers looks at the mask on the host to see whether one is needed, which a captured step
cannot do: then it is always made. Short rows in bf16 on a CPU are multiplied out, which is faster than torch's kernel.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PADS_LAST, MASKED = "monkeyjump_pads_last", "monkeyjump_masked"
# Nine heads of 64, bf16, one core with avx512_bf16, forward and backward: torch's kernel takes 15.8, 25.3, 21.0, 45.6
# and 75.6 ms for 16 x 48, 16 x 72, 8 x 128, 8 x 256 and 4 x 512 tokens, products take 2.3, 4.7, 6.3, 23.3 and 90.0.
SHORT = 256
_forward = threading.local()  # `boundaries`: whether the forward of this thread says where packed sequences begin


@contextmanager
def attending(model: Any, pads_last: bool) -> Iterator[str]:
    """Train inside with the faster attention; yields what is used. A forward without gradients has its mask."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config
    before = getattr(config, "_attn_implementation", None)
    name = _fitting(config, before, pads_last and _hands_on(base))
    if name is None:
        yield f"{before}"
        return
    _register()

    def look(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        _forward.boundaries = kwargs.get("cu_seq_lens_q") is not None

    handle = base.register_forward_pre_hook(look, with_kwargs=True)
    config._attn_implementation = name
    try:
        yield name
    finally:
        config._attn_implementation = before
        handle.remove()


def _hands_on(base: nn.Module) -> bool:
    """Whether the attention of a model takes arguments that it does not know, as the boundaries of sequences are."""
    named = [(path.rpartition(".")[2].lower(), module) for path, module in base.named_modules()]
    attentions = [module for name, module in named if ("attn" in name or "attention" in name) and [*module.children()]]
    takes = [inspect.signature(module.forward).parameters.values() for module in attentions]
    return bool(takes) and all(any(p.kind is p.VAR_KEYWORD for p in parameters) for parameters in takes)


def _fitting(config: Any, before: str | None, pads_last: bool) -> str | None:
    """What can stand for torch's attention in this model; None: nothing can."""
    if before != "sdpa" or getattr(config, "is_encoder_decoder", False):
        return None
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    whole = kinds == {"full_attention"} and not getattr(config, "use_sliding_window", False)
    whole = whole and (hasattr(config, "use_sliding_window") or not getattr(config, "sliding_window", None))
    return PADS_LAST if pads_last and whole else MASKED


def _register() -> None:
    def where_needed(*args: Any, **kwargs: Any) -> Tensor | None:
        # Transformers allows no skip where it sees, or cannot look whether, sequences are packed
        causal = kwargs.get("allow_is_causal_skip", True) or getattr(_forward, "boundaries", False)
        return None if torch.is_grad_enabled() and causal else sdpa_mask(*args, **kwargs)

    def always(*args: Any, **kwargs: Any) -> Tensor | None:
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})

    AttentionInterface.register(PADS_LAST, pads_last_attention)
    AttentionMaskInterface.register(PADS_LAST, where_needed)
    AttentionInterface.register(MASKED, attend)
    AttentionMaskInterface.register(MASKED, always)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """Attention [B, T, H, D] of q [B, H, T, D] and k, v [B, G, T, D] under a mask, or causal without one."""
    masked = attention_mask is not None or told.get("is_causal", getattr(module, "is_causal", True))
    short = query.shape[2] == key.shape[2] <= SHORT and gains_from_products(query) and torch.is_grad_enabled()
    if short and masked and not dropout and told.get("position_bias") is None:
        return _products(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **told)


def gains_from_products(tensor: Tensor) -> bool:
    """Whether short rows of such a model are attended to faster by plain products."""
    return tensor.device.type == "cpu" and tensor.dtype is torch.bfloat16


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Scores, softmax in fp32 and the weighted sum; the heads that share keys are rows of one product."""
    (B, H, T, D), G = query.shape, key.shape[1]
    scores = (query * (D**-0.5 if scaling is None else scaling)).reshape(B, G, H // G * T, D) @ key.mT
    scores = scores.view(B, H, T, T)
    if mask is None:
        mask = torch.ones(T, T, dtype=torch.bool, device=query.device).tril()
    hidden = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~mask, hidden) if mask.dtype is torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights.view(B, G, H // G * T, T) @ value).view(B, H, T, -1).transpose(1, 2)


def pads_last_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **told: Any,
) -> tuple[Tensor, None]:
    """Causal attention [B, T, H, D] of q [B, H, T, D] and k, v [B, G, T, D], within the packed sequences if told."""
    ends, longest = told.get("cu_seq_lens_q"), told.get("max_length_q")
    if ends is None or attention_mask is not None:
        return attend(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling)
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and longest is not None:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, H, D]
        flash = torch.ops.aten._flash_attention_forward
        return flash(q, k, v, ends, ends, longest, longest, dropout, True, False, scale=scaling)[0].unsqueeze(0), None
    place = torch.arange(query.shape[2], device=query.device)
    segment = torch.searchsorted(ends[1:].contiguous(), place, right=True)
    mask = (segment[:, None] == segment) & (place[:, None] >= place)
    return attend(module, query, key, value, mask[None, None], dropout=dropout, scaling=scaling)
