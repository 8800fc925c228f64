"""Two threads on one model: each must get what it would get alone.

`python -m tests.equivalence.thread_runs 2000 100` runs 2,000 forwards and 100 generations a thread for every case.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

import monkeyjump as mj
from tests.helpers import adapted, disturb, tiny_llama, token_ids, wrap

CASES: dict[str, Callable[[], Any]] = {
    "centroid, token": lambda: adapted(tiny_llama(2)),
    "centroid, sequence": lambda: adapted(tiny_llama(2), granularity="sequence"),
    "centroid, task": lambda: adapted(tiny_llama(2), granularity="task"),
    "learned, token": lambda: built("hydralora"),
    "learned, feed-forward": lambda: built("mixlora"),
    "learned, by task": lambda: built("more"),
}


def built(method: str, **changes: Any) -> Any:
    model = wrap(tiny_llama(2), mj.methods.build(method, r=2, task_type="CAUSAL_LM", **changes))
    disturb(model)
    return model


def inputs(case: str, thread: int, turn: int) -> dict[str, torch.Tensor]:
    """Rows of changing number and length; the threads hold different tokens, masks and tasks."""
    batch = {"input_ids": token_ids(1 + (thread + turn) % 3, 4 + 3 * thread + turn % 4, seed=10 * thread + turn % 5)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, : turn % 3] = 0
    if "task" in case:
        batch["task_ids"] = torch.full((len(batch["input_ids"]),), thread)
    return batch


def run(case: str, forwards: int, generations: int) -> list[str]:
    """What went wrong in two threads; nothing, if all is well."""
    model = CASES[case]().eval()
    greedy = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    calls: list[tuple[str, Callable[[dict], torch.Tensor], int]] = [
        ("forward", lambda batch: model(**batch).logits, forwards),
        ("generation", lambda batch: model.generate(**batch, **greedy), generations),
    ]
    wrong: list[str] = []

    @torch.no_grad()
    def work(thread: int) -> None:
        for what, call, times in calls:
            for turn in range(times):
                try:
                    found = call(inputs(case, thread, turn))
                except Exception as error:
                    wrong.append(f"{what} {turn} of thread {thread}: {error!r}")
                    continue
                if not torch.equal(found, alone[what, thread, turn % 60]):
                    wrong.append(f"{what} {turn} of thread {thread} differs")

    with torch.no_grad():
        alone = {  # what is asked for repeats after 60 turns
            (what, thread, turn): call(inputs(case, thread, turn))
            for what, call, times in calls
            for thread in range(2)
            for turn in range(min(times, 60))
        }
    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


if __name__ == "__main__":
    for name in CASES:
        problems = run(name, int(sys.argv[1]), int(sys.argv[2]))
        print(f"{name}: {len(problems)} wrong {problems[:2]}", flush=True)
