"""Rows of datasets on the Hugging Face hub, and of copies of whole datasets on this disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from monkeyjump.errors import ConfigError, require
from monkeyjump.tasks.cells import Row, falls_below
from monkeyjump.tasks.task import HubSource, Source, Task


def how_to_get(source: Source) -> str:
    """The commands for a copy of a dataset that must be unpacked; others come by themselves."""
    if not isinstance(source, HubSource) or not source.unpack:
        return "leave out the data folder to use the hub."
    copy = f"DIR/{source.id.split('/')[-1]}"
    return (
        f"make a copy: `hf download {source.id} --repo-type dataset --local-dir {copy}`, then "
        f"`{source.unpack.format(copy)}`, and say `--data DIR`."
    )


def copy_of(source: Source, data_dir: str | Path | None) -> Path | None:
    """A copy of a whole dataset of the hub below the data folder."""
    if data_dir is None or not isinstance(source, HubSource):
        return None
    folder = Path(data_dir).expanduser() / source.id.split("/")[-1]
    return folder if folder.is_dir() else None


def hub_rows(task: Task, source: HubSource, split: str, streaming: bool, copy: Path | None) -> Iterable[Row]:
    """The rows of a dataset of the hub, or of a copy; those of train or of test where both are in one split."""
    from monkeyjump.models.hub import hub_reachable, why_unreachable

    if source.unpack and copy is None:
        raise ConfigError(
            f"task {task.name!r} of {source.id!r}: pictures and clips are in archives, which must be unpacked: "
            f"{how_to_get(source)}",
            title="data not available",
        )
    if split not in source.splits:
        raise ConfigError(
            f"task {task.name!r} has no split for {split}, only for {', '.join(source.splits)}. Add it to its data."
        )
    instead = f"or pass a folder with {task.name}/{split}.jsonl as the data folder."
    why = (
        f"task {task.name!r}: without {task.name}/{split}.jsonl in a data folder, reading {source.id!r} needs datasets"
    )
    datasets = require("datasets", why, "hub")
    if copy is None and not hub_reachable():  # what is in the cache already still loads, and at once
        datasets.config.HF_HUB_OFFLINE = True
    name, revision = (source.id, source.revision) if copy is None else (str(copy), None)
    try:
        rows = datasets.load_dataset(
            name, source.config, split=source.splits[split], revision=revision, streaming=streaming
        )
    except (OSError, ValueError, RuntimeError) as error:  # datasets raises any of these for what is not there
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = f"{'Download it again' if copy else 'Look at its page on the hub'}, {instead}"
        problem = f"did not load from {copy or 'the hub'} ({reason}). {advice}"
        if not copy and not hub_reachable():
            problem = (
                f"did not load from the hub, which cannot be used ({why_unreachable()}), and is not in its cache. Go "
                "online once, or say --data DIR with DIR/TASK/train.jsonl and test.jsonl."
            )
        raise ConfigError(f"task {task.name!r} of {source.id!r}: {problem}", title="data not available") from error
    rows = _undecoded(rows) if task.media else rows
    if not source.held_out:
        return rows
    group = source.group or dict
    return (row for row in rows if falls_below(["test", group(row)], source.held_out) == (split == "test"))


def _undecoded(rows: Any) -> Any:
    """Pictures and clips as bytes or paths, so that none is decoded before it is needed."""
    import datasets

    if isinstance(rows, datasets.IterableDataset):
        return rows.decode(False)
    for name, feature in rows.features.items():
        inner = getattr(feature, "feature", feature)  # of a list
        if isinstance(inner, datasets.Image | datasets.Video):
            plain = type(inner)(decode=False)
            rows = rows.cast_column(name, plain if inner is feature else datasets.List(plain))
    return rows
