"""The settings of the benchmarks, which are also the options of their verbs. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monkeyjump.errors import ConfigError


def option(default: Any, words: str) -> Any:
    """A field that the command line can set, with its help."""
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True)
class Settings:
    """What is measured and how. A verb has the options that `VERBS` lists for it; it never reads the others."""

    verb: str = "step"
    device: str = option("cuda", "cuda or cpu (default: cuda if there is one)")
    dtype: str = option("bfloat16", "float32, bfloat16 or float16 (default: bfloat16 on cuda, else float32)")
    output: str | None = option(None, "folder of the record and the logs (default: runs/bench-...)")
    seed: int = option(0, "seed of the weights and the inputs")
    # the model, the batch and what is matched between methods
    shape: str = option("qwen2-0.5b", "qwen2-0.5b, llama-3-8b, smollm2-135m or tiny")
    layers: int | None = option(None, "number of blocks, instead of the shape's")
    batch: int = option(8, "rows of a batch")
    tokens: int = option(512, "tokens of a row, or of the prompt")
    methods: tuple[str, ...] = option(("mjlora", "mjlorafa", "mjadalora", "mjpropulsion"), "methods to measure, or all")
    alone: bool = option(False, "leave out the frozen model and peft-lora; then there are no ratios")
    targets: tuple[str, ...] = option(("q_proj", "k_proj", "v_proj", "o_proj"), "projections that are adapted")
    rank: int | None = option(None, "rank of every method (default: the preset's, 2; MoRE 4)")
    dropout: float = option(0.05, "dropout of the adapters")
    overrides: dict[str, Any] = field(default_factory=dict)  # further settings of our methods
    # the processes
    jobs: int = option(1, "processes that compile at a time; they are timed one by one. 0 runs all in this process")
    hold: int | None = option(None, "processes that may be ready and wait for their turn (default: --jobs)")
    compile_timeout: float = option(600, "seconds in which a process must be ready")
    rounds: int = option(1, "turns of each variant, each of --steps steps")
    # how a variant is run and timed
    modes: tuple[str, ...] = option((), "modes that are timed")
    compile: str = option("model", "what is compiled at once: model, or blocks, each by itself")
    backend: str = option("inductor", "backend of torch.compile")
    steps: int = option(30, "steps that are timed")
    warmup: int = option(5, "steps before them that are not timed")
    optimizer: bool = option(False, "count a step of AdamW with every step")
    scope: str = option("blocks", "blocks: without the head and the loss; model: with both")
    fused_loss: str = option("off", "torch or liger: a loss without logits, which needs --scope model")
    profile: bool = option(False, "record the kernels of a step in the last mode")
    repeats: int = option(5, "how often it is timed")
    new: int = option(64, "tokens that are decoded")
    keep: int = option(50_000, "tokens that are clustered; four times as many are read")
    axes: tuple[str, ...] = option(("tokens", "rank", "experts", "blocks"), "what grows, one at a time")
    points: int | None = option(None, "at most so many on each axis, its ends with them")
    tasks: tuple[str, ...] = option(("builtin",), "tasks that are trained on")
    data: str | None = option(None, "folder of data files (default: each task's own source)")
    tokenizer: str = option("smollm2-135m", "model whose tokenizer reads the texts")
    packing: bool = option(False, "fill rows of --batch x --tokens tokens")
    ops: tuple[str, ...] | None = option(None, "ops to measure (default: all)")
    size: tuple[int, int, int] = (0, 0, 0)  # tokens, width and experts of one op
    copy_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ConfigError(problems, title="invalid bench")

    @property
    def name(self) -> str:
        return f"bench-{self.verb}" + (f"-{self.shape}" if self.verb != "ops" else "")

    @property
    def folder(self) -> Path:
        return Path(self.output or f"runs/{self.name}")

    def problems(self) -> list[str]:
        """Everything that is wrong with these settings, one sentence each."""
        on_gpu = self.device.startswith("cuda")
        chosen = [(name, getattr(self, name), known) for name, known in CHOICES.items()]
        chosen += [("modes", mode, VERBS[self.verb].modes) for mode in self.modes]
        chosen += [("axes", axis, ("tokens", "rank", "experts", "blocks")) for axis in self.axes]
        found = [f"{name}={value!r} must be one of {', '.join(k)}." for name, value, k in chosen if value not in k]
        for name, least in AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                found.append(f"{name}={value} must be at least {least}.")
        if self.rounds > 1 and self.jobs == 0:
            found.append(f"rounds={self.rounds} needs processes that wait for their turn: use --jobs 1 or more.")
        if any(mode.endswith("graph") for mode in self.modes) and not on_gpu:
            found.append("modes='graph' needs a GPU: CUDA graphs exist on no other device; leave this mode out.")
        if self.fused_loss != "off" and self.scope != "model":
            found.append(f"fused_loss needs scope='model', not {self.scope!r}: the blocks alone have no loss.")
        if self.fused_loss == "liger":
            from monkeyjump.training.fused_loss import choose_kernel

            try:
                choose_kernel("liger", on_gpu)
            except ConfigError as error:
                found += error.problems
        return found


_PARTS = ("blocks", "model")
CHOICES = {"compile": _PARTS, "scope": _PARTS, "fused_loss": ("off", "torch", "liger")}
CHOICES["dtype"] = ("float32", "bfloat16", "float16")
AT_LEAST = {"batch": 1, "tokens": 1, "jobs": 0, "hold": 1, "rounds": 1, "steps": 2, "warmup": 1, "repeats": 1}
AT_LEAST |= {"new": 2, "keep": 1, "points": 2}


@dataclass(frozen=True)
class Verb:
    """What a verb measures, its options, and its modes: all of them by default, on a CPU the first `on_cpu`."""

    summary: str
    options: str
    modes: tuple[str, ...]
    on_cpu: int = 1
    defaults: dict[str, Any] = field(default_factory=dict)  # where they are not those of the settings


_ANY = "device dtype output seed"
_MODEL = f"{_ANY} shape layers batch tokens methods alone targets rank dropout jobs hold compile_timeout"
_STEP = f"{_MODEL} modes compile backend steps warmup optimizer"
VERBS = {
    "step": Verb(
        "a training step: the frozen model, PEFT's LoRA and methods",
        f"{_STEP} scope fused_loss profile rounds",
        ("eager", "compile", "graph"),
    ),
    "train": Verb(
        "`monkeyjump train` from start to end, beside PEFT's LoRA",
        f"{_MODEL} rounds modes steps tasks data tokenizer packing",
        ("cold", "warm"),
        on_cpu=2,
        defaults={
            "methods": ("mjlora",),
            "steps": 80,
            "targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"),
            "hold": 99,
        },
    ),
    "inference": Verb(
        "the prompt and the decoding of a generation",
        f"{_MODEL} modes compile backend new repeats",
        ("prefill", "decode", "decode-compile", "decode-graph"),
        on_cpu=2,
        defaults={"compile": "blocks"},
    ),
    "init": Verb(
        "the initialisation of centres: the forwards and the k-means",
        f"{_MODEL} keep repeats",
        ("init",),
        defaults={"methods": ("mjlora",), "repeats": 3},
    ),
    "ops": Verb(
        "each op alone, against reading its input once",
        f"{_ANY} ops repeats",
        ("torch", "triton"),
        on_cpu=2,
        defaults={"jobs": 0, "repeats": 30},
    ),
    "memory": Verb(
        "the peak memory of a training step, with and without logits",
        _STEP,
        ("eager", "compile", "graph"),
        defaults={"modes": ("eager",), "steps": 10, "scope": "model"},
    ),
    "scaling": Verb(
        "the growth of cost with tokens, rank, experts and blocks",
        f"{_STEP} scope fused_loss axes points",
        ("eager", "compile", "graph"),
        defaults={"methods": ("mjlora",), "modes": ("graph",)},
    ),
}
