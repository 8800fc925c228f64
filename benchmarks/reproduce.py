"""Make the runs behind docs/results.md and docs/studies.md on one GPU, what tells most first, until the time is over.

    python benchmarks/reproduce.py --data DIR --pictures DIR --output runs/all --minutes 25

First comes what is timed, with nothing beside it. Then four lanes go side by side, so that a search which ends with one
run after another leaves no GPU idle: methods on text, those with scaling vectors, whose searches go far, more seeds of
the few that questions are about, and small runs, which wait for the host. They share the GPU by NVIDIA's MPS where it
is installed. What is finished is kept, and the same command goes on; another machine takes it by `benchmarks/cells.py`,
and `--take` begins with the runs of `benchmarks/results`. `reproduce.json` has the seconds of every command. `--list`
only shows them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cells import unpack  # beside this file
from pictures import write_tasks

from monkeyjump.experiments.conflict_tasks import Setting
from monkeyjump.experiments.conflict_tasks import write_tasks as write_rules
from monkeyjump.methods.presets import COMPARED, PEERS
from monkeyjump.record import write_atomic

HOME = Path(__file__).parent / "opposed"
TAKEN = {"text14": "cells-text14-study-smollm2-135m-h200", "drawings": "cells-drawings-vlm-tiny-h200"}
TEXT = "--lrs 4e-3,8e-3 --widen --data {data}"
ALL = (*COMPARED, *PEERS)
BEST = "moa,moe_propulsion"  # of the mixtures, with one seed
SCALING = ("propulsion", "moe_propulsion", "mjpropulsion")
# the controls are those of `seeds`: no run is made twice
METHODS = f"compare text14-study {TEXT} --no-controls --methods"
OF_MORE = "adapter.tasks=14"  # MoRE alone has embeddings of tasks
PHRASES = (
    "tasks={tasks}/phrases-poster.yaml,{tasks}/phrases-complaints.yaml --widen adapter.r=2 data.answer=text "
    "train.batch_size=16 evaluate.test_limit=200 evaluate.validation_limit=100"
)  # of few words: a run is short
DESKS = "tasks={tasks}/sst2-poster.yaml,{tasks}/sst2-complaints.yaml"  # prompts that differ in more than a word
DRAWINGS = (
    f"compare vlm-tiny --methods {','.join(ALL)} --lrs 2e-3,4e-3,8e-3 --widen adapter.tasks=3 "
    "train.max_steps=60 train.batch_size=16 train.eval_steps=30 evaluate.test_limit=null"
)  # after 120 steps LoRA has 96 to 99 %
RULES = {
    conflict: f"tasks={{tasks}}/wording-2-{conflict}/rule-00.yaml,{{tasks}}/wording-2-{conflict}/rule-01.yaml"
    for conflict in (100, 0)
}  # two that agree on nothing, and two that are one
MAP = (
    "study conflict --conflict 0,0.5,1 --rules 2,8 --ranks 1,4 --cues wording --lrs 2e-3,4e-3,8e-3 "
    "--methods paper,ranks,prompt,oracle,lime,moelora,hydralora "
    "train.max_steps=120 train.batch_size=16 train.eval_steps=120 evaluate.validation_limit=200 evaluate.test_limit=100"
)  # after 150 steps eight rules are learned without routes, too; after 80 nothing is
QUICK = "--recipe quickstart adapter.dropout=0.0 train.max_steps=100 train.batch_size=16 train.eval_steps=100"
FEW = "evaluate.test_limit=200 evaluate.before=false --data {data}"
# times that nothing else may disturb, before everything else
ALONE = (
    (
        "inference",
        "bench inference --methods mjlora,moelora,hydralora,mola,moa --modes prefill,decode-graph --new 32 --jobs 7",
    ),
    ("step", "bench step --methods all --modes graph --jobs 7 --compile-timeout 180"),
)
# (folder under the output, command); runs in one folder are shared
LANES = {
    "methods": (
        ("text14", f"{METHODS} {','.join(name for name in ALL if name not in SCALING)} --seeds 1 {OF_MORE}"),
        ("text14", f"{METHODS} {BEST} --seeds 5"),
        ("text14", f"{METHODS} {','.join(ALL)} --seeds 3 {OF_MORE}"),
        ("text14", f"{METHODS} {','.join(ALL)} --seeds 5 {OF_MORE}"),
    ),
    "scaling": (
        ("text14", f"{METHODS} {','.join(SCALING)} --seeds 1"),
        ("text14", f"ablate {HOME}/one-rate.yaml --recipe text14-study --seeds 5 --data {{data}} train.lr=8e-3"),
    ),
    "seeds": (
        ("text14", f"compare text14-study --methods lora,mjlora --seeds 5 {TEXT}"),
        ("text14", f"ablate {HOME}/defaults-again.yaml --recipe text14-study --seeds 5 {TEXT}"),
    ),
    "small": (
        (
            "phrases-long",
            f"ablate {HOME}/groups-three.yaml --recipe {HOME}/reviews.yaml name=phrases {PHRASES} --seeds 10 "
            "--lrs 2e-3,4e-3,8e-3 train.max_steps=160 train.eval_steps=160",
        ),
        *(
            (
                f"rules-{place}",
                f"ablate {HOME}/shared.yaml --recipe {HOME}/rules.yaml {tasks} adapter.r=2 --seeds 20",
            )
            for place, tasks in RULES.items()
        ),
        ("drawings", f"{DRAWINGS} --seeds 3"),
        ("map", f"{MAP} --seeds 5"),
        (
            "phrases",
            f"ablate {HOME}/groups.yaml --recipe {HOME}/reviews.yaml name=phrases {PHRASES} --seeds 20 "
            "--lrs 2e-3,4e-3,8e-3 train.max_steps=80 train.eval_steps=80",
        ),
        ("drawings", f"{DRAWINGS} --seeds 5"),
        ("studies", f"ablate all {QUICK} --seeds 3 {FEW}"),
        ("defaults", f"ablate {HOME}/defaults.yaml {QUICK} --seeds 8 --lrs 2e-3,4e-3,8e-3 --widen {FEW}"),
        ("defaults", f"ablate {HOME}/defaults-again.yaml {QUICK} --seeds 20 --lrs 2e-3,4e-3,8e-3 --widen {FEW}"),
        (
            "desks",
            f"ablate {HOME}/groups.yaml --recipe {HOME}/reviews.yaml name=desks {DESKS} --seeds 10 --widen "
            "--lrs 2e-3,4e-3,8e-3 adapter.r=2 train.max_steps=500 train.batch_size=32 train.eval_steps=250",
        ),
        (
            "pictures",
            f"compare vlm-tiny --methods {','.join(ALL)} --seeds 3 --lrs 1e-3,2e-3,4e-3 --widen "
            "--data {pictures} tasks={seen} adapter.tasks=6 data.cap=null data.max_length=256 train.max_steps=400 "
            "train.batch_size=32 train.eval_steps=200 evaluate.validation_limit=40 evaluate.test_limit=null "
            "evaluate.before=false",
        ),
    ),
}


class Lane(threading.Thread):
    """One command after another, each until it is done or the time is over."""

    def __init__(self, commands: list[tuple[Path, list[str]]], jobs: int, end: float, took: list[dict]) -> None:
        super().__init__()
        self.commands, self.jobs, self.end, self.took = commands, jobs, end, took

    def run(self) -> None:
        for folder, words in self.commands:
            began = time.time()
            if self.end - began < 10:
                return
            jobs = [] if words[0] == "bench" else ["--jobs", str(self.jobs)]
            command = [sys.executable, "-m", "monkeyjump", *words, *jobs, "--output", str(folder)]
            log = folder.with_suffix(".log")
            with log.open("a") as output:
                process = subprocess.Popen(command, stdout=output, stderr=output)
                try:
                    process.wait(self.end - began)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGINT)  # it writes down what it has
                    process.wait()
            seconds = round(time.time() - began, 1)
            self.took.append({"command": words, "seconds": seconds, "status": process.returncode})
            print(f"{seconds:7.1f} s, status {process.returncode}: {' '.join(words)} (see {log})", flush=True)


def own_tasks(data: Path, output: Path) -> None:
    """The task files of tasks asked both ways beside links to their data, short phrases of SST-2, and rules."""
    folder = output / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    for file in HOME.glob("*-*.yaml"):
        shutil.copy(file, folder)
    for name in ("sst2", "qqp", "qnli"):
        if not (folder / name).exists():
            (folder / name).symlink_to(data.resolve() / name)
    for conflict in (0, 1):
        write_rules(Setting(conflict, rules=2, rank=2, cue="wording"), folder)
    with gzip.open(data / "sst2" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [line for line in file if 2 <= len(json.loads(line)["sentence"].split()) <= 6]
    random.Random(0).shuffle(rows)
    for split, part in (("test", rows[:600]), ("train", rows[600:])):
        write_atomic(folder / "phrases" / f"{split}.jsonl", "".join(part))


def share_the_gpu(output: Path) -> None:
    """Kernels of several processes run at the same time under MPS, instead of in turns."""
    if shutil.which("nvidia-cuda-mps-control"):
        for name in ("PIPE", "LOG"):
            folder = (output / f"mps-{name.lower()}").resolve()
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = str(folder)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the text tasks")
    parser.add_argument("--pictures", type=Path, help="folder of the sets of pictures (default: runs without them)")
    parser.add_argument("--output", type=Path, default=Path("runs/all"))
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--jobs", default="6,3,2,4", metavar="A,B,C,D", help="runs at a time in each lane; 0: none")
    parser.add_argument("--take", action="store_true", help="begin with the runs of benchmarks/results, made elsewhere")
    parser.add_argument("--list", action="store_true", help="only show the commands")
    options = parser.parse_args()
    # a shell that starts this with & ignores Ctrl-C, and so would all commands, which are stopped by it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own_tasks(options.data, options.output)
    seen = write_tasks(options.pictures, None, options.output / "tasks") if options.pictures else []
    places = {"data": options.data, "tasks": options.output / "tasks", "pictures": options.pictures}
    lanes = {
        name: [
            (options.output / folder, command.format(**places, seen=",".join(seen)).split())
            for folder, command in commands
            if seen or folder != "pictures"
        ]
        for name, commands in {"alone": ALONE, **LANES}.items()
    }
    if options.list:
        for commands in lanes.values():
            print(*(" ".join(["monkeyjump", *words, "--output", str(folder)]) for folder, words in commands), sep="\n")
        return
    if options.take:
        for folder, name in TAKEN.items():
            data = str(options.data) if folder == "text14" else None
            unpack(HOME.parent / "results" / f"{name}.json", options.output / folder, data)
    took: list[dict] = []
    end, jobs = time.time() + 60 * options.minutes, [int(count) for count in options.jobs.split(",")]
    timed = [(folder, words) for folder, words in lanes["alone"] if not folder.exists()]
    Lane(timed, 1, end, took).run()
    share_the_gpu(options.output)
    threads = [Lane(lanes[name], count, end, took) for name, count in zip(LANES, jobs, strict=True) if count]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    write_atomic(options.output / "reproduce.json", json.dumps(took, indent=1) + "\n")


if __name__ == "__main__":
    main()
