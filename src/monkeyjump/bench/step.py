"""One training step: forward and backward, plain, compiled, and compiled inside one CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from monkeyjump.bench import compiling, gradients, tensors, timing
from monkeyjump.bench.batch import make_batch, run_blocks, run_model
from monkeyjump.bench.jobs import Row, failure
from monkeyjump.bench.variants import Built, Workload, build, plain_model, skip_masks
from monkeyjump.errors import ConfigError
from monkeyjump.training.compile import whole_call
from monkeyjump.training.fused_loss import FusedLoss, choose_kernel, liger_kernel, torch_kernel

MODES = ("eager", "compile", "graph")
SCOPES = ("blocks", "model")
SETTLE = 3  # steps until a compiled model compiles no more: the first leaves losses and gradients behind


@dataclass(frozen=True)
class StepSettings:
    """How a step is run and timed."""

    workload: Workload = field(default_factory=Workload)
    modes: tuple[str, ...] = MODES
    scope: str = "blocks"  # blocks: the decoder under a random upstream gradient; model: the causal LM and its loss
    compile: str = "model"  # what is compiled at once: each block, or the whole decoder
    backend: str = "inductor"
    steps: int = 30
    warmup: int = 5
    fused_loss: str = "off"  # off: from logits; torch or liger: without them
    optimizer: bool = False
    check: bool = False
    profile: bool = False  # also which kernels a step of the last mode consists of

    def __post_init__(self) -> None:
        problems = []
        for name, value, known in (
            ("scope", self.scope, SCOPES),
            ("compile", self.compile, compiling.PARTS),
            *(("modes", mode, MODES) for mode in self.modes),
        ):
            if value not in known:
                problems.append(f"{name}={value!r} must be one of {', '.join(known)}.")
        if "graph" in self.modes and not timing.is_cuda(self.workload.device):
            problems.append("modes='graph' needs a GPU: CUDA graphs exist on no other device; use eager or compile.")
        if self.fused_loss != "off":
            problems += fused_loss_problems(self.fused_loss, self.workload.device)
            if self.scope != "model":
                problems.append(f"fused_loss needs scope='model', not {self.scope!r}: the blocks alone have no loss.")
        if self.check and self.workload.dropout:
            problems.append(
                f"check compares gradients and needs dropout=0, not {self.workload.dropout}: two runs draw two masks."
            )
        if self.steps < 2 or self.warmup < 1:
            problems.append(f"steps={self.steps} must be at least 2 and warmup={self.warmup} at least 1.")
        if problems:
            raise ConfigError(problems, title="invalid bench")


def fused_loss_problems(name: str, device: str) -> list[str]:
    """Why this fused loss cannot be had."""
    if name not in ("torch", "liger"):
        return [f"fused_loss={name!r} must be torch or liger."]
    try:
        choose_kernel(name, timing.is_cuda(device))
    except ConfigError as error:
        return list(error.problems)
    return []


def settings_from(plain: dict[str, Any]) -> StepSettings:
    """The settings from their JSON form."""
    return StepSettings(**{**plain, "workload": Workload.parse(plain["workload"]), "modes": tuple(plain["modes"])})


def prepare(method: str, plain: dict[str, Any]) -> Callable[[], Iterator[Row]]:
    """Build, compile and warm up; what comes back does the timing and yields one row per mode."""
    run = StepRun(method, settings_from(plain))
    run.warm_up()
    return run.rows


class StepRun:
    """One variant through its modes. A mode that fails says why in its row, and the others go on."""

    def __init__(self, method: str, settings: StepSettings) -> None:
        self.method, self.settings = method, settings
        self.device = settings.workload.device
        self.failed: dict[str, Row] = {}  # not the error itself, which would keep the tensors of its frames alive
        self.compiled: list[tuple[Any, Any]] = []  # a module and its compiled call
        self.compile_seconds: float | None = None
        self.graphs = 0
        self.state: gradients.State = []
        self.calls: dict[str, Callable[[], None]] = {}  # what was timed, by mode
        self.reference: list[torch.Tensor] = []  # gradients of the last mode checked
        self.deviations: dict[str, float] = {}
        start, before = time.perf_counter(), timing.resident_bytes(self.device)
        self.switched_on = ExitStack()  # for as long as this process lives
        self.built = self._build()
        self.batch = make_batch(self.built, settings.workload)
        self.resident = self._resident(before)
        self.parameters = self.built.trainable()
        self.leaves = [*self.parameters, self.batch.embeds]
        self.optimizer = self._optimizer()
        self.build_seconds = time.perf_counter() - start

    def _build(self) -> Built:
        base = plain_model(self.settings.workload)
        skip_masks(base)
        built = build(self.method, self.settings.workload, base)
        if self.settings.fused_loss != "off":
            built.model.train()  # it is the loss of a training forward
            kernel = liger_kernel if self.settings.fused_loss == "liger" else torch_kernel
            self.switched_on.enter_context(FusedLoss(built.model, kernel).installed())
        return built

    def _resident(self, before: int | None) -> int:
        """Bytes of the model, its adapters and the batch: what is there between two steps."""
        after = timing.resident_bytes(self.device)
        if before is not None and after is not None:
            return after - before
        model, batch = self.built.model, self.batch
        return tensors.bytes_of([*model.parameters(), *model.buffers(), batch.embeds, batch.upstream, batch.labels])

    def _optimizer(self) -> torch.optim.Optimizer | None:
        if not self.settings.optimizer or not self.parameters:
            return None
        return torch.optim.AdamW(self.parameters, lr=1e-4, fused=True, capturable=timing.is_cuda(self.device))

    def step(self) -> None:
        """Forward and backward, as a trainer does it: gradients start from nothing."""
        self._drop_gradients()
        run = run_model if self.settings.scope == "model" else run_blocks
        run(self.built, self.batch)
        if self.optimizer is not None:
            self.optimizer.step()

    def warm_up(self) -> None:
        """Everything that takes long and may run beside others: the first eager steps and all compilation."""
        self.state = gradients.snapshot(self.built.model) if self.settings.check else []
        for _ in range(2):  # also shows our methods which projections share their input
            self.step()
        self._require_gradients("eager")
        if self.settings.check:
            self.reference = self._gradients_of_one_step()
        if "compile" in self.settings.modes or "graph" in self.settings.modes:
            try:
                self._compile()
            except Exception as error:
                self.failed["compile"] = self.failed["graph"] = failure(error)
                self._use(compiled=False)
        self._tidy()

    def _compile(self) -> None:
        settings, decoder = self.settings, self.built.decoder
        compiling.allow_graphs(len(decoder.layers))
        start, before = time.perf_counter(), compiling.graphs()
        if self.built.context is not None:
            self.built.context.shared_inputs.prepare()
        call = torch.compile(whole_call, fullgraph=True, dynamic=False, backend=settings.backend)
        for part in list(decoder.layers) if settings.compile == "blocks" else [decoder]:
            self.compiled.append((part, partial(call, part)))
        self._use(compiled=True)
        for _ in range(SETTLE):
            self.step()
        timing.synchronize(self.device)
        self.compile_seconds = time.perf_counter() - start
        self.graphs = compiling.graphs() - before
        self._require_gradients("compile")
        if settings.check:
            found = self._gradients_of_one_step()
            self.deviations["compile"] = gradients.deviation(found, self.reference)
            self.reference = found

    def _use(self, compiled: bool) -> None:
        for part, call in self.compiled:
            part._compiled_call_impl = call if compiled else None

    def rows(self) -> Iterator[Row]:
        """Time the modes, one row each; eager first, so that what a later mode keeps is in no earlier peak.

        Called again, the rows are of more times alone.
        """
        for mode in [mode for mode in MODES if mode in self.settings.modes]:
            row: Row = {"variant": self.method, "mode": mode, "started": time.time()}
            if mode in self.failed:
                row |= self.failed[mode]
            else:
                try:
                    row |= {"status": "ok", **(self._again(mode) if mode in self.calls else self._measure(mode))}
                except Exception as error:
                    row |= failure(error)
                with suppress(RuntimeError):  # after a failed capture even this may fail; the row says why
                    self._tidy()
            yield {**row, "ended": time.time()}

    def _again(self, mode: str) -> Row:
        self._use(compiled=mode != "eager")
        self.calls[mode]()
        return {"times_ms": timing.times(self.calls[mode], self.settings.steps, self.device)}

    def _tidy(self) -> None:
        self._drop_gradients()
        timing.release_cache(self.device)

    def _measure(self, mode: str) -> Row:
        settings = self.settings
        self._use(compiled=mode != "eager")
        captured_peak = None
        call: Callable[[], None] = self.step
        if mode == "graph":
            call, captured_peak = self._captured()
        graphs = compiling.graphs()
        for _ in range(settings.warmup):
            call()
        timing.reset_peak(self.device)
        self.calls[mode], times = call, timing.times(call, settings.steps, self.device)
        found = timing.spread(times)
        peak = timing.peak_bytes(self.device) if captured_peak is None else captured_peak
        if mode == "eager" and not timing.is_cuda(self.device):
            peak = self.resident + tensors.peak_of(self.step)
        self._require_gradients(mode)
        tokens = settings.workload.batch * settings.workload.tokens
        row: Row = {
            **asdict(found),
            "times_ms": times,
            "tokens_per_second": 1e3 * tokens / found.median_ms,
            "peak_bytes": peak,
            "resident_bytes": self.resident,
            "extra_bytes": None if peak is None else peak - self.resident,
            "trainable": sum(parameter.numel() for parameter in self.parameters),
            "build_seconds": self.build_seconds,
        }
        if mode != "eager":
            row |= {"compile_seconds": self.compile_seconds, "compiled_graphs": self.graphs}
            row["recompiled_while_timed"] = compiling.graphs() - graphs
        if mode in self.deviations:
            row["gradient_deviation"] = self.deviations[mode]
        if settings.profile and mode == [known for known in MODES if known in settings.modes][-1]:
            row["kernels"] = timing.kernels(call, self.device)
        return row

    def _captured(self) -> tuple[Callable[[], None], int | None]:
        """The whole step in one CUDA graph, and the peak of its capture: a replay allocates nothing that is counted."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the stream of the capture, so that no gradient changes streams
            for _ in range(SETTLE):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self._drop_gradients()
        timing.release_cache(self.device)
        timing.reset_peak(self.device)
        self.graph = torch.cuda.CUDAGraph()  # kept: its memory goes with it
        with torch.cuda.graph(self.graph, stream=stream):
            self.step()
        peak = timing.peak_bytes(self.device)
        gradients.restore(self.state)
        self.graph.replay()
        self._require_gradients("graph")
        if self.settings.check:
            found = gradients.copies([leaf.grad for leaf in self.leaves])
            self.deviations["graph"] = gradients.deviation(found, self.reference)
        return self.graph.replay, peak

    def _gradients_of_one_step(self) -> list[torch.Tensor]:
        gradients.restore(self.state)
        self.step()
        return gradients.copies([leaf.grad for leaf in self.leaves])

    def _require_gradients(self, mode: str) -> None:
        """A step that skips work is no step."""
        fault = gradients.faulty(self.built.model, self.batch.embeds)
        if fault:
            raise RuntimeError(f"{mode}: {fault}")

    def _drop_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None
