"""The random batch of a step and how a variant is run on it. Shapes: B batch, T tokens, D hidden width."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monkeyjump.bench.settings import Settings
from monkeyjump.bench.variants import BuiltVariant, random_ids


@dataclass
class RandomBatch:
    """The same tensors at every step, as a CUDA graph needs them.

    The embeddings ask for a gradient in every variant, not only in the floor, so that a ratio to the floor shows the
    adapters alone.
    """

    embeds: torch.Tensor  # [B, T, D]
    upstream: torch.Tensor  # [B, T, D], the gradient that arrives at the last hidden state
    labels: torch.Tensor  # [B, T]


def random_batch(built: BuiltVariant, workload: Settings) -> RandomBatch:
    generator = torch.Generator(device=workload.device).manual_seed(workload.seed)
    ids = random_ids(built.causal_lm, workload, generator)
    with torch.no_grad():
        embeds = built.decoder.embed_tokens(ids).detach().clone()
    upstream = torch.randn(embeds.shape, generator=generator, device=embeds.device, dtype=embeds.dtype)
    return RandomBatch(embeds.requires_grad_(), upstream, ids)


def run_model(built: BuiltVariant, batch: RandomBatch) -> None:
    """Forward and backward of the causal LM and its loss."""
    extra = {} if built.task_ids is None else {"task_ids": built.task_ids}
    built.model(inputs_embeds=batch.embeds, labels=batch.labels, use_cache=False, **extra).loss.backward()


def run_blocks(built: BuiltVariant, batch: RandomBatch) -> None:
    """Forward and backward of the decoder, under a given upstream gradient; the losses of routers take part."""
    if built.context is not None:
        # what the hooks of the causal LM, which is not called here, would do
        built.context.losses.clear()
        built.context.task_ids = built.task_ids
        if built.context.regularized:
            built.context.join_regularizer(built.causal_lm)
    ends = [built.decoder(inputs_embeds=batch.embeds, use_cache=False).last_hidden_state]
    ends += _routing_losses(built)
    torch.autograd.backward(ends, [batch.upstream, *(None for _ in ends[1:])])


def _routing_losses(built: BuiltVariant) -> list[torch.Tensor]:
    if built.context is None:
        return []
    losses = [built.context.losses.take(), built.context.regularizer(built.causal_lm)]
    built.context.release_regularizer()
    return [loss for loss in losses if loss is not None]
