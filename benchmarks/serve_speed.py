"""Tokens per second of `monkeyjump serve` at 1, 8 and 64 clients: an adapter, and its base model served the same way.

    python benchmarks/serve_speed.py --shape smollm2-135m --new 64 --output serve_speed.json

Random weights of a model's shape, MJ-LoRA with token routing, greedy answers that do not end early. The server runs in
this process and the clients in another, OpenAI's own; each client asks one question after another. `in turns` is the
server as it starts, `together` is --continuous-batching. Every round is run twice and the second counts: in the first
the server records forwards of new shapes (`first_tokens_per_second`). In turns, more clients wait longer for the same
tokens per second, so that at most eight are tried.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}{{ 'assistant:' }}"


def make_tokenizer(size: int) -> Any:
    """One token per byte, and names for all other ids of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<end>", *alphabet, *(f"t{index}" for index in range(size - 1 - len(alphabet)))]
    backend = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_answerer(shape: str) -> Any:
    import torch
    from peft import get_peft_model

    from monkeyjump import methods
    from monkeyjump.bench.settings import Settings
    from monkeyjump.bench.variants import plain_model
    from monkeyjump.evaluation.load import Adapters, NamedAdapter
    from monkeyjump.serving.answers import Answerer

    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    base = plain_model(Settings("step", device=device, dtype=dtype, shape=shape)).eval()
    model = get_peft_model(base, methods.build("mjlora", "mj_paper", center_init="random_normalized")).eval()
    tokenizer = make_tokenizer(base.config.vocab_size)
    return Answerer(Adapters(model, tokenizer, "base", {"mjlora": NamedAdapter("default")}))


def forwards(answerer: Any) -> list[dict[str, Any]]:
    """Milliseconds of a forward as the host launches it and as one graph, for both sides; nothing without a GPU."""
    import torch

    found: list[dict[str, Any]] = []
    model = answerer.model
    for rows, side in itertools.product((64, 128, 1024) if answerer.device.type == "cuda" else (), ("mjlora", "base")):
        ids = torch.randint(300, 4000, (1, rows), device="cuda")

        def run(ids: Any = ids) -> None:
            model.get_base_model()(input_ids=ids, use_cache=False)

        with torch.inference_mode(), nullcontext() if side == "mjlora" else model.disable_adapter():
            graph = torch.cuda.CUDAGraph()
            run()
            with torch.cuda.graph(graph):
                run()
            eager, recorded = _milliseconds(run), _milliseconds(graph.replay)
        found.append({"side": side, "rows": rows, "eager_ms": eager, "graph_ms": recorded})
    return found


def _milliseconds(work: Callable[[], None], times: int = 20) -> float:
    import torch

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times * 1e3


@contextmanager
def served(api: Any) -> Iterator[str]:
    import uvicorn

    from monkeyjump.serving.http import bound
    from monkeyjump.serving.server import application

    with bound("127.0.0.1", 0) as listening:
        server = uvicorn.Server(uvicorn.Config(application(api), log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


def ask(url: str, name: str, clients: int, each: int, prompt: int, new: int) -> dict[str, float]:
    """What all clients together get: runs in a process of its own."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)

    def questions(number: int) -> tuple[int, list[float]]:
        tokens, seconds = 0, []
        for turn in range(each):
            content = f"{number} {turn} ".ljust(prompt, "x")
            started = time.perf_counter()
            found = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": content}], max_tokens=new
            )
            seconds.append(time.perf_counter() - started)
            tokens += found.usage.completion_tokens if found.usage else 0
        return tokens, seconds

    with ThreadPoolExecutor(clients) as pool:
        started = time.perf_counter()
        found = list(pool.map(questions, range(clients)))
        elapsed = time.perf_counter() - started
    waits = sorted(second for _, seconds in found for second in seconds)
    tokens = sum(count for count, _ in found)
    return {
        "tokens": tokens,
        "seconds": elapsed,
        "tokens_per_second": tokens / elapsed,
        "median_request_seconds": waits[len(waits) // 2],
        "longest_request_seconds": waits[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--ways", default="in turns,together", help="ways to serve")
    parser.add_argument("--each", type=int, default=2, help="questions of each client")
    parser.add_argument("--turns", type=int, default=1, help="how often adapter and base model take turns")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt, without the template")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--output", default="serve_speed.json")
    options = parser.parse_args()

    import torch
    import transformers

    from monkeyjump.serving.completions import Limits
    from monkeyjump.serving.server import Api

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    answerer, rows = make_answerer(options.shape), list[dict[str, Any]]()
    record = {"rows": rows, "forwards": forwards(answerer), "device": where, **versions, "settings": vars(options)}
    spawn = multiprocessing.get_context("spawn")
    tried = list(map(int, options.clients.split(",")))
    for way, turn, name in itertools.product(options.ways.split(","), range(options.turns), ("mjlora", "base")):
        counts = [clients for clients in tried if way != "in turns" or clients <= 8]
        api = Api(answerer, Limits(), None if way == "in turns" else name)
        started = time.perf_counter()
        api.warm_up()  # as `monkeyjump serve` does
        record[f"warm_up_seconds of {name}, {way}, turn {turn}"] = time.perf_counter() - started
        with served(api) as url, spawn.Pool(1) as pool:
            for clients in counts:
                asked = (url, name, clients, options.each, options.prompt, options.new)
                first, found = (pool.apply(ask, asked) for _ in range(2))
                first_speed = {"first_tokens_per_second": first["tokens_per_second"]}
                rows.append({"way": way, "turn": turn, "side": name, "clients": clients, **found, **first_speed})
        Path(options.output).write_text(json.dumps(record), encoding="utf-8")
        del api  # a ragged batch has taken most of the GPU's memory
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
