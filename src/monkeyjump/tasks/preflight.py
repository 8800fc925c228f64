"""A look at the data before the work: every split is opened and rendered, and all problems are told at once."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.tasks import cache
from monkeyjump.tasks.load import SplitData, file_hash, load_examples
from monkeyjump.tasks.media import open_image, read_frames
from monkeyjump.tasks.task import SPLITS, Example, HubSource, Task

MOST_ROWS = 10_000  # of a split; a file may have millions
_KEPT = 100  # examples of a split
_SHOWN_PROBLEMS = 3  # bad rows of a split that are told; the others are counted


@dataclass
class SplitLook:
    """What one split of one task holds."""

    task: str
    split: str
    rows: int = 0
    complete: bool = True  # False: there are more rows than were looked at
    answers: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)
    examples: list[Example] = field(default_factory=list)  # the first ones

    @classmethod
    def of(cls, data: SplitData, examples: list[Example], complete: bool = True) -> SplitLook:
        answers = Counter(example.answer for example in examples)
        letters = Counter(example.letter for example in examples if example.letter)
        return cls(data.task.name, data.split, len(examples), complete, answers, letters, examples[:_KEPT])

    @classmethod
    def from_json(cls, text: bytes) -> SplitLook:
        known = json.loads(text)
        examples = [Example.from_json(example) for example in known["examples"]]
        counts = {name: Counter(known[name]) for name in ("answers", "letters")}
        return cls(**known | counts | {"examples": examples})

    @property
    def size(self) -> str:
        return f"{self.rows:,}{'' if self.complete else '+'}"

    @property
    def most_frequent(self) -> tuple[str, float]:
        """The most frequent answer and its share: a text where all rows have the same options, else a letter."""
        found = self.answers if self.fixed_options or not self.letters else self.letters
        (answer, count), *_ = found.most_common(1)
        return answer, count / found.total()

    @property
    def fixed_options(self) -> tuple[str, ...]:
        """The options, where they are the same in every row."""
        options = self.examples[0].options if self.examples else ()
        return options if all(example.options == options for example in self.examples) else ()


def look_at(
    tasks: Sequence[Task],
    data_dir: str | Path | None = None,
    *,
    splits: Iterable[str] = SPLITS,
    seed: int = 0,
    most: int = MOST_ROWS,
    streaming: bool = False,
) -> list[SplitLook]:
    """Open every split of every task. Bad rows, missing columns and empty splits are one `ConfigError`."""
    looks, problems = [], []
    for task in tasks:
        for split in (split for split in splits if split not in task.absent):
            look, found = _looked(SplitData(task, split, data_dir, seed), most, streaming)
            looks.append(look)
            problems += [problem for problem in found if problem not in problems]  # splits may share a file
    if problems:
        raise ConfigError(_by_task(problems), title="bad data")
    return looks


def _by_task(problems: Iterable[str]) -> list[str]:
    """One problem for all tasks of which the same is said."""
    tasks: dict[str, list[str]] = {}
    for problem in problems:
        about = re.match(r"task '(\w+)'( of '[^']+')?: ", problem)
        tasks.setdefault(problem[about.end() :] if about else problem, []).append(about[0] if about else "")
    found = []
    for said, starts in tasks.items():
        names = [start.split("'")[1] for start in starts if start]
        found.append((f"tasks {', '.join(names)}: " if len(names) > 1 else starts[0]) + said)
    return found


def _looked(data: SplitData, most: int, streaming: bool) -> tuple[SplitLook, list[str]]:
    """The look at a split and its problems. Of a file, a good one is kept, and its examples are those of the work."""
    source = None if streaming else data.origin()
    if source is None or data.task.media:  # a look that is kept would not tell that a picture is gone
        return _look_at_rows(data, most, streaming)
    name = cache.key("look", source, most)
    if (content := cache.read(name)) is not None:
        return SplitLook.from_json(bytes(content)), []
    try:
        examples = load_examples(data.task, data.split, data.data_dir, seed=data.seed)
    except ConfigError as error:
        look, problems = _look_at_rows(data, most, streaming=False)
        return look, problems or error.problems  # the bad row may lie beyond those
    look = SplitLook.of(data, examples[:most], complete=len(examples) <= most)
    if source == data.origin():
        cache.write(name, json.dumps(vars(look) | {"examples": [asdict(one) for one in look.examples]}).encode())
    return look, []


def _look_at_rows(data: SplitData, most: int, streaming: bool) -> tuple[SplitLook, list[str]]:
    """A look that goes on after a bad row, so that all of them are known."""
    task, good, bad, problems = data.task, list[Example](), 0, list[str]()
    try:
        rows, folder = data.rows(streaming), data.media_folder
        for number, row in islice(rows, most):
            try:
                example = task.example(row, number, folder)
                if task.bad_media == "raise" and len(good).bit_count() < 2:
                    problems += _unreadable(example)
                # beyond those that are kept, bytes of pictures would only fill the memory
                good.append(example if len(good) < _KEPT else replace(example, media=()))
            except ConfigError as error:
                bad += 1
                problems += error.problems if bad <= _SHOWN_PROBLEMS else []
        complete = next(rows, None) is None
    except ConfigError as error:
        return SplitLook.of(data, good), [*problems, *error.problems]
    if bad > _SHOWN_PROBLEMS:
        problems.append(f"task {task.name!r}: {bad - _SHOWN_PROBLEMS} more rows of its {data.split} split are bad.")
    if not good and not bad:
        problems.append(data.empty())
    return SplitLook.of(data, good, complete), list(dict.fromkeys(problems))


def _unreadable(example: Example) -> list[str]:
    """What is wrong with the pictures and clips of a row; the rows 1, 2, 3, 5, 9, ... of a split are looked at."""
    problems = []
    for media in example.media:
        try:
            read_frames(media, 1) if media.kind == "video" else open_image(media)
        except ConfigError as error:
            problems += [f"task {example.task!r}: {problem}" for problem in error.problems]
    return problems


def notes(looks: Sequence[SplitLook]) -> list[str]:
    """What is allowed and yet probably not meant."""
    found = []
    for look in looks:
        answer, share = look.most_frequent
        if share == 1 and look.rows > 1:
            found.append(f"{look.task}: every answer of its {look.split} split is {answer!r}.")
        never = [option for option in look.fixed_options if option not in look.answers]
        if never and look.split == "train" and look.complete:
            found.append(f"{look.task}: no training row has the answer {', '.join(map(repr, never))}.")
    return found


def origins(tasks: Sequence[Task], looks: Sequence[SplitLook], data_dir: str | Path | None) -> list[dict[str, Any]]:
    """Where each split came from, in words that hold on another machine: a file's name, size and hash, or a dataset."""
    by_name = {task.name: task for task in tasks}
    found = []
    for look in looks:
        data = SplitData(by_name[look.task], look.split, data_dir)
        path, source = data.path, data.task.source
        if data.stored_split != look.split:
            continue  # a part of train
        known: dict[str, Any] = {"task": look.task, "split": look.split, "rows": look.size, "source": "built in"}
        if path is not None:
            known |= {"source": path.name} | ({"sha256": file_hash(path)} if path.is_file() else {})
        elif isinstance(source, HubSource):
            parts = ["hub:", source.id, source.config, source.splits.get(look.split), source.revision]
            known["source"] = " ".join(part for part in parts if part)
        found.append(known)
    return found
