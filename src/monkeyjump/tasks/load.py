"""Rows of a task: from a folder of data files, from the hub, from its own files or its own generator.

The validation split is carved from train, never from test: a row belongs to it if the hash of its content falls in the
first twentieth of the hash range. So the split needs no second pass (streaming sees the same one), does not
move when rows are added, and two copies of one row are never on different sides.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache as cache_in_memory
from functools import lru_cache, partial
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
_MOST_LOADED = 400_000  # examples in memory, some 400 MB; where there are more, those that came first are dropped
_loaded: dict[Any, list[Example]] = {}
_tasks: dict[int, Task] = {}  # of the hub: they stay, so that their ids tell them apart


@dataclass(frozen=True)
class SplitData:
    """One split of a task, wherever its rows are. `seed` is that of generated rows."""

    task: Task
    split: str
    data_dir: str | Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            hint = did_you_mean(self.split, list(SPLITS))
            raise ConfigError(f"split={self.split!r} must be one of {', '.join(SPLITS)}.{hint}")

    @property
    def carved(self) -> bool:
        """Whether the split is a part of the rows of train, because no validation rows are given."""
        if self.split == "test":
            return False
        if self._in_folder("train"):
            return self._in_folder("validation") is None
        source = self.task.source
        return "validation" not in (source.files if isinstance(source, FileSource) else getattr(source, "splits", {}))

    @property
    def stored_split(self) -> str:
        """The split whose file holds the rows."""
        return "train" if self.carved else self.split

    @property
    def path(self) -> Path | None:
        """The file that holds the rows: one of the data folder, or one of the task's own; None for other sources."""
        source = self.task.source
        own = source.files.get(self.stored_split) if isinstance(source, FileSource) else None
        return self._in_folder(self.stored_split) or own

    @property
    def media_folder(self) -> Path | None:
        """Where the paths of pictures and clips count from: the folder of the data file. None without a file."""
        path, source = self.path if self.task.media else None, self.task.source
        if path is not None:
            return path if path.is_dir() else path.parent
        copy = copy_of(source, self.data_dir)
        return copy / source.media if copy and isinstance(source, HubSource) else None

    def _in_folder(self, split: str) -> Path | None:
        return None if self.data_dir is None else find_file(Path(self.data_dir).expanduser() / self.task.name, split)

    def all_rows(self, streaming: bool = False) -> Iterable[Row]:
        """The rows of `stored_split`. `streaming`: do not download a dataset of the hub first."""
        path, source, split = self.path, self.task.source, self.stored_split
        if path is not None and path.exists():
            return read_rows(path)
        match source:
            case GeneratedSource(generate=generate):
                return generate(split, self.seed)
            case HubSource():
                copy = copy_of(source, self.data_dir)
                if copy or self.data_dir is None:
                    return hub_rows(self.task, source, split, streaming, copy)
        raise ConfigError(f"task {self.task.name!r}{self._missing(path)}", title="data not found")

    def _missing(self, path: Path | None) -> str:
        name, split, source = self.task.name, self.stored_split, self.task.source
        if isinstance(source, FileSource) and path is None:
            return f" names no {split} file, only {', '.join(source.files)}. Add `{split}:` to its data."
        if path is not None:
            return (
                f": no such data file: {path} ({split}). Paths count from the task's file. Put it there, or give a "
                f"folder that holds {name}/{split}{''.join(path.suffixes)} with --data DIR."
            )
        folder = Path(self.data_dir or "").expanduser()
        if not folder.is_dir():
            return f": its data folder {str(folder)!r} does not exist. Check the path."
        there = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir())) or "no folders"
        return (
            f": no {name}/{split}.jsonl (or {', '.join(ENDINGS[1:])}) in {str(folder)!r}, which holds {there}. "
            f"Add the file, or {how_to_get(source)}"
        )

    def rows(self, streaming: bool = False) -> Iterator[tuple[int, Row]]:
        """The rows of the split with their numbers in their source, from 1."""
        rows = enumerate(self.all_rows(streaming), start=1)
        if not self.carved:
            return rows
        wanted = self.split == "validation"
        return ((number, row) for number, row in rows if falls_below(row, VALIDATION_FRACTION) == wanted)

    def examples(self, streaming: bool = False) -> Iterator[Example]:
        folder = self.media_folder
        return (self.task.example(row, number, folder) for number, row in self.rows(streaming))

    def origin(self) -> str | None:
        """A hash of all that the examples follow from: data, settings, and the code of this package.

        None where that is not known: for data of the hub, and for tasks with code of the user's own.
        """
        task, path = self.task, self.path
        try:
            if path is not None and path.is_file():
                source: Any = ("".join(path.suffixes), file_hash(path))
            elif isinstance(task.source, GeneratedSource):
                source = _code(task.source.generate), self.seed
            else:
                return None
            form = (task.name, task.fields, task.metric, task.modality, task.media, task.bad_media)
            code = (_code(task.render), _code(task.kind), self.media_folder)
        except _UnknownCodeError:
            return None
        return cache.key(_package_code(), *form, *code, source, self.split, self.carved, VALIDATION_FRACTION)

    def known_as(self) -> Any:
        """What examples are found by in memory: their origin; for data of the hub the task itself; None for neither."""
        known = self.origin()
        if known is not None or not isinstance(self.task.source, HubSource) or self.path:
            return known
        return id(_tasks.setdefault(id(self.task), self.task)), self.split, str(self.data_dir)

    def empty(self) -> str:
        """The problem of a split without rows."""
        start = f"task {self.task.name!r}: its {self.split} split ({self.data_dir or describe_source(self.task)})"
        if self.carved and self.split == "validation":
            return f"{start} has no rows. A twentieth of the training rows is taken for it: add some, or name a file."
        return f"{start} has no rows. Add rows, or leave the task out."


def load_examples(
    task: Task, split: str, data_dir: str | Path | None = None, *, limit: int | None = None, seed: int = 0
) -> list[Example]:
    """The examples of one split, in file order (capping a split fairly is `Mixture`'s job). Empty splits are errors.

    They stay in memory, by the hash of their origin, for whoever asks again: a look before the work, every validation.
    """
    data = SplitData(task, split, data_dir, seed)
    known = data.known_as()
    if known in _loaded:
        examples = _loaded[known]
    elif isinstance(known, str) and split == "validation" and (kept := _read_examples(known)) is not None:
        examples = _loaded[known] = kept
    elif limit is not None or known is None:
        examples = [_stored(one) for one in islice(data.examples(), limit)]
    else:
        examples = _load(data)
    if not examples:
        raise ConfigError(data.empty(), title="empty split")
    return examples[:limit]


def _load(data: SplitData) -> list[Example]:
    """One pass over the rows, also where they hold train and validation."""
    parts = [replace(data, split=split) for split in ("train", "validation")] if data.carved else [data]
    known, found, folder = [part.known_as() for part in parts], [list[Example]() for _ in parts], data.media_folder
    for number, row in enumerate(data.all_rows(), start=1):
        part = len(parts) > 1 and falls_below(row, VALIDATION_FRACTION)
        found[part].append(_stored(data.task.example(row, number, folder)))
    if known == [part.known_as() for part in parts]:  # no file has changed while it was read
        _loaded.update(zip(known, found, strict=True))
        if isinstance(known[-1], str) and len(parts) > 1:  # a few rows, for which nobody should read all of train again
            with suppress(TypeError):  # pictures that could not be put into files
                cache.write(cache.key("examples", known[-1]), json.dumps([asdict(one) for one in found[-1]]).encode())
        while len(_loaded) > 1 and sum(map(len, _loaded.values())) > _MOST_LOADED:
            del _loaded[next(iter(_loaded))]
    return found[parts.index(data)]


def _stored(example: Example) -> Example:
    return replace(example, media=tuple(map(stored, example.media))) if example.media else example


def _read_examples(known: str) -> list[Example] | None:
    """Examples from the disk, if all of their pictures are still there."""
    kept = cache.read(cache.key("examples", known))
    examples = None if kept is None else [Example.from_json(row) for row in json.loads(bytes(kept))]
    there = all(Path(str(media.content)).is_file() for example in examples or () for media in example.media)
    return examples if there else None


# -- hashes -------------------------------------------------------------------------------------


class _UnknownCodeError(Exception):
    """A function from outside this folder."""


def _code(value: Any) -> Any:
    """What a function of this folder does, in values that can be printed: its name, and what it was made with."""
    if isinstance(value, partial):
        return [_code(part) for part in (value.func, *value.args)]
    if not callable(value):
        return value
    if not getattr(value, "__module__", "").startswith(f"{__package__}."):
        raise _UnknownCodeError
    return value.__module__, value.__qualname__


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
