"""What routing buys where a model reads pictures: vlm-tiny on small real sets, against controls and a linear probe.

    python benchmarks/pictures.py --data DIR --video DIR --seeds 5 --steps 400 --jobs 5 --output pictures.json

DIR holds a folder for each set with train.jsonl, test.jsonl and the pictures (columns image, label); the video folder
holds rows with video, question and answer. All sets are learnt together by one adapter. `projector` trains the
projector alone: its LoRA is multiplied by one millionth. `uniform` gives every adapter the mean gate of the routed one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from monkeyjump.models import load_model
from monkeyjump.tasks import expand, load_examples
from monkeyjump.tasks.media import open_image, read_frames
from monkeyjump.training.recipe import recipe_from
from monkeyjump.training.run import run
from monkeyjump.training.shared import Shared

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "projector": ("lora", {"alpha": 1e-6}),
    "lora": ("lora", {}),
    "mjlora": ("mjlora", {}),
    "mjlora centred": ("mjlora", {"route_space": "centered"}),
    "uniform": ("mjlora_uniform", {}),
}
FREE = ("chartqa", "vqa_rad")  # questions with free answers, known to the library
FRAMES = 4


def write_tasks(data: Path, video: Path | None, folder: Path) -> list[str]:
    """A task file for every set of classes; the names of known tasks for the others."""
    found = []
    for home in sorted(path.parent for path in data.glob("*/train.jsonl")):
        if home.name in FREE:
            found.append(home.name)
            continue
        labels = sorted({json.loads(line)["label"] for line in (home / "train.jsonl").open()})
        path = folder / f"{home.name}_set.yaml"
        lines = {"name": f"{home.name}_set", "prompt": "What is in the picture?", "image": "image", "answer": "label"}
        write_yaml(path, {**lines, "options": labels, "data": files(home)})
        found.append(str(path))
    if video is not None:
        effects = sorted({json.loads(line)["answer"] for line in (video / "train.jsonl").open()})
        path = folder / "tamper_set.yaml"
        lines = {"name": "tamper_set", "prompt": "{question}", "video": "video", "answer": "answer"}
        write_yaml(path, {**lines, "options": effects, "data": files(video)})
        found.append(str(path))
    return found


def files(home: Path) -> dict[str, str]:
    return {split: str((home / f"{split}.jsonl").resolve()) for split in ("train", "test")}


def write_yaml(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))  # JSON is YAML


@torch.no_grad()
def probe(names: list[str], data: str) -> dict[str, dict[str, float]]:
    """Logistic regression on the mean feature of each picture, and the share of the most frequent class."""
    from sklearn.linear_model import LogisticRegression

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, processor = load_model("vlm-tiny", dtype=torch.float32, device=device)
    pixels, found = processor.processor.image_processor, {}

    def features(example: Any) -> np.ndarray:
        media = example.media[0]
        shown = [open_image(media)] if media.kind == "image" else read_frames(media, FRAMES)
        states = model.model.get_image_features(pixels(images=[shown])["pixel_values"].to(device))
        return states.mean((2, 3)).flatten().cpu().numpy()

    for task in expand(names):
        splits = {split: load_examples(task, split, data) for split in ("train", "test")}
        gold = [example.answer for example in splits["test"]]
        found[task.name] = {"chance": 100 * Counter(gold).most_common(1)[0][1] / len(gold)}
        if task.options is not None:
            inputs = {split: np.stack([features(e) for e in examples]) for split, examples in splits.items()}
            classes = [example.answer for example in splits["train"]]
            fitted = LogisticRegression(max_iter=500).fit(inputs["train"], classes)
            found[task.name]["probe"] = 100 * float(fitted.score(inputs["test"], gold))
    return found


def recipe_of(variant: str, seed: int, names: list[str], options: argparse.Namespace, home: Path) -> Any:
    method, adapter = VARIANTS[variant]
    return recipe_from(
        {
            "name": "pictures",
            "model": "vlm-tiny",
            "method": method,
            "seed": seed,
            "tasks": names,
            "adapter": {"modules_to_save": ["multi_modal_projector"], **adapter},
            "data": {
                "folder": options.data, "answer": "text", "max_length": 256, "keep_features": True, "frames": FRAMES,
            },
            "train": {
                "lr": options.lr, "max_steps": options.steps, "batch_size": options.batch, "accumulation": 1,
                "weight_decay": 0.0, "eval_steps": max(1, options.steps // 3), "log_steps": 50,
            },
            "evaluate": {"before": False, "validation_limit": 40},
            "output": str(home / f"{variant.replace(' ', '-')}-{seed}"),
        }
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--video")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time, in processes that share the GPU")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--output", default="pictures.json")
    options = parser.parse_args()
    if options.jobs > 1:
        summarize(side_by_side(options))
        return
    home, shared, results = Path(tempfile.mkdtemp()), Shared(), dict[str, list[dict[str, Any]]]()
    names = write_tasks(Path(options.data), None if options.video is None else Path(options.video), home)
    record: dict[str, Any] = {"settings": vars(options), "probe": probe(names, options.data), "runs": results}
    record["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for variant in options.variants:
            started = time.perf_counter()
            result = run(recipe_of(variant, seed, names, options, home), overwrite=True, shared=shared)
            assert result.report is not None
            scores = {row.task: row.adapter for row in result.report.rows}
            found = {"seed": seed, "tasks": scores, "mean": result.report.mean, "trained": result.parameters.trainable}
            results.setdefault(variant, []).append(found | {"seconds": time.perf_counter() - started})
            shared.give_back(result.model, result.tokenizer)
            print(f"{variant:16}{seed:3}{result.report.mean:8.4f}", flush=True)
            Path(options.output).write_text(json.dumps(record, indent=1))  # what is there is not lost
    summarize(results)


def side_by_side(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Each seed in a process of its own; their records as one."""
    target, shown = Path(options.output), ["--data", options.data, "--steps", options.steps, "--batch", options.batch]
    shown += [
        "--lr",
        options.lr,
        *(["--video", options.video] if options.video else []),
        "--variants",
        *options.variants,
    ]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    parts = {seed: target.with_name(f"{target.stem}-{seed}.json") for seed in seeds}

    def make(seed: int) -> None:
        words = [sys.executable, __file__, *map(str, shown), "--first-seed", str(seed), "--seeds", "1"]
        subprocess.run([*words, "--output", str(parts[seed])], check=False)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(make, seeds))
    records = [json.loads(path.read_text()) for path in parts.values() if path.is_file()]
    runs = {name: [run for r in records for run in r["runs"].get(name, [])] for name in options.variants}
    target.write_text(json.dumps({**records[0], "settings": vars(options), "runs": runs}, indent=1))
    return runs


def summarize(results: dict[str, list[dict[str, Any]]]) -> None:
    for variant, runs in results.items():
        means = [each["mean"] for each in runs]
        if means:
            print(
                f"{variant:16}{fmean(means):8.4f} +- {stdev(means) if len(means) > 1 else 0:.4f} ({len(means)} seeds)"
            )


if __name__ == "__main__":
    main()
