"""One training step: forward and backward, plain, compiled, and compiled inside one CUDA graph.

Shapes: B batch, T tokens, D hidden width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from monkeyjump.bench import timing
from monkeyjump.bench.modes import SETTLE, CompiledModesRun, graphs_made
from monkeyjump.bench.results import bytes_in_words, milliseconds, ratio
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.turns import Measurement
from monkeyjump.bench.variants import BuiltVariant, build, plain_model, random_ids, skip_masks
from monkeyjump.bench.worker_process import Row
from monkeyjump.training.fused_loss import FusedLoss, liger_kernel, torch_kernel

COLUMNS = [
    ("variant", "variant", str),
    ("ms", "median_ms", milliseconds),
    ("spread", "spread", "{:.1%}".format),
    ("/floor", "time_vs_floor", ratio),
    ("/peft", "time_vs_peft", ratio),
    ("memory", "peak_bytes", bytes_in_words),
    ("/floor", "memory_vs_floor", ratio),
    ("/peft", "memory_vs_peft", ratio),
]


def measurements(settings: Settings) -> list[Measurement]:
    return [Measurement(StepRun, name, settings) for name in settings.methods]


@dataclass
class RandomBatch:
    """The same tensors at every step, as a CUDA graph needs them.

    The embeddings ask for a gradient in every variant, not only in the floor, so that a ratio to the floor shows the
    adapters alone.
    """

    embeds: torch.Tensor  # [B, T, D]
    upstream: torch.Tensor  # [B, T, D], the gradient that arrives at the last hidden state
    labels: torch.Tensor  # [B, T]


def random_batch(built: BuiltVariant, settings: Settings) -> RandomBatch:
    generator = torch.Generator(device=settings.device).manual_seed(settings.seed)
    ids = random_ids(built.causal_lm, settings, generator)
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
    context, losses = built.context, []
    if context is None:
        hidden = built.decoder(inputs_embeds=batch.embeds, use_cache=False).last_hidden_state
    else:
        # what the hooks of the causal LM, which is not called here, would do
        context.losses.clear()
        call = context.open()
        call.task_ids = built.task_ids
        hidden = built.decoder(inputs_embeds=batch.embeds, use_cache=False).last_hidden_state
        context.close(call)
        losses = [loss for loss in (context.losses.take(), context.regularizer(built.causal_lm)) if loss is not None]
    torch.autograd.backward([hidden, *losses], [batch.upstream, *(None for _ in losses)])


class StepRun(CompiledModesRun):
    """One variant's training step. Another row of the same mode gives more times of the same call."""

    def __init__(self, variant: str, settings: Settings) -> None:
        super().__init__(variant, settings)
        self.calls: dict[str, Callable[[], None]] = {}  # what was timed, by mode
        start, before = time.perf_counter(), timing.resident_bytes(self.device)
        base = plain_model(settings)
        skip_masks(base)
        self.built = build(variant, settings, base)
        self.switched_on = ExitStack()  # for as long as this process lives
        if settings.fused_loss != "off":
            kernel = liger_kernel if settings.fused_loss == "liger" else torch_kernel
            self.switched_on.enter_context(FusedLoss(self.built.model, kernel).installed())
        self.batch = random_batch(self.built, settings)
        self.resident = self._resident(before)
        self.parameters = self.built.trainable()
        self.leaves = [*self.parameters, self.batch.embeds]
        self.optimizer: torch.optim.Optimizer | None = None
        if settings.optimizer and self.parameters:
            capturable = timing.is_cuda(self.device)
            self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True, capturable=capturable)
        self.build_seconds = time.perf_counter() - start

    def _resident(self, before: int | None) -> int:
        """Bytes of the model, its adapters and the batch: what is there between two steps."""
        after = timing.resident_bytes(self.device)
        if before is not None and after is not None:
            return after - before
        tensors = [*self.built.model.parameters(), *self.built.model.buffers(), *vars(self.batch).values()]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def step(self) -> None:
        """Forward and backward, as a trainer does it: gradients start from nothing."""
        self._drop_gradients()
        run = run_model if self.settings.scope == "model" else run_blocks
        run(self.built, self.batch)
        if self.optimizer is not None:
            self.optimizer.step()

    def _settle(self) -> None:
        for _ in range(SETTLE):
            self.step()
        self._require_gradients("compile")

    def _drop_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def tidy(self) -> None:
        self._drop_gradients()
        timing.release_cache(self.device)

    def warm_up(self) -> None:
        """The first eager steps, and all compilation."""
        for _ in range(2):  # also shows our methods which projections share their input
            self.step()
        self._require_gradients("eager")
        if "compile" in self.settings.modes or "graph" in self.settings.modes:
            self.compile(self._compiled_parts, self._settle)
        self.tidy()

    def _compiled_parts(self, call: Any) -> list[tuple[Any, Any]]:
        decoder = self.built.decoder
        parts = list(decoder.layers) if self.settings.compile == "blocks" else [decoder]
        return [(part, partial(call, part)) for part in parts]

    def measure(self, mode: str) -> Row:
        settings, captured_peak = self.settings, None
        if mode in self.calls:
            self.calls[mode]()
            return {"times_ms": timing.times(self.calls[mode], settings.steps, self.device)}
        call: Callable[[], None] = self.step
        if mode == "graph":
            call, captured_peak = self._captured()
        graphs = graphs_made()
        for _ in range(settings.warmup):
            call()
        timing.reset_peak(self.device)
        self.calls[mode], times = call, timing.times(call, settings.steps, self.device)
        peak = timing.peak_bytes(self.device) if captured_peak is None else captured_peak
        if mode == "eager" and not timing.is_cuda(self.device):
            self._drop_gradients()
            peak = self.resident + timing.cpu_peak_bytes(self.step)
        self._require_gradients(mode)
        found = timing.summary(times)
        row: Row = {
            **found,
            "times_ms": times,
            "tokens_per_second": 1e3 * settings.batch * settings.tokens / found["median_ms"],
            "peak_bytes": peak,
            "resident_bytes": self.resident,
            "extra_bytes": None if peak is None else peak - self.resident,
            "trainable": sum(parameter.numel() for parameter in self.parameters),
            "build_seconds": self.build_seconds,
        }
        if mode != "eager":
            row |= {**self.compiler, "recompiled_while_timed": graphs_made() - graphs}
        if settings.profile and mode == settings.modes[-1]:
            row["kernels"] = timing.kernels(call, self.device)
        return row

    def _captured(self) -> tuple[Callable[[], None], int | None]:
        """The whole step in one CUDA graph, and the peak of its capture: a replay allocates nothing that is counted."""

        def before() -> None:
            self.tidy()
            timing.reset_peak(self.device)

        # warmed up on the stream of the capture, so that no gradient changes streams; kept: its memory goes with it
        self.graph = timing.captured(self.step, self._settle, before)
        peak = timing.peak_bytes(self.device)
        self.graph.replay()
        self._require_gradients("graph")
        return self.graph.replay, peak

    def _require_gradients(self, mode: str) -> None:
        """A step that skips work is no step: everything trainable, and the input, must have a finite gradient."""
        leaves = {"inputs_embeds": self.batch.embeds}
        leaves |= {name: leaf for name, leaf in self.built.model.named_parameters() if leaf.requires_grad}
        missing = [name for name, leaf in leaves.items() if leaf.grad is None]
        broken = [name for name, leaf in leaves.items() if leaf.grad is not None and not leaf.grad.isfinite().all()]
        if missing or broken:
            raise RuntimeError(
                f"{mode}: of {len(leaves)} tensors that need gradients, {len(missing)} have none and {len(broken)} "
                f"have one that is not finite, e.g. {(missing + broken)[0]}"
            )
