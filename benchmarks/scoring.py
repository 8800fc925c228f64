"""How long scoring takes beside the bare forwards of the same tokens, on random weights of SmolLM2's shape.

    python benchmarks/scoring.py --data DIR --tokenizer smollm2-135m --output scoring.json

The floor runs the batches of `evaluate` through the model again, base and adapter, with all tensors on the device and
nothing but the logits of the last token.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from peft import get_peft_model

from monkeyjump import methods
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.variants import plain_model
from monkeyjump.evaluation.forward import AnswerReader, evaluating
from monkeyjump.evaluation.jobs import make_batches, make_jobs
from monkeyjump.evaluation.run import evaluate, without_adapter
from monkeyjump.models import load_tokenizer
from monkeyjump.tasks import expand, load_examples
from monkeyjump.tasks.encode import Encoder


def wait() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="glue,commonsense")
    parser.add_argument("--data")
    parser.add_argument("--tokenizer", default="smollm2-135m")
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--output", default="scoring.json")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    dtype = "bfloat16" if gpu else "float32"
    base = plain_model(Settings("step", device="cuda" if gpu else "cpu", dtype=dtype, shape=options.shape))
    base.resize_token_embeddings(max(49_152, base.config.vocab_size), mean_resizing=False)
    tokenizer = load_tokenizer(options.tokenizer)
    model = get_peft_model(base, methods.build("mjlora", "mj_paper", center_init="random_normalized"))
    tasks = expand(options.tasks.split(","))
    settings = {"data": options.data, "limit": options.limit, "mode": "letter", "progress": False}
    evaluate(model, tokenizer, tasks, **{**settings, "limit": 30})  # kernels are compiled
    seconds = []
    for _ in range(2):  # the second finds the texts encoded
        started = wait()
        report = evaluate(model, tokenizer, tasks, **settings)
        seconds.append(wait() - started)

    encoder = Encoder(tokenizer, {task.name: n for n, task in enumerate(tasks)})
    examples = {task.name: load_examples(task, "test", options.data)[: options.limit] for task in tasks}
    jobs = [job for rows in examples.values() for job in make_jobs(encoder, rows, "letter")]
    reader = AnswerReader(model, tokenizer.pad_token_id or 0)
    with evaluating(model):
        batches = make_batches(jobs, reader.batch_tokens())
        inputs = [reader.prepare(batch) for batch in batches]
        times = []
        for _ in range(2):
            started = wait()
            with without_adapter(model):
                for given in inputs:
                    reader.read(given, cached=False)
            for given in inputs:
                reader.read(given, cached=False)
            times.append(wait() - started)
    found = {
        "seconds": seconds[0],
        "again_seconds": seconds[1],
        "forward_seconds": min(times),
        "ratio": seconds[0] / min(times),
        "again_ratio": seconds[1] / min(times),
        "rows": sum(row.n for row in report.rows),
        "tokens": sum(len(job.prompt) for job in jobs),
        "batches": len(batches),
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "settings": vars(options),
    }
    with open(options.output, "w") as file:
        json.dump(found, file)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
