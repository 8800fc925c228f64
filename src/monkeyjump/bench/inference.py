"""Generation: the prompt at once, then token by token into a static cache; plain, compiled, and in a CUDA graph.

Shapes: B rows, T prompt tokens, S new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import StaticCache

from monkeyjump.bench import runs
from monkeyjump.bench.results import milliseconds, ratio
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.turns import Measurement, Row
from monkeyjump.bench.variants import build, random_ids

COLUMNS = [
    ("variant", "variant", str),
    ("ms", "median_ms", milliseconds),
    ("tokens/s", "tokens_per_second", "{:,.0f}".format),
    ("/floor", "time_vs_floor", ratio),
    ("/peft", "time_vs_peft", ratio),
    ("equal tokens", "equal_tokens", "{:.1%}".format),
]


def measurements(settings: Settings) -> list[Measurement]:
    return [Measurement(InferenceRun, name, settings) for name in settings.methods]


class InferenceRun(runs.ModesRun):
    """One variant: greedy decoding through one cache whose tensors, like the token's, stay where they are."""

    def __init__(self, variant: str, settings: Settings) -> None:
        super().__init__(variant, settings)
        self.built = build(variant, settings)
        self.built.model.eval()
        self.model = self.built.causal_lm
        self.prompt = random_ids(self.model, settings, self.generator)
        config: Any = self.model.config
        self.cache = StaticCache(config=config, max_cache_len=settings.tokens + settings.new)
        self.token = torch.zeros(settings.batch, 1, dtype=torch.long, device=self.device)
        self.logits = torch.empty(0)  # of the last decoded token, [B, V]

    @torch.no_grad()
    def _advance(self, ids: torch.Tensor) -> None:
        out = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **self.built.extra
        )
        self.logits = out.logits[:, -1]
        self.token.copy_(self.logits.argmax(-1, keepdim=True))

    def prefill(self) -> None:
        self.cache.reset()
        self._advance(self.prompt)

    def begin(self, compiled: bool) -> None:
        """Read the prompt, which is never compiled; the decoding after it is called compiled or as it is."""
        self.use(compiled=False)
        self.prefill()
        self.use(compiled)

    def decode_one(self) -> None:
        self._advance(self.token)

    def warm_up(self) -> None:
        """The first generation, whose tokens are the ones to match, and the compilation of a decoding step."""
        self.reference = self._generate(self.decode_one, compiled=False)
        if "decode-compile" in self.settings.modes or "decode-graph" in self.settings.modes:
            self.prefill()
            self.compile(self._compiled_parts, self._settle)
        runs.release_cache(self.device)

    def _settle(self) -> None:
        for _ in range(runs.SETTLE):
            self.decode_one()

    def _compiled_parts(self, call: Any) -> list[tuple[Any, Any]]:
        if self.settings.compile == "model":
            return [(self.model, partial(call, self.model))]
        pairs = zip(self.built.decoder.layers, self.cache.layers, strict=True)
        return [(block, _BlockCall(call, block, layer)) for block, layer in pairs]

    def _generate(self, decode: Callable[[], object], compiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """All new tokens [B, S] after the prompt, and the logits of the first one that was decoded, [B, V]."""
        self.begin(compiled)
        tokens, logits = [], torch.empty(0)
        for _ in range(self.settings.new):
            tokens.append(self.token.clone())
            decode()
            logits = logits if logits.numel() else self.logits.clone()
        return torch.cat(tokens, dim=1), logits

    def measure(self, mode: str) -> Row:
        if mode != "prefill":
            return self._measure_decoding(mode)
        self.prefill()
        runs.reset_peak(self.device)
        found = runs.summary(runs.times(self.prefill, max(self.settings.repeats, 2), self.device))
        return {
            **found,
            "tokens_per_second": 1e3 * self.prompt.numel() / found["median_ms"],
            "peak_bytes": runs.peak_bytes(self.device),
            "trainable": sum(parameter.numel() for parameter in self.built.trainable()),
        }

    def _measure_decoding(self, mode: str) -> Row:
        """Milliseconds of one decoding step: the mean over all new tokens, the median over repeats."""
        settings, compiled = self.settings, mode != "decode"
        decode = self._captured() if mode == "decode-graph" else self.decode_one
        graphs = runs.graphs_made()
        tokens, logits = self._generate(decode, compiled)
        means = []
        for _ in range(settings.repeats):
            self.begin(compiled)
            means.append(sum(runs.times(decode, settings.new, self.device)) / settings.new)
        found = runs.summary(means)
        expected_tokens, expected_logits = self.reference
        difference = (logits.float() - expected_logits.float()).abs().max()
        row: Row = {
            **found,
            "tokens_per_second": 1e3 * settings.batch / found["median_ms"],
            "equal_tokens": float((tokens == expected_tokens).float().mean()),
            "logit_deviation": float(difference / expected_logits.abs().max()),
        }
        if compiled:
            row |= {**self.compiler, "recompiled_while_timed": runs.graphs_made() - graphs}
        return row

    def _captured(self) -> Callable[[], None]:
        """One compiled decoding step in a CUDA graph: it reads the token it wrote the last time."""

        def settle() -> None:
            self.begin(compiled=True)
            self._settle()

        graph = runs.captured(self.decode_one, settle)
        logits = self.logits

        def replay() -> None:
            graph.replay()
            self.logits = logits

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
