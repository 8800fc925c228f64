"""Time and memory of a collection on a random model of 30 blocks: sums alone, and with a sample of tokens and probes.

    python benchmarks/collecting.py [--tokens 20000] [--width 576]

Every kind of collection runs in a process of its own, because the peak of a process only rises.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from typing import Any

KINDS: dict[str, Any] = {"forward": None, "sums": {}, "sample": {"sample": 2_000, "probed": (3, 120)}}


def measure(kind: str, tokens: int, width: int) -> str:
    import torch
    from peft import get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    import monkeyjump as mj
    from monkeyjump.analysis.collect import collect

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=30,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
    )
    model = get_peft_model(LlamaForCausalLM(config), mj.methods.build("mjlora", "mj_paper", center_init="random"))
    mj.initialize_centers(model)
    rows, length = 16, 64
    batches = [{"input_ids": torch.randint(1000, (rows, length))} for _ in range(max(5, tokens // (rows * length)))]
    tasks = {f"task {n}": batches[n::5] for n in range(5)}
    with torch.no_grad():
        model.eval()(**batches[0])
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if KINDS[kind] is None:
        with torch.no_grad():
            for batch in batches:
                model(**batch, logits_to_keep=1)
    else:
        collect(model, tasks, **KINDS[kind])
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = len(batches) * rows * length
    return (
        f"{kind:8}  {read:7,} tokens  {seconds:6.1f} s  peak {after / 1024:6.0f} MiB, {(after - before) / 1024:+5.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--kind", choices=KINDS)
    options = parser.parse_args()
    if options.kind:
        print(measure(options.kind, options.tokens, options.width))
        return
    for kind in KINDS:
        for tokens in (options.tokens // 4, options.tokens):
            words = ["--kind", kind, "--tokens", str(tokens), "--width", str(options.width)]
            subprocess.run([sys.executable, __file__, *words], check=True)


if __name__ == "__main__":
    main()
