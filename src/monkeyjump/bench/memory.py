"""Peak memory of a training step of the whole causal LM, with the loss from logits and without them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from monkeyjump.bench.results import bytes_in_words, ratio
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.step import StepRun
from monkeyjump.bench.turns import Measurement

TITLE = "Bench memory by mode and loss, {shape}, {batch} x {tokens} tokens"
SAME = TABLE_FOR_EACH = ("mode", "loss")
COLUMNS = [  # `above model` is the peak less the model, its adapters and the batch
    ("variant", "variant", str),
    ("peak", "peak_bytes", bytes_in_words),
    ("/floor", "memory_vs_floor", ratio),
    ("/peft", "memory_vs_peft", ratio),
    ("above model", "extra_bytes", bytes_in_words),
    ("/floor", "extra_memory_vs_floor", ratio),
    ("/peft", "extra_memory_vs_peft", ratio),
    ("trainable", "trainable", "{:,}".format),
]


def measurements(settings: Settings) -> list[Measurement]:
    """Every variant with every loss of this machine: from logits, ours without them, and liger-kernel's."""
    has_liger = settings.device.startswith("cuda") and find_spec("liger_kernel") is not None
    losses = {"off": "logits", "torch": "torch", **({"liger": "liger"} if has_liger else {})}
    return [
        Measurement(StepRun, name, replace(settings, fused_loss=loss), {"loss": label})
        for loss, label in losses.items()
        for name in settings.methods
    ]
