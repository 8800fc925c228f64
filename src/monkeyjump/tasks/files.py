"""Rows from the files people have: JSON lines, JSON, CSV and TSV, plain or gzipped, parquet, folders of pictures."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from monkeyjump.errors import ConfigError, require
from monkeyjump.tasks.cells import Row
from monkeyjump.tasks.media import IMAGE_ENDINGS


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, one at a time. Its ending says what it is."""
    reader = _pictures if path.is_dir() else _READERS.get(_ending(path))
    if reader is None:
        raise _bad(path, f"is in no format that can be read; these are {', '.join(ENDINGS)}", " Convert it.")
    try:
        yield from reader(path)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        hint = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "check the file"
        raise _bad(path, f"cannot be read ({error}): {hint}") from error


def _ending(path: Path) -> str:
    name = path.name.lower()
    return next((ending for ending in sorted(_READERS, key=len, reverse=True) if name.endswith(ending)), "")


def _open(path: Path, newline: str | None = None) -> io.TextIOWrapper:
    file: Any = gzip.GzipFile(path) if path.suffix.lower() == ".gz" else path.open("rb")
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline)  # Excel begins a file with a mark


# -- JSON ---------------------------------------------------------------------------------------


def _json(path: Path) -> Iterator[Row]:
    """One object a line, or one list of objects."""
    with _open(path) as file:
        if _ending(path).startswith((".jsonl", ".ndjson")):
            lines = ((f"line {number}", line) for number, line in enumerate(file, start=1) if line.strip())
            found: Iterable[tuple[str, Any]] = ((where, _parsed(line, path, where)) for where, line in lines)
        else:
            content = _parsed(file.read(), path, "the content")
            if not isinstance(content, list):
                kind = type(content).__name__
                raise _bad(path, f"holds a {kind}: write a list of objects, or one object a line as .jsonl")
            found = ((f"entry {number}", row) for number, row in enumerate(content, start=1))
        for where, row in found:
            if not isinstance(row, dict):
                raise _bad(path, f"{where} is a {type(row).__name__}, not a JSON object with columns")
            yield row


def _parsed(text: str, path: Path, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        hint = " Each line must be one JSON object." if where.startswith("line") else ""
        raise _bad(path, f"{where} is not JSON ({error})", hint) from error


# -- CSV ----------------------------------------------------------------------------------------


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # Python's own limit is 128 KiB, less than a long document
    with _open(path, newline="") as file:
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        # the separator that the line of names has most of, outside quotes
        separator = "\t" if _ending(path).startswith(".tsv") else max(",;\t|", key="".join(first.split('"')[::2]).count)
        # strict: a quote that is opened and not closed would swallow the rest of the file as one cell
        reader = csv.reader(file, delimiter=separator, strict=True)
        rows = (cells for cells in reader if any(cell.strip() for cell in cells))
        try:
            names = [name.strip() for name in next(rows, [])]
            if not names:
                raise _bad(path, "is empty: its first line must name the columns")
            if twice := sorted({name for name in names if names.count(name) > 1 and name}):
                raise _bad(path, f"names the columns {', '.join(map(repr, twice))} twice", " Rename one of each.")
            for cells in rows:
                if len(cells) != len(names):
                    raise _bad(
                        path,
                        f"line {reader.line_num} has {len(cells)} cells, but the first line names {len(names)} columns",
                        ' A cell that holds the separator must be in quotes ("...").',
                    )
                yield dict(zip(names, cells, strict=True))
        except csv.Error as error:
            raise _bad(
                path, f"line {reader.line_num} is not CSV ({error})", " Quotes inside a cell come twice."
            ) from error


# -- parquet ------------------------------------------------------------------------------------


def _parquet(path: Path) -> Iterator[Row]:
    pyarrow, parquet = (
        require(module, f"{str(path)!r}: parquet files need pyarrow", "parquet")
        for module in ("pyarrow", "pyarrow.parquet")
    )
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise _bad(path, f"is not a parquet file that can be read ({str(error).splitlines()[0]})") from error


# -- a folder for every class ------------------------------------------------------------------


def class_names(folder: Path) -> list[str]:
    """The folders in a folder, which are classes of pictures."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _pictures(folder: Path) -> Iterator[Row]:
    """One row for every picture: its path in the folder, and the class whose folder it is in."""
    for name in class_names(folder):
        for path in sorted((folder / name).rglob("*")):
            if path.suffix.lower() in IMAGE_ENDINGS and not path.name.startswith("."):
                yield {"image": path.relative_to(folder).as_posix(), "label": name}


def _bad(path: Path, problem: str, hint: str = "") -> ConfigError:
    comma = "," if problem.startswith(("line ", "entry ", "the ")) else ""
    return ConfigError(f"data file {str(path)!r}{comma} {problem}.{hint}", title="bad data")


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json,
    ".jsonl.gz": _json,
    ".ndjson": _json,
    ".json": _json,
    ".json.gz": _json,
    ".csv": _csv,
    ".csv.gz": _csv,
    ".tsv": _csv,
    ".tsv.gz": _csv,
    ".parquet": _parquet,
}
ENDINGS = tuple(_READERS)
