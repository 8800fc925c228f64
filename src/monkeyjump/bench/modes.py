"""One variant through the modes of a benchmark: as it is, compiled, and captured in a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from monkeyjump.bench import timing
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.variants import BuiltVariant
from monkeyjump.bench.worker_process import Row, failure
from monkeyjump.training.compile import whole_call

SETTLE = 3  # steps until a compiled model compiles no more: the first leaves losses and gradients behind
NOT_COMPILED = ("eager", "prefill", "decode")


class ModesRun:
    """One variant. It warms up beside others, and is alone when the row of a mode is measured."""

    def __init__(self, variant: str, settings: Settings) -> None:
        self.variant, self.settings, self.device = variant, settings, settings.device

    def warm_up(self) -> None:
        """Everything that takes long and is not timed."""

    def measure(self, mode: str) -> Row:
        raise NotImplementedError

    def row(self, mode: str) -> Row:
        started = time.time()
        return {"status": "ok", "started": started, **self.measure(mode), "ended": time.time()}


class CompiledModesRun(ModesRun):
    """Also compiles parts of its model, and calls them compiled or as they are."""

    built: BuiltVariant

    def __init__(self, variant: str, settings: Settings) -> None:
        super().__init__(variant, settings)
        self.compiled: list[tuple[Any, Any]] = []  # a module and its compiled call
        self.compiler: Row = {}  # what a row says of the compiler
        self.compile_failure: Row | None = None  # not the error itself, which would keep its frames' tensors alive

    def tidy(self) -> None:
        """Give back what a mode has left behind."""

    def row(self, mode: str) -> Row:
        if mode not in NOT_COMPILED and self.compile_failure is not None:
            return self.compile_failure
        self.use(compiled=mode not in NOT_COMPILED)
        try:
            return super().row(mode)
        finally:
            with suppress(RuntimeError):  # after a failed capture even this may fail; the row says why
                self.tidy()

    def compile(self, parts: Callable[[Any], list[tuple[Any, Any]]], settle: Callable[[], object]) -> None:
        """Put compiled calls in place of modules' own, and call them until nothing more is compiled."""
        import torch._dynamo

        # the blocks share one code object, and each may need a graph of its own
        torch._dynamo.config.recompile_limit = max(64, 8 * len(self.built.decoder.layers))
        torch._dynamo.config.accumulated_recompile_limit = 16 * torch._dynamo.config.recompile_limit
        start, before = time.perf_counter(), graphs_made()
        try:
            if self.built.context is not None:
                self.built.context.shared_inputs.prepare()
            call = torch.compile(whole_call, fullgraph=True, dynamic=False, backend=self.settings.backend)
            self.compiled = parts(call)
            self.use(compiled=True)
            settle()
            timing.synchronize(self.device)
        except Exception as error:
            self.compile_failure = failure(error)
        seconds = time.perf_counter() - start
        self.compiler = {"compile_seconds": seconds, "compiled_graphs": graphs_made() - before}
        self.use(compiled=False)

    def use(self, compiled: bool) -> None:
        for part, call in self.compiled:
            part._compiled_call_impl = call if compiled else None


def graphs_made() -> int:
    """How many graphs the compiler has made so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
