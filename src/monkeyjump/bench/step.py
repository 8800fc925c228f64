"""One training step: forward and backward, plain, compiled, and compiled inside one CUDA graph.

Shapes: B batch, T tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from monkeyjump.bench import runs
from monkeyjump.bench.results import bytes_in_words, milliseconds, ratio
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.turns import Measurement, Row
from monkeyjump.bench.variants import build, plain_model, random_ids, skip_masks
from monkeyjump.training.fused_loss import FusedLoss, liger_kernel, linear_cross_entropy

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


class StepRun(runs.ModesRun):
    """One variant's training step, on the same tensors every time, as a CUDA graph needs them.

    The embeddings ask for a gradient in every variant, not only in the floor, so that a ratio to the floor shows the
    adapters alone. Another row of the same mode gives more times of the same call.
    """

    def __init__(self, variant: str, settings: Settings) -> None:
        super().__init__(variant, settings)
        self.calls: dict[str, Callable[[], None]] = {}  # what was timed, by mode
        base = plain_model(settings)
        skip_masks(base)
        self.built = build(variant, settings, base)
        self.switched_on = ExitStack()  # for as long as this process lives
        if settings.fused_loss != "off":
            kernel = liger_kernel if settings.fused_loss == "liger" else linear_cross_entropy
            self.switched_on.enter_context(FusedLoss(self.built.model, kernel).installed())
        self.labels = random_ids(base, settings, self.generator)  # [B, T]
        with torch.no_grad():
            self.embeds = self.built.decoder.embed_tokens(self.labels).detach().clone()  # [B, T, D]
        # it arrives at the last hidden state
        self.upstream = torch.empty_like(self.embeds).normal_(generator=self.generator)
        self.embeds.requires_grad_()
        # the model, its adapters and the batch: what is there between two steps
        tensors = [*self.built.model.parameters(), *self.built.model.buffers(), self.embeds, self.upstream, self.labels]
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.resident = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        self.parameters = self.built.trainable()
        self.leaves = [*self.parameters, self.embeds]
        self.optimizer: torch.optim.Optimizer | None = None
        if settings.optimizer and self.parameters:
            capturable = runs.is_cuda(self.device)
            self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True, capturable=capturable)

    def step(self) -> None:
        """Forward and backward, as a trainer does it: gradients start from nothing."""
        self._drop_gradients()
        if self.settings.scope == "model":
            given = {"inputs_embeds": self.embeds, "labels": self.labels, **self.built.extra}
            self.built.model(**given, use_cache=False).loss.backward()
        else:
            self._run_blocks()
        if self.optimizer is not None:
            self.optimizer.step()

    def _run_blocks(self) -> None:
        """The decoder alone, under a given upstream gradient; the losses of routers take part."""
        built, context, losses = self.built, self.built.context, []
        if context is not None:  # what the hooks of the causal LM, which is not called here, would do
            context.losses.clear()
            call = context.open()
            call.task_ids = built.task_ids
        hidden = built.decoder(inputs_embeds=self.embeds, use_cache=False).last_hidden_state
        if context is not None:
            context.close(call)
            found = (context.losses.take(), context.regularizer(built.causal_lm))
            losses = [loss for loss in found if loss is not None]
        torch.autograd.backward([hidden, *losses], [self.upstream, *(None for _ in losses)])

    def _settle(self) -> None:
        for _ in range(runs.SETTLE):
            self.step()
        self._require_gradients("compile")

    def _drop_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def tidy(self) -> None:
        self._drop_gradients()
        runs.release_cache(self.device)

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
            return {"times_ms": runs.times(self.calls[mode], settings.steps, self.device)}
        call: Callable[[], None] = self.step
        if mode == "graph":
            call, captured_peak = self._captured()
        graphs = runs.graphs_made()
        for _ in range(settings.warmup):
            call()
        runs.reset_peak(self.device)
        self.calls[mode], times = call, runs.times(call, settings.steps, self.device)
        peak = runs.peak_bytes(self.device) if captured_peak is None else captured_peak
        if mode == "eager" and not runs.is_cuda(self.device):
            self._drop_gradients()
            peak = self.resident + runs.cpu_peak_bytes(self.step)
        self._require_gradients(mode)
        found = runs.summary(times)
        row: Row = {
            **found,
            "times_ms": times,
            "tokens_per_second": 1e3 * settings.batch * settings.tokens / found["median_ms"],
            "peak_bytes": peak,
            "resident_bytes": self.resident,
            "extra_bytes": None if peak is None else peak - self.resident,
            "trainable": sum(parameter.numel() for parameter in self.parameters),
        }
        if mode != "eager":
            row |= {**self.compiler, "recompiled_while_timed": runs.graphs_made() - graphs}
        if settings.profile and mode == settings.modes[-1]:
            row["kernels"] = runs.kernels(call, self.device)
        return row

    def _captured(self) -> tuple[Callable[[], None], int | None]:
        """The whole step in one CUDA graph, and the peak of its capture: a replay allocates nothing that is counted."""

        def before() -> None:
            self.tidy()
            runs.reset_peak(self.device)

        # warmed up on the stream of the capture, so that no gradient changes streams; kept: its memory goes with it
        self.graph = runs.captured(self.step, self._settle, before)
        peak = runs.peak_bytes(self.device)
        self.graph.replay()
        self._require_gradients("graph")
        return self.graph.replay, peak

    def _require_gradients(self, mode: str) -> None:
        """A step that skips work is no step: everything trainable, and the input, must have a finite gradient."""
        leaves = {"inputs_embeds": self.embeds}
        leaves |= {name: leaf for name, leaf in self.built.model.named_parameters() if leaf.requires_grad}
        missing = [name for name, leaf in leaves.items() if leaf.grad is None]
        broken = [name for name, leaf in leaves.items() if leaf.grad is not None and not leaf.grad.isfinite().all()]
        if missing or broken:
            raise RuntimeError(
                f"{mode}: of {len(leaves)} tensors that need gradients, {len(missing)} have none and {len(broken)} "
                f"have one that is not finite, e.g. {(missing + broken)[0]}"
            )
