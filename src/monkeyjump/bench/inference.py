"""Generation: the prompt at once, then token by token into a static cache; plain, compiled, and in a CUDA graph.

Shapes: B rows, T prompt tokens, S new tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from monkeyjump.bench import compiling, timing
from monkeyjump.bench.jobs import Row, failure
from monkeyjump.bench.report import Table, number, ratio
from monkeyjump.bench.variants import FLOOR, Workload, build
from monkeyjump.errors import ConfigError
from monkeyjump.training.compile import whole_call

BASE = "base"  # the model without adapters
MODES = ("prefill", "decode", "decode-compile", "decode-graph")
SETTLE = 3


@dataclass(frozen=True)
class InferenceSettings:
    """`workload.tokens` is the length of the prompt. The prompt is never compiled, as in Transformers' `generate`."""

    workload: Workload = field(default_factory=Workload)
    modes: tuple[str, ...] = MODES
    new: int = 64
    repeats: int = 5
    compile: str = "blocks"  # what is compiled at once: each block, or the causal LM
    backend: str = "inductor"

    def __post_init__(self) -> None:
        problems = [f"modes={mode!r} must be one of {', '.join(MODES)}." for mode in self.modes if mode not in MODES]
        if self.compile not in compiling.PARTS:
            problems.append(f"compile={self.compile!r} must be one of {', '.join(compiling.PARTS)}.")
        if "decode-graph" in self.modes and not timing.is_cuda(self.workload.device):
            problems.append("modes='decode-graph' needs a GPU: CUDA graphs exist on no other device.")
        if self.new < 2 or self.repeats < 1:
            problems.append(f"new={self.new} must be at least 2 and repeats={self.repeats} at least 1.")
        if problems:
            raise ConfigError(problems, title="invalid bench")


def prepare(variant: str, plain: dict[str, Any]) -> Callable[[], Iterator[Row]]:
    settings = InferenceSettings(
        **{**plain, "workload": Workload.parse(plain["workload"]), "modes": tuple(plain["modes"])}
    )
    run = InferenceRun(variant, settings)
    run.warm_up()
    return run.rows


class InferenceRun:
    """One variant: greedy decoding through one cache whose tensors, like the token's, stay where they are."""

    def __init__(self, variant: str, settings: InferenceSettings) -> None:
        from transformers import StaticCache

        workload = settings.workload
        self.variant, self.settings, self.device = variant, settings, workload.device
        self.built = build(FLOOR if variant == BASE else variant, workload)
        self.built.model.eval()
        self.model: Any = self.built.causal_lm
        config: Any = self.model.config
        generator = torch.Generator(device=self.device).manual_seed(workload.seed)
        vocabulary, shape = config.vocab_size, (workload.batch, workload.tokens)
        self.prompt = torch.randint(vocabulary, shape, generator=generator, device=self.device)
        self.extra = {} if self.built.task_ids is None else {"task_ids": self.built.task_ids}
        self.cache = StaticCache(config=config, max_cache_len=workload.tokens + settings.new)
        self.token = torch.zeros(workload.batch, 1, dtype=torch.long, device=self.device)
        self.logits: torch.Tensor | None = None  # of the last decoded token, [B, V]
        self.compiled: list[tuple[Any, Any]] = []  # a module and its compiled call
        self.using = False  # whether the modules are called compiled
        self.compile_seconds: float | None = None
        self.graphs = 0
        self.failed: dict[str, Row] = {}
        self.reference: tuple[torch.Tensor, torch.Tensor] | None = None  # tokens and first logits of plain decoding

    @torch.no_grad()
    def prefill(self) -> None:
        self.cache.reset()
        self._advance(self.prompt)

    def _advance(self, ids: torch.Tensor) -> None:
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **self.extra)
        self.logits = out.logits[:, -1]
        self.token.copy_(self.logits.argmax(-1, keepdim=True))

    @torch.no_grad()
    def decode_one(self) -> None:
        self._advance(self.token)

    def warm_up(self) -> None:
        """The first generation, whose tokens are the ones to match, and the compilation of a decoding step."""
        self.reference = self._generate(self.decode_one)
        if "decode-compile" in self.settings.modes or "decode-graph" in self.settings.modes:
            try:
                self._compile()
            except Exception as error:
                self.failed["decode-compile"] = self.failed["decode-graph"] = failure(error)
        self._use(compiled=False)
        timing.release_cache(self.device)

    def _compile(self) -> None:
        blocks = self.built.decoder.layers
        compiling.allow_graphs(len(blocks))
        start, before = time.perf_counter(), compiling.graphs()
        if self.built.context is not None:
            self.built.context.shared_inputs.prepare()
        call = torch.compile(whole_call, fullgraph=True, dynamic=False, backend=self.settings.backend)
        if self.settings.compile == "model":
            self.compiled = [(self.model, partial(call, self.model))]
        else:
            pairs = zip(blocks, self.cache.layers, strict=True)
            self.compiled = [(block, _BlockCall(call, block, layer)) for block, layer in pairs]
        self.prefill()
        self._use(compiled=True)
        for _ in range(SETTLE):
            self.decode_one()
        timing.synchronize(self.device)
        self.compile_seconds = time.perf_counter() - start
        self.graphs = compiling.graphs() - before

    def _use(self, compiled: bool) -> None:
        self.using = compiled
        for part, call in self.compiled:
            part._compiled_call_impl = call if compiled else None

    def _generate(self, decode: Callable[[], object]) -> tuple[torch.Tensor, torch.Tensor]:
        """All new tokens [B, S] after the prompt, and the logits of the first one that was decoded, [B, V]."""
        compiled = self.using
        self._use(compiled=False)
        self.prefill()
        self._use(compiled)
        tokens, first = [], None
        for _ in range(self.settings.new):
            tokens.append(self.token.clone())
            decode()
            first = self.logits.clone() if first is None and self.logits is not None else first
        assert first is not None
        return torch.cat(tokens, dim=1), first

    def rows(self) -> Iterator[Row]:
        for mode in [mode for mode in MODES if mode in self.settings.modes]:
            row: Row = {"variant": self.variant, "mode": mode, "started": time.time()}
            if mode in self.failed:
                row |= self.failed[mode]
            else:
                try:
                    row |= {"status": "ok", **(self._measure_prompt() if mode == "prefill" else self._measure(mode))}
                except Exception as error:
                    row |= failure(error)
            yield {**row, "ended": time.time()}

    def _measure_prompt(self) -> Row:
        self._use(compiled=False)
        self.prefill()
        timing.reset_peak(self.device)
        found = timing.spread(timing.times(self.prefill, max(self.settings.repeats, 2), self.device))
        tokens = self.prompt.numel()
        return {
            **asdict(found),
            "tokens_per_second": 1e3 * tokens / found.median_ms,
            "peak_bytes": timing.peak_bytes(self.device),
            "trainable": sum(parameter.numel() for parameter in self.built.trainable()),
        }

    def _measure(self, mode: str) -> Row:
        """Milliseconds of one decoding step: the mean over all new tokens, the median over repeats."""
        settings = self.settings
        self._use(compiled=mode != "decode")
        decode = self._captured() if mode == "decode-graph" else self.decode_one
        graphs = compiling.graphs()
        tokens, logits = self._generate(decode)
        found = []
        for _ in range(settings.repeats):
            self._use(compiled=False)
            self.prefill()
            self._use(compiled=mode != "decode")
            found.append(sum(timing.times(decode, settings.new, self.device)) / settings.new)
        result = timing.spread(found)
        row: Row = {**asdict(result), "tokens_per_second": 1e3 * settings.workload.batch / result.median_ms}
        assert self.reference is not None
        same, first = self.reference
        row["equal_tokens"] = float((tokens == same).float().mean())
        scale = first.abs().max()
        row["logit_deviation"] = float((logits.float() - first.float()).abs().max() / scale)
        if mode != "decode":
            row |= {"compile_seconds": self.compile_seconds, "compiled_graphs": self.graphs}
            row["recompiled_while_timed"] = compiling.graphs() - graphs
        return row

    def _captured(self) -> Callable[[], None]:
        """One compiled decoding step in a CUDA graph: it reads the token it wrote the last time."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._use(compiled=False)
            self.prefill()
            self._use(compiled=True)
            for _ in range(SETTLE):
                self.decode_one()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.decode_one()
        captured = self.logits

        def replay() -> None:
            self.graph.replay()
            self.logits = captured

        return replay


class _LayerCache:
    """The cache as one block sees it. Asked for a layer by its index, the graph of a block would fit no other block."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.layer.update(keys, values, *args, **kwargs)


class _BlockCall:
    """Stands for a block's call where torch itself puts a compiled one. `layer` is its own, already filled once."""

    def __init__(self, call: Callable[..., Any], block: Any, layer: Any) -> None:
        import torch._dynamo

        self.call, self.block, self.cache = call, block, _LayerCache(layer)
        for tensor in vars(layer).values():
            if isinstance(tensor, torch.Tensor):  # its address stays; a guard on it would be a graph for every block
                torch._dynamo.mark_static_address(tensor, guard=False)

    def __call__(self, *args: Any, past_key_values: Any, **kwargs: Any) -> Any:
        return self.call(self.block, *args, past_key_values=self.cache, **kwargs)


def inference_tables(rows: Sequence[Row], title: str) -> list[Table]:
    """One table per phase and mode."""
    return [
        Table(
            f"{title}, {mode}",
            ["variant", "ms", "tokens/s", "/base", "/peft", "equal tokens"],
            [_cells(row) for row in rows if row["mode"] == mode],
        )
        for mode in dict.fromkeys(row["mode"] for row in rows)
    ]


def _cells(row: Row) -> list[str]:
    if row["status"] != "ok":
        return [row["variant"], "failed", *[""] * 4]
    return [
        row["variant"],
        number(row["median_ms"]),
        f"{row['tokens_per_second']:,.0f}",
        ratio(row.get("time_vs_base")),
        ratio(row.get("time_vs_peft")),
        "" if row.get("equal_tokens") is None else f"{100 * row['equal_tokens']:.1f}%",
    ]
