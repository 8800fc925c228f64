"""The rows that are looked at: of tasks, of a text or of a picture. They are encoded once and read several times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monkeyjump.analysis.collect import Batch, collect
from monkeyjump.analysis.usage import ExpertUsage
from monkeyjump.errors import ConfigError
from monkeyjump.tasks import Example, Task, load_examples
from monkeyjump.tasks.batches import by_tokens
from monkeyjump.tasks.collate import PaddingCollator
from monkeyjump.tasks.encode import Encoded, Encoder
from monkeyjump.tasks.media import Media
from monkeyjump.training.data import CPU_TOKENS, GPU_TOKENS, encoding
from monkeyjump.training.recipe import Recipe
from monkeyjump.tuner.model import find_context

_ABOUT_PICTURES = "What does the picture show?"


@dataclass
class Rows:
    """Sequences of one task. Every iteration makes the same batches again, so that pictures are not kept in memory."""

    sequences: list[Encoded]
    collate: PaddingCollator

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Batch]:
        budget = GPU_TOKENS if torch.cuda.is_available() else 2 * CPU_TOKENS
        for batch in by_tokens(range(len(self)), [len(each) for each in self.sequences], budget, "rows"):
            yield self.collate([self.sequences[place] for place in batch])

    @property
    def answered(self) -> bool:
        """Whether some row has more than its prompt and the end token."""
        return any(len(each) > each.prompt_length + 1 for each in self.sequences)


def rows_of_tasks(
    encoder: Encoder, tasks: Sequence[Task], count: int, data: str | None, seed: int, split: str = "test"
) -> dict[str, Rows]:
    """Up to `count` rows of each task that has some."""
    collate = PaddingCollator(encoder.tokenizer.pad_token_id, pictures=encoder.pictures)
    return {
        task.name: Rows(encoder.encode_all(load_examples(task, split, data, limit=count, seed=seed)), collate)
        for task in tasks
        if split not in task.absent
    }


def rows_of_user(encoder: Encoder, text: str | None, image: str | None, count: int) -> dict[str, Rows]:
    """A user's own input as a task of its own: every line of a text is a row, or the text is asked about a picture."""
    collate = PaddingCollator(encoder.tokenizer.pad_token_id, pictures=encoder.pictures)
    media = (Media("image", str(Path(image).expanduser().resolve())),) if image else ()
    words = read_text(text) if text else _ABOUT_PICTURES
    questions = [words] if image else [line for line in words.splitlines() if line.strip()]
    if not questions:
        raise ConfigError(f"--text {text!r} holds no words. Give a text, or a file with one row in each line.")
    name = "picture" if image else "text"
    examples = [Example(question, task=name, media=media) for question in questions[:count]]
    return {name: Rows(encoder.encode_all(examples), collate)}


def read_text(text: str) -> str:
    """The content of a file of this name, or the words themselves."""
    try:
        path = Path(text).expanduser()
        return path.read_text(encoding="utf-8") if path.is_file() else text
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {text!r} is a file that is not UTF-8 text ({error}). Convert it.") from error
    except (OSError, ValueError):  # too long for a file's name, or with characters that none has
        return text


def routes(model: nn.Module) -> bool:
    """Whether an active adapter of the model chooses among experts somewhere."""
    context = find_context(model)
    return context is not None and any(blocks.active() for blocks in context.lists.values())


def measure_usage(
    model: nn.Module, tokenizer: Any, tasks: list[Task], recipe: Recipe, rows: int = 64
) -> ExpertUsage | None:
    """Where the tokens of up to `rows` test rows of each task go; None for a model that does not route."""
    if not routes(model):
        return None
    usage = collect(model, _test_rows(tokenizer, tasks, recipe, rows)).usage
    return usage if usage.blocks else None


# Rows of a mixture that its mean gate is taken over. On SmolLM2 and the 14 text tasks single rows differed by 0.0002
# (s.d., the paper's setting, mean 0.233) to 0.0016 (sharp gates of ranks, mean 0.146).
GATE_ROWS = 64


def mean_gate(model: nn.Module, tokenizer: Any, tasks: list[Task], recipe: Recipe) -> float | None:
    """Over the tokens of some rows of all tasks, blocks and experts, zeros included; in few forwards, of mixed rows."""
    if not routes(model):
        return None
    found = list(_test_rows(tokenizer, tasks, recipe, max(1, GATE_ROWS // len(tasks))).values())
    if not found:
        return None
    together = Rows([sequence for each in found for sequence in each.sequences], found[0].collate)
    usage = collect(model, {"all": together}).usage
    return usage.mean_gate if usage.blocks else None


def _test_rows(tokenizer: Any, tasks: list[Task], recipe: Recipe, rows: int) -> dict[str, Rows]:
    ids = {task.name: index for index, task in enumerate(tasks)}
    encoder = Encoder(tokenizer, ids, **encoding(recipe))
    return rows_of_tasks(encoder, tasks, rows, recipe.data.folder, recipe.seed)
