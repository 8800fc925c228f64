"""The batch of a step and how a variant is run on it. Shapes: B batch, T tokens, D hidden width."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monkeyjump.bench.variants import Built, Workload


@dataclass
class Batch:
    """The same tensors at every step, as a CUDA graph needs them.

    The embeddings ask for a gradient in every variant, not only in the floor: what a ratio to the floor then shows is
    the adapters alone.
    """

    embeds: torch.Tensor  # [B, T, D]
    upstream: torch.Tensor  # [B, T, D], the gradient that arrives at the last hidden state
    labels: torch.Tensor  # [B, T]


def make_batch(built: Built, workload: Workload) -> Batch:
    generator = torch.Generator(device=workload.device).manual_seed(workload.seed)
    config = built.causal_lm.config
    shape, device = (workload.batch, workload.tokens), workload.device
    ids = torch.randint(config.vocab_size, shape, generator=generator, device=device)  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        embeds = built.decoder.embed_tokens(ids).detach().clone()
    upstream = torch.randn(embeds.shape, generator=generator, device=device, dtype=embeds.dtype)
    return Batch(embeds.requires_grad_(), upstream, ids)


def run_model(built: Built, batch: Batch) -> None:
    """Forward and backward of the causal LM and its loss."""
    extra = {} if built.task_ids is None else {"task_ids": built.task_ids}
    built.model(inputs_embeds=batch.embeds, labels=batch.labels, use_cache=False, **extra).loss.backward()


def run_blocks(built: Built, batch: Batch) -> None:
    """Forward and backward of the decoder, under a given upstream gradient; the losses of routers take part."""
    call = None
    if built.context is not None:
        # what the hooks of the causal LM, which is not called here, would do
        built.context.losses.clear()
        call = built.context.open()
        call.task_ids = built.task_ids
        built.context.shared_inputs.draw_seeds(call)
    ends = [built.decoder(inputs_embeds=batch.embeds, use_cache=False).last_hidden_state]
    ends += _routing_losses(built)
    if built.context is not None and call is not None:
        built.context.close(call)
    torch.autograd.backward(ends, [batch.upstream, *(None for _ in ends[1:])])


def _routing_losses(built: Built) -> list[torch.Tensor]:
    if built.context is None:
        return []
    losses = [built.context.losses.take(), built.context.regularizer(built.causal_lm)]
    return [loss for loss in losses if loss is not None]
