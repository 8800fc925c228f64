"""Rows of a task: from a folder of data files, from the hub, from its own files or its own generator.

The validation split is carved from train, never from test: a row belongs to it if the hash of its content falls in the
first `validation_fraction` of the hash range. So the split needs no second pass (streaming sees the same one), does not
move when rows are added, and two copies of one row are never on different sides.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache as cache_in_memory
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.tasks import cache
from monkeyjump.tasks.cells import Row, falls_below
from monkeyjump.tasks.files import ENDINGS, read_rows
from monkeyjump.tasks.hub import copy_of, how_to_get, hub_rows
from monkeyjump.tasks.media import stored
from monkeyjump.tasks.task import SPLITS, Example, FileSource, GeneratedSource, HubSource, Task

VALIDATION_FRACTION = 0.05


def load_examples(
    task: Task,
    split: str,
    data_dir: str | Path | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    validation_fraction: float = VALIDATION_FRACTION,
) -> list[Example]:
    """The examples of one split, in file order (capping a split fairly is `Mixture`'s job). Empty splits are errors.

    They stay in memory, by the hash of their origin, for whoever asks again: a look before the work, every validation.
    """
    options: dict[str, Any] = {"seed": seed, "validation_fraction": validation_fraction}
    _check_split(split, validation_fraction)
    known = _known(task, split, data_dir, **options)
    if known in _loaded:
        examples = _loaded[known]
    elif isinstance(known, str) and split == "validation" and (kept := _read_examples(known)) is not None:
        examples = _loaded[known] = kept
    elif limit is not None or known is None:
        examples = [_stored(one) for one in islice(stream_examples(task, split, data_dir, **options), limit)]
    else:
        examples = _load(task, split, data_dir, **options)
    if not examples:
        raise ConfigError(_empty(task, split, data_dir, validation_fraction), title="empty split")
    return examples[:limit]


_loaded: dict[Any, list[Example]] = {}
_tasks: dict[int, Task] = {}  # of the hub: they stay, so that their ids tell them apart
_MOST_LOADED = 400_000  # examples, some 400 MB; where there are more, those that came first are dropped


def _known(task: Task, split: str, data_dir: str | Path | None, **options: Any) -> Any:
    """What examples are found by in memory: their origin; for data of the hub the task itself; None for neither."""
    known = origin(task, split, data_dir, **options)
    if known is not None or not isinstance(task.source, HubSource) or file_of(task, split, data_dir):
        return known
    return id(_tasks.setdefault(id(task), task)), split, str(data_dir), *options.values()


def _load(task: Task, split: str, data_dir: str | Path | None, seed: int, validation_fraction: float) -> list[Example]:
    """One pass over the rows, also where they hold train and validation."""
    carved = split != "test" and not has_own_validation(task, data_dir)
    parts = ("train", "validation") if carved else (split,)

    def origins() -> list[Any]:
        return [_known(task, part, data_dir, seed=seed, validation_fraction=validation_fraction) for part in parts]

    before, found = origins(), {part: list[Example]() for part in parts}
    folder = media_folder(task, split, data_dir)
    for number, row in enumerate(_source_rows(task, parts[0], data_dir, seed, streaming=False), start=1):
        part = parts[carved and falls_below(row, validation_fraction)]
        found[part].append(_stored(task.example(row, number, folder)))
    if before == origins():  # no file has changed while it was read
        _loaded.update(zip(before, found.values(), strict=True))
        if carved and isinstance(before[1], str):  # a few rows, for which nobody should read all of train again
            rows = [asdict(example) for example in found["validation"]]
            with suppress(TypeError):  # pictures that could not be put into files
                cache.write(cache.key("examples", before[1]), json.dumps(rows).encode())
        while len(_loaded) > 1 and sum(map(len, _loaded.values())) > _MOST_LOADED:
            del _loaded[next(iter(_loaded))]
    return found[split]


def _stored(example: Example) -> Example:
    return replace(example, media=tuple(map(stored, example.media))) if example.media else example


def _read_examples(known: str) -> list[Example] | None:
    """Examples from the disk, if all of their pictures are still there."""
    kept = cache.read(cache.key("examples", known))
    examples = None if kept is None else [Example.from_json(row) for row in json.loads(bytes(kept))]
    there = all(Path(str(media.content)).is_file() for example in examples or () for media in example.media)
    return examples if there else None


def stream_examples(task: Task, split: str, data_dir: str | Path | None = None, **options: Any) -> Iterator[Example]:
    """The same, one at a time."""
    folder = media_folder(task, split, data_dir)
    return (task.example(row, number, folder) for number, row in stream_rows(task, split, data_dir, **options))


def stream_rows(
    task: Task,
    split: str,
    data_dir: str | Path | None = None,
    *,
    seed: int = 0,
    validation_fraction: float = VALIDATION_FRACTION,
    streaming: bool = False,
) -> Iterator[tuple[int, Row]]:
    """Rows with their numbers in their source, from 1. `streaming`: do not download a hub dataset first."""
    _check_split(split, validation_fraction)
    part = _stored_split(task, split, data_dir)
    rows = enumerate(_source_rows(task, part, data_dir, seed, streaming), start=1)
    if split == "test" or has_own_validation(task, data_dir):
        return rows
    wanted = split == "validation"
    return ((number, row) for number, row in rows if falls_below(row, validation_fraction) == wanted)


def _check_split(split: str, validation_fraction: float) -> None:
    if split not in SPLITS:
        hint = did_you_mean(split, list(SPLITS))
        raise ConfigError(f"split={split!r} must be one of {', '.join(SPLITS)}.{hint}")
    if not 0 <= validation_fraction < 1:
        raise ConfigError(
            f"validation_fraction={validation_fraction} must be at least 0 and below 1; 0.05 is the default."
        )


def _empty(task: Task, split: str, data_dir: str | Path | None, fraction: float) -> str:
    where = data_dir or describe_source(task)
    if split == "validation":
        return (
            f"task {task.name!r}: no row of its training data ({where}) falls in the validation split "
            f"(validation_fraction={fraction:g}). Raise validation_fraction, or give the task a validation file."
        )
    return f"task {task.name!r}: its {split} split ({where}) has no rows. Add rows, or leave the task out."


def origin(
    task: Task,
    split: str,
    data_dir: str | Path | None = None,
    *,
    seed: int = 0,
    validation_fraction: float = VALIDATION_FRACTION,
) -> str | None:
    """A hash of all that the examples of a split follow from: data, settings, and the code of this package.

    None where that is not known: for data of the hub, and for tasks with code of the user's own.
    """
    own_validation = has_own_validation(task, data_dir)
    path = file_of(task, _stored_split(task, split, data_dir), data_dir)
    try:
        if path is not None and path.is_file():
            source: Any = ("".join(path.suffixes), file_hash(path))
        elif isinstance(task.source, GeneratedSource):
            source = _code(task.source.generate), seed
        else:
            return None
        form = (task.name, task.fields, task.metric, task.modality, task.media, task.bad_media)
        code = (_code(task.render), _code(task.kind), media_folder(task, split, data_dir))
        parts = (*form, *code, source, split, own_validation, validation_fraction)
    except _UnknownCodeError:
        return None
    return cache.key(_package_code(), *parts)


class _UnknownCodeError(Exception):
    """A function from outside this folder."""


def _code(value: Any) -> Any:
    """What a function of this folder does, in values that can be printed: its name, and what it was made with."""
    if not callable(value):
        return value
    if not getattr(value, "__module__", "").startswith(f"{__package__}."):
        raise _UnknownCodeError
    return value.__module__, value.__qualname__, [_code(cell.cell_contents) for cell in value.__closure__ or ()]


@cache_in_memory
def _package_code() -> str:
    return cache.key(*(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))


def file_hash(path: Path) -> str:
    """The sha256 of a file, which is not read again while it has the same size and time.

    A file that has just been written is: its time goes by ticks of the system and may not tell the next change.
    """
    known = path.stat()
    recent = time.time_ns() - known.st_mtime_ns < 2e9
    return (_file_hash.__wrapped__ if recent else _file_hash)(path, known.st_mtime_ns, known.st_size)


@lru_cache(maxsize=2**17)
def _file_hash(path: Path, _time: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- where rows come from -----------------------------------------------------------------------


def describe_source(task: Task) -> str:
    """Where a task's data is, in a few words."""
    match task.source:
        case HubSource(id=name, config=config):
            return f"hub {name}" + (f" ({config})" if config else "")
        case FileSource(files=files):
            return ", ".join(str(path) for path in files.values())
        case GeneratedSource():
            return "built in"


def find_file(folder: Path, split: str) -> Path | None:
    """`folder/<split>` with any ending that can be read, or a folder of that name with a folder for every class."""
    found = next((path for ending in ENDINGS if (path := folder / f"{split}{ending}").is_file()), None)
    return found or (folder / split if (folder / split).is_dir() else None)


def has_own_validation(task: Task, data_dir: str | Path | None) -> bool:
    """Whether validation rows are given; they are a part of train otherwise."""
    if data_dir is not None and find_file(Path(data_dir).expanduser() / task.name, "train"):
        return find_file(Path(data_dir).expanduser() / task.name, "validation") is not None
    splits = task.source.files if isinstance(task.source, FileSource) else getattr(task.source, "splits", {})
    return "validation" in splits


def _stored_split(task: Task, split: str, data_dir: str | Path | None) -> str:
    """The split whose file holds the rows of a split: train has those of validation where none are given."""
    return split if split == "test" or has_own_validation(task, data_dir) else "train"


def media_folder(task: Task, split: str, data_dir: str | Path | None) -> Path | None:
    """Where the paths of pictures and clips count from: the folder of the data file. None without a file."""
    path = file_of(task, _stored_split(task, split, data_dir), data_dir) if task.media else None
    if path is not None:
        return path if path.is_dir() else path.parent
    copy = copy_of(task.source, data_dir)
    return copy / task.source.media if copy and isinstance(task.source, HubSource) else None


def file_of(task: Task, split: str, data_dir: str | Path | None) -> Path | None:
    """The file that holds a split: one of the data folder, or one of the task's own; None for other sources."""
    found = None if data_dir is None else find_file(Path(data_dir).expanduser() / task.name, split)
    return found or (task.source.files.get(split) if isinstance(task.source, FileSource) else None)


def _source_rows(task: Task, split: str, data_dir: str | Path | None, seed: int, streaming: bool) -> Iterable[Row]:
    path = file_of(task, split, data_dir)
    if path is not None and path.exists():
        return read_rows(path)
    copy = copy_of(task.source, data_dir)
    if data_dir is not None and isinstance(task.source, HubSource) and not copy:  # other tasks bring their own data
        raise ConfigError(_not_in_folder(task, split, Path(data_dir).expanduser()), title="data not found")
    match task.source:
        case GeneratedSource(generate=generate):
            return generate(split, seed)
        case FileSource(files=files):
            raise ConfigError(_no_file(task, split, files), title="data not found")
        case HubSource():
            return hub_rows(task, task.source, split, streaming, copy)


def _no_file(task: Task, split: str, files: Mapping[str, Path]) -> str:
    if split not in files:
        return f"task {task.name!r} names no {split} file, only {', '.join(files)}. Add `{split}:` to its data."
    return (
        f"task {task.name!r}: no such data file: {files[split]} ({split}). Paths count from the task's file. Put it "
        f"there, or give a folder that holds {task.name}/{split}{''.join(files[split].suffixes)} with --data DIR."
    )


def _not_in_folder(task: Task, split: str, folder: Path) -> str:
    if not folder.is_dir():
        return f"data folder {str(folder)!r} does not exist (wanted for task {task.name!r}). Check the path."
    there = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return (
        f"task {task.name!r}: no {task.name}/{split}.jsonl (or {', '.join(ENDINGS[1:])}) in {str(folder)!r}, which "
        f"holds {', '.join(there) or 'no folders'}. Add the file, or {how_to_get(task.source)}"
    )
