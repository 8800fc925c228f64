"""The folder of a run: one process at a time, and nothing that was finished there is lost."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from monkeyjump.errors import ConfigError, InUseError
from monkeyjump.record import free_path, writable_folder
from monkeyjump.training.progress import forget_after
from monkeyjump.training.trainer import last_checkpoint

RECORD, LOCK = "record.json", ".lock"
_REPORT = tuple(f"evaluation.{ending}" for ending in ("json", "csv", "html", "predictions.jsonl"))
_RESULTS = ("adapter", "checkpoints", "log.jsonl", "expert-usage.png", RECORD, *_REPORT)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for one run. The system frees the lock of a process that ended, however it ended."""
    lock = FileLock(writable_folder(folder, "output") / LOCK)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        raise InUseError(
            f"output={str(folder)!r}: another process trains in this folder. Wait for its end, or choose another "
            "folder with output=DIR.",
            title="folder in use",
        ) from None
    with held:
        yield


def in_use(folder: Path) -> bool:
    if not (folder / LOCK).is_file():
        return False
    try:
        with locked(folder):
            return False
    except InUseError:
        return True


def checkpoint_to_resume(folder: Path, resume: bool, overwrite: bool) -> Path | None:
    """Where to go on from; None for a new run. What may not be replaced is an error, before anything is touched."""
    last = last_checkpoint(folder / "checkpoints")
    finished = (folder / RECORD).is_file()
    other = f"choose another folder with {shlex.quote(f'output={free_path(folder)}')}"
    if resume and last is None:
        raise ConfigError(f"nothing to resume in {folder}: there is no checkpoint. Run without --resume.")
    if finished and not overwrite:
        again = "go on from its last checkpoint and replace it with --resume --overwrite" if resume else ""
        raise ConfigError(
            f"{folder} holds a finished run: {other}, or {again or 'replace it with --overwrite'}.",
            title="nothing is overwritten",
        )
    if not resume and not overwrite and (last is not None or (folder / "adapter").exists()):
        what = f"an unfinished run (last checkpoint {last.name})" if last else "an adapter without a record"
        go_on = "continue it with --resume, " if last else ""
        raise ConfigError(f"{folder} holds {what}: {go_on}replace it with --overwrite, or {other}.")
    return last if resume else None


def clear(folder: Path, checkpoint: Path | None) -> None:
    """Make room for a run: a new one replaces all of an earlier one, a resumed one the log of steps that come again."""
    if checkpoint is not None:
        forget_after(folder / "log.jsonl", int(checkpoint.name.rpartition("-")[2]))
        return
    for name in _RESULTS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
