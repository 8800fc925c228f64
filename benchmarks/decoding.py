"""Tokens per second of greedy generation: recorded steps, steps as they come, and Transformers' `generate`.

    python benchmarks/decoding.py --rows 64 --prompt 100 --new 64 --output decoding.json

Random weights of SmolLM2's shape, MJ-LoRA and its base model; prompts of several lengths, and no row ends early. Each
way generates twice, its prompts included: the first time compiles kernels and records the step, the second counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from peft import get_peft_model

from monkeyjump import methods
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.variants import plain_model
from monkeyjump.evaluation.decode import Decoder
from monkeyjump.evaluation.forward import AnswerReader, evaluating, padded
from monkeyjump.evaluation.jobs import Batch, Job
from monkeyjump.evaluation.run import without_adapter
from monkeyjump.evaluation.score import Sides
from monkeyjump.tasks import Example


def wait() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def generate(model: Any, jobs: list[Job], new: int, device: str) -> torch.Tensor:
    ids, lengths = (torch.from_numpy(made).to(device) for made in padded([job.prompt for job in jobs], 0, left=True))
    width = ids.shape[1]
    mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=ids, attention_mask=mask, **settings)[:, width:]


def decoder(model: Any, recorded: bool) -> Callable[[Batch], torch.Tensor]:
    made = Decoder(AnswerReader(model, 0), set())
    if not recorded:
        made._new_graph = None
    return made.answers


def make_jobs(options: argparse.Namespace, vocabulary: int) -> list[Job]:
    generator = torch.Generator().manual_seed(0)
    example = Example("", options=("",), label=0)
    lengths = [options.prompt - index % max(1, options.prompt // 5) for index in range(options.rows)]
    prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]
    return [Job(n, example, "generate", prompt, [[0] * (options.new - 8)], 0) for n, prompt in enumerate(prompts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--output", default="decoding.json")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", "bfloat16") if gpu else ("cpu", "float32")
    base = plain_model(Settings("step", device=device, dtype=dtype, shape=options.shape))
    model: Any = get_peft_model(base, methods.build("mjlora", "mj_paper", center_init="random_normalized"))
    jobs = make_jobs(options, base.config.vocab_size)
    rows: list[dict[str, Any]] = []
    with evaluating(model):
        sides: Sides = {"base": partial(without_adapter, model), "mjlora": nullcontext}
        for side, switched in sides.items():
            with switched():
                batch, expected = Batch(jobs, 0), None
                ways: dict[str, Callable[[], torch.Tensor]] = {
                    "recorded": partial(decoder(model, True), batch),
                    "as they come": partial(decoder(model, False), batch),
                    "generate": partial(generate, model, jobs, options.new, device),
                }
                for way, work in ways.items():
                    seconds = []
                    for _ in range(2):
                        started = wait()
                        found = work()
                        seconds.append(wait() - started)
                    expected = found if expected is None else expected
                    row = {"side": side, "way": way, "tokens_per_second": options.rows * options.new / seconds[1]}
                    equal = float((found == expected).float().mean())
                    rows.append({**row, "first_seconds": seconds[0], "seconds": seconds[1], "equal_tokens": equal})
    where = torch.cuda.get_device_name() if gpu else "cpu"
    record = {"rows": rows, "device": where, "torch": torch.__version__, "settings": vars(options)}
    with open(options.output, "w") as file:
        json.dump(record, file)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
