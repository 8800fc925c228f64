"""Which tokens decide, and for whom: token, sequence and task granularity.

Shapes: B batch, T tokens. Everything here is data-independent in shape and free of host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from monkeyjump.errors import ConfigError

KINDS = ("text", "image", "video")  # of the tokens that a language model reads
IGNORE = -100  # the label value that Transformers and PEFT leave out of the loss


@dataclass
class CallInputs:
    """What one forward of the model that owns the blocks was given, as far as routing needs it."""

    shape: tuple[int, int]  # (B, T) of the tokens that enter the blocks
    device: torch.device
    mask: Tensor | None = None  # [B, T] bool, True on real tokens; None = all real
    labels: Tensor | None = None  # [B, T]
    prompt_lengths: Tensor | None = None  # [B], tokens of the prompt, padding not counted
    segments: Tensor | None = None  # [B, T] int64, which packed sequence of the row a token is in
    generated_from: int | None = None  # width of the prompt that `generate` was called with
    training: bool = False
    kinds: Tensor | None = None  # [B, T] int64, the place of each token's kind in KINDS; None: one kind

    @property
    def real(self) -> Tensor:
        """[B, T] True on real tokens."""
        return torch.ones(self.shape, dtype=torch.bool, device=self.device) if self.mask is None else self.mask


@dataclass
class Selection:
    """Queries are the tokens that are compared with the centres; `source` says whose decision each token follows."""

    queries: Tensor | None = None  # [B, T] bool, [B, 1] when rows are pooled; None = every token
    source: Tensor | None = None  # [B, 1] or [B, T] int64 position to follow; None = each token its own
    pool: str | None = None  # "mean" or "max": the query is a pooled row instead of a token
    mask: Tensor | None = None  # the tokens that pooling counts; None = all
    lengths: Tensor | None = None  # [B, T] int64, of the packed sequences that are pooled; None = whole rows are


def select(inputs: CallInputs, granularity: str, sequence_token: str) -> Selection:
    if granularity == "token":
        return Selection(queries=inputs.mask if inputs.kinds is None else balanced(inputs.real, inputs.kinds))
    inputs = _without_generated(inputs)
    if sequence_token in ("mean", "max"):
        return _pooled(inputs, sequence_token)
    source = (_last_in_row if inputs.segments is None else _last_in_segment)(inputs, sequence_token)
    followed = torch.zeros(inputs.shape, dtype=torch.bool, device=source.device).scatter(1, source, True)
    return Selection(queries=followed if inputs.mask is None else followed & inputs.mask, source=source)


def balanced(real: Tensor, kinds: Tensor) -> Tensor:
    """[B, T] True on as many real tokens of each kind as there are of the rarest, at equal distances.

    A picture is hundreds of tokens beside a few words: if all were counted, pictures alone would move the centres.
    """
    own = (kinds == torch.arange(len(KINDS), device=kinds.device).view(-1, 1, 1)) & real
    flat = own.flatten(1).long()  # [kinds, B * T]
    number = flat.sum(1, keepdim=True)
    fewest = torch.where(number > 0, number, flat.shape[1]).amin()
    place = flat.cumsum(1)  # from 1 in each kind
    chosen = place * fewest // number.clamp_min(1) > (place - 1) * fewest // number.clamp_min(1)
    return (chosen.view_as(own) & own).any(0)


def pool(h: Tensor, selection: Selection) -> Tensor:
    """Mean or max over the tokens of each row that count, fp32 [B, 1, D]; of each packed sequence, [B, T, D]."""
    h, mask, mean = h.float(), selection.mask, selection.pool == "mean"
    if mask is None:
        return h.mean(1, keepdim=True) if mean else h.amax(1, keepdim=True)
    h = h.masked_fill(~mask.unsqueeze(-1), 0.0 if mean else -torch.inf)
    if mean:
        return _reduced(h, selection, "sum") / _reduced(mask.unsqueeze(-1).float(), selection, "sum").clamp_min(1)
    return _reduced(h, selection, "max").nan_to_num(neginf=0.0)


def _reduced(h: Tensor, selection: Selection, how: str) -> Tensor:
    """The sum or maximum of each row, or of each packed sequence: the first places hold them, in their order."""
    if selection.lengths is None:
        return h.sum(1, keepdim=True) if how == "sum" else h.amax(1, keepdim=True)
    empty = 0.0 if how == "sum" else -torch.inf
    lengths = selection.lengths.to(h.device)  # `unsafe`: their sum is not read from the device to be checked
    return torch.segment_reduce(h.contiguous(), how, lengths=lengths, axis=1, initial=empty, unsafe=True)


def row_weights(inputs: CallInputs, how: str) -> Tensor:
    """How much each token counts for the state that stands for its row, fp32 [B, T]; the weights of a row sum to 1.

    `mean`: the tokens of the prompt, or all real ones where nothing tells where it ends; `prompt`: the last of them;
    `first`: the first real token. Tokens generated so far never count.
    """
    inputs = replace(_without_generated(inputs), training=False)
    if how == "mean":
        chosen = _prompt_or_all(inputs, None).float()
        return chosen / chosen.sum(1, keepdim=True).clamp_min(1)
    position = _last_in_row(inputs, "prompt") if how == "prompt" else inputs.real.long().argmax(1, keepdim=True)
    return torch.zeros(inputs.shape, device=inputs.device).scatter(1, position, 1.0)


def segments_of(position_ids: Tensor | None, seq_idx: Tensor | None) -> Tensor | None:
    """Packed sequence number of every token, from `seq_idx` or from the places where positions restart.

    Negative entries of `seq_idx` mark padding at the end of a row.
    """
    if seq_idx is not None:
        return seq_idx.clamp_min(0).long()
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] == 1:
        return None
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] <= position_ids[:, :-1]
    return starts.long().cumsum(1) - 1


def _without_generated(inputs: CallInputs) -> CallInputs:
    """Mask the generated tokens, which come along without a KV cache: they never take part in a decision."""
    B, T = inputs.shape
    if inputs.generated_from is None or inputs.generated_from >= T:
        return inputs
    prompt = (torch.arange(T, device=inputs.device) < inputs.generated_from).expand(B, T)
    return replace(inputs, mask=prompt if inputs.mask is None else inputs.mask & prompt)


def _prompt_mask(inputs: CallInputs) -> Tensor:
    """[B, T] True on the real tokens of the prompt."""
    (B, T), real = inputs.shape, inputs.real
    positions = torch.arange(T, device=inputs.device).expand(B, T)
    if inputs.labels is not None:
        answered = (inputs.labels != IGNORE).long()
        if inputs.segments is None:
            return real & (answered.cumsum(1) == 0)
        # A token counts the answers so far within its own segment: the running total less that before the segment.
        before = answered.cumsum(1) - answered
        start = torch.full_like(before, T).scatter_reduce(1, inputs.segments, positions, "amin")
        offset = before.gather(1, start.gather(1, inputs.segments).clamp(max=T - 1))
        return real & (answered.cumsum(1) - offset == 0)
    if inputs.prompt_lengths is not None:
        return real & (real.long().cumsum(1) <= inputs.prompt_lengths.unsqueeze(1))
    if inputs.training:
        raise ConfigError(
            "granularity='sequence' with sequence_token='prompt' must know where the prompt ends: pass `labels` with "
            f"{IGNORE} on the prompt (or `prompt_lengths`), or choose sequence_token='last', which lets the answer "
            "decide its own routing in training."
        )
    return real


def _prompt_or_all(inputs: CallInputs, runs: Tensor | None) -> Tensor:
    """[B, T] True on the prompt of each row, or of each of its runs, or on all that is real where there is none."""
    prompt = _prompt_mask(replace(inputs, training=False))
    if runs is None:
        found = prompt.any(1, keepdim=True)
    else:
        found = torch.zeros_like(runs).scatter_reduce(1, runs, prompt.long(), "amax").bool().gather(1, runs)
    return torch.where(found, prompt, inputs.real)


def _pooled(inputs: CallInputs, how: str) -> Selection:
    """The prompt decides, pooled, or all that is real where nothing tells where it ends. Pads alone are no query."""
    if inputs.segments is None:
        if inputs.mask is None and inputs.labels is None and inputs.prompt_lengths is None:
            return Selection(pool=how)
        counted = _prompt_or_all(inputs, None)
        return Selection(queries=counted.any(1, keepdim=True), pool=how, mask=counted)
    # A tail of pads has the number of the first sequence, yet is a run of its own.
    runs = torch.zeros_like(inputs.segments)
    runs[:, 1:] = (inputs.segments[:, 1:] != inputs.segments[:, :-1]).long().cumsum(1)
    counted, none = _prompt_or_all(inputs, runs), torch.zeros_like(runs)
    lengths = none.scatter_add(1, runs, torch.ones_like(runs))
    pooled = none.scatter_reduce(1, runs, counted.long(), "amax").bool()
    return Selection(queries=pooled, source=runs, pool=how, mask=counted, lengths=lengths)


def _last_in_row(inputs: CallInputs, sequence_token: str) -> Tensor:
    """Position [B, 1] of the last prompt token (or last token); without a prompt, of the first real token."""
    real = inputs.real
    chosen = _prompt_mask(inputs) if sequence_token == "prompt" else real
    positions = torch.arange(inputs.shape[1], device=inputs.device)
    last = (positions * chosen + (chosen.long() - 1)).amax(1, keepdim=True)  # -1 where nothing is chosen
    first_real = real.long().argmax(1, keepdim=True)
    return torch.where(last < 0, first_real, last)


def _last_in_segment(inputs: CallInputs, sequence_token: str) -> Tensor:
    """Position [B, T]: for every token, the last prompt token (or last token) of its packed sequence."""
    segments, T, real = inputs.segments, inputs.shape[1], inputs.real
    assert segments is not None
    chosen = _prompt_mask(inputs) if sequence_token == "prompt" else real
    positions = torch.arange(T, device=inputs.device).expand(inputs.shape)
    last = torch.full_like(segments, -1).scatter_reduce(1, segments, torch.where(chosen, positions, -1), "amax")
    first = torch.full_like(segments, T).scatter_reduce(1, segments, torch.where(real, positions, T), "amin")
    return torch.where(last < 0, first.clamp(max=T - 1), last).gather(1, segments)
