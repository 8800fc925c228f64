"""Malformed recipes, tasks, studies, configurations, data and adapter folders: a clean error in time, or a valid one.

`MONKEYJUMP_FUZZ=20000` makes as many of each kind; a few are enough in between.
"""

from __future__ import annotations

import json
import os
import random
import resource
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors import SafetensorError

from monkeyjump import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.load import load_adapter
from monkeyjump.experiments.study import load_study
from monkeyjump.models import load_model
from monkeyjump.tasks import load_examples
from monkeyjump.tasks.task_file import load_task_file
from monkeyjump.training.recipe import load_recipe, recipe_from
from tests.helpers import tiny_llama
from tests.tiny_folder import save_tiny_model

COUNT = int(os.environ.get("MONKEYJUMP_FUZZ", "60"))
MOST = 500_000_000  # bytes that one input may add to what the process held before; these files have some kilobytes
LONGEST = 20.0  # seconds for one input, on a busy machine; most take milliseconds

WORDS = [
    *(
        "null",
        "true",
        "false",
        "~",
        "-1",
        "0",
        "1",
        "2",
        "1e308",
        ".inf",
        "-.inf",
        ".nan",
        "1e-400",
        "9" * 400,
        "[]",
        "{}",
    ),
    *(
        "''",
        '"',
        "'",
        "{",
        "}",
        "[",
        "]",
        ":",
        ": ",
        "- ",
        "&a ",
        "*a",
        "!!python/object/apply:os.system [ls]",
        "!!binary |",
    ),
    *(
        "\t",
        "\n",
        "\r",
        "\x00",
        "\ufeff",
        "\u202e",
        "é",
        "\U0001f412",
        "..",
        "../../etc/passwd",
        "/",
        "\\",
        "%",
        "$",
        "{text}",
    ),
    *(
        "{0}",
        "{a[b]}",
        "{a.b.c}",
        "{!r}",
        "{:>99999999}",
        "a" * 5000,
        "[" * 3000,
        "{a: " * 300,
        "<<: *a",
        "? ",
        "|",
        ">",
        "#",
    ),
    *(
        "model",
        "tasks",
        "adapter",
        "train",
        "lr",
        "method",
        "data",
        "options",
        "answer",
        "prompt",
        "nan",
        "NaN",
        "Infinity",
    ),
]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Some of: a piece deleted, doubled or replaced, a hostile word put in, a bit turned, the end cut off."""
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(content) + 1)
        end = min(len(content), place + rng.randint(1, 20))
        word = rng.choice(WORDS).encode()
        content = rng.choice(
            [
                content[:place] + content[end:],
                content[:end] + content[place:],
                content[:place] + word + content[end:],
                content[:place] + word + content[place:],
                content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :],
                content[:place],
            ]
        )
    return content


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON, with numbers and texts that break things."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 2:
        return rng.choice([0, -1, 1, 2, 10**30, -(10**30), 1e308, float("inf"), float("nan"), 1e-400, 2**31, 0.5, True])
    if kind < 5:
        return rng.choice(WORDS)
    if kind == 5:
        return None
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(WORDS): value(rng, depth + 1) for _ in range(rng.randint(0, 3))}


def peak() -> int:
    """The most bytes this process ever held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def clean(work: Callable[[], Any], what: Any) -> bool:
    """Whether the input was refused; anything but our own error, and a wait, is a fault that names the input."""
    began, largest = time.monotonic(), peak()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    except ConfigError as error:
        if str(error).strip():
            return True
        raise AssertionError(f"an error without words for {what!r}") from error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} for {what!r}") from error
    finally:
        assert time.monotonic() - began < LONGEST, f"too long for {what!r}"
        assert peak() - largest < MOST, f"too much memory for {what!r}"
    return False


RECIPE = b"""
name: mine
model: smollm2-135m
method: mjlora
tasks: [opinion, own.yaml]
adapter: {r: 2, target_modules: [q_proj, v_proj], layers_to_route: [0, 1]}
data: {answer: letter, caps: {opinion: 3}, weights: {opinion: 2.0}, buckets: [64, 128]}
train: {lr: 1.0e-3, epochs: 1, schedule: cosine, compile: null, report_to: []}
evaluate: {mode: null, validation_limit: 4}
seed: 3
"""
TASK = b"""
name: own
prompt: "Is it good? {text} {more.list[0]}"
context: "{title}"
options: {0: no, 1: yes}
answer: label
data: {train: train.jsonl, test: test.csv}
metric: accuracy
description: mine
"""
STUDY = b"""
title: Ranks
vary: adapter.r
values: [1, 2, 3]
variants: {large: [adapter.r=8]}
reference: "2"
expect: ["2 > 1"]
"""


@pytest.mark.parametrize(("content", "load"), [(RECIPE, load_recipe), (TASK, load_task_file), (STUDY, load_study)])
def test_files_of_users(content: bytes, load: Callable[[str], Any], tmp_path: Path) -> None:
    rng, path, refused = random.Random(0), tmp_path / "file.yaml", 0
    path.write_bytes(content)
    load(str(path))
    for _ in range(COUNT):
        broken = mutated(content, rng)
        path.write_bytes(broken)
        refused += clean(partial(load, str(path)), broken)
    assert refused > COUNT / 3


def test_recipes_and_configurations_of_any_values() -> None:
    rng, refused = random.Random(1), 0
    fields = [name for name in MonkeyJumpConfig.__dataclass_fields__ if name not in ("peft_type", "auto_mapping")]
    whole = load_recipe("quickstart").to_dict()
    for _ in range(COUNT):
        given = {rng.choice(fields): value(rng) for _ in range(rng.randint(1, 3))}
        refused += clean(partial(MonkeyJumpConfig, **given), given)
        settings = json.loads(json.dumps(whole))
        section = rng.choice([settings, settings["data"], settings["train"], settings["evaluate"], settings["adapter"]])
        section[rng.choice([*section, "unknown"])] = value(rng)
        refused += clean(partial(recipe_from, settings), settings)
    assert refused > COUNT / 2


DATA = {
    "csv": b'text,title,label\n"a, b",t,0\nc,"d\ne",1\n',
    "jsonl": b'{"text": "a", "title": "t", "label": 0}\n{"text": "b", "title": "u", "label": 1}\n',
    "json": b'[{"text": "a", "title": "t", "label": 0}, {"text": "b", "title": "u", "label": 1}]',
    "tsv": b"text\ttitle\tlabel\na\tt\t0\nb\tu\t1\n",
}


@pytest.mark.parametrize("ending", DATA)
def test_data_of_users(ending: str, tmp_path: Path) -> None:
    rng, refused = random.Random(2), 0
    task = {
        "name": "own",
        "prompt": "{text}",
        "context": "{title}",
        "options": {"0": "no", "1": "yes"},
        "answer": "label",
    }
    for number in range(COUNT):
        file = tmp_path / f"rows-{number}.{ending}"  # what was read stays in memory under its name
        file.write_bytes(broken := mutated(DATA[ending], rng))
        (tmp_path / "own.yaml").write_text(json.dumps({**task, "data": {"test": file.name}}))
        loaded = load_task_file(tmp_path / "own.yaml")
        refused += clean(partial(load_examples, loaded, "test"), broken)
    assert COUNT > refused > 0  # and some change nothing that matters


def test_adapter_folders_of_strangers(tmp_path: Path) -> None:
    """Both files of an adapter, with bytes changed: refused, or loaded with finite numbers of the right shapes."""
    rng = random.Random(3)
    model = get_peft_model(tiny_llama(layers=2), MonkeyJumpConfig(target_modules=["q_proj", "k_proj", "v_proj"]))
    model.save_pretrained(str(tmp_path / "good"))
    files = {
        name: (tmp_path / "good" / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    base, bad = tiny_llama(layers=2), tmp_path / "bad"
    bad.mkdir()
    for _ in range(max(10, COUNT // 4)):
        for name, content in files.items():
            (bad / name).write_bytes(content)
        name = rng.choice(list(files))
        (bad / name).write_bytes(broken := mutated(files[name], rng))

        def load() -> None:
            try:
                found = PeftModel.from_pretrained(base, bad)
            except (ValueError, OSError, RecursionError, SafetensorError) as error:  # of PEFT, JSON and safetensors
                raise ConfigError(f"{type(error).__name__}: {error}") from error
            except KeyError as error:  # PEFT's, of a kind of adapter that nobody has
                if b'"peft_type": "MONKEYJUMP"' in (bad / "adapter_config.json").read_bytes():
                    raise
                raise ConfigError(str(error)) from error
            weights = [p for key, p in found.state_dict().items() if "monkeyjump_" in key]
            assert all(torch.isfinite(p).all() for p in weights)
            found.unload()

        clean(load, (name, broken[:300]))


def test_adapter_folders_of_strangers_through_the_verbs(tmp_path: Path) -> None:
    """`load_adapter` has one kind of error, whatever is wrong, and reads no pickle."""
    rng, home, refused = random.Random(4), save_tiny_model(tmp_path / "tiny"), 0
    base = load_model(str(home))
    model = get_peft_model(base[0], MonkeyJumpConfig(target_modules=["q_proj", "k_proj", "v_proj"]))
    model.save_pretrained(str(tmp_path / "bad"))
    bad, base = tmp_path / "bad", (model.unload(), base[1])
    recipe = {"model": str(home), "tasks": ["opinion"], "data": {"folder": None}}
    origin = {"base": {"name": "tiny", "architecture": "Llama", "parameters": 3}, "task_ids": {"opinion": 0}}
    (bad / "recipe.json").write_text(json.dumps(recipe | {"origin": origin}))
    files = {
        name: (bad / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors", "recipe.json")
    }

    def load() -> None:
        load_adapter(bad, loaded=base)[0].unload()

    for _ in range(max(10, COUNT // 4)):
        for name, content in files.items():
            (bad / name).write_bytes(content)
        name = rng.choice(list(files))
        (bad / name).write_bytes(broken := mutated(files[name], rng))
        refused += clean(load, (name, broken[:300]))
    assert refused > COUNT / 20
    for name, content in files.items():
        (bad / name).write_bytes(content)
    (bad / "adapter_model.safetensors").rename(bad / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin, a pickle, which may run code"):
        load_adapter(bad, loaded=base)
