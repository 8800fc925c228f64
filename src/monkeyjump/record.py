"""One JSON file per run: what was run, with what, on what, and what came out. Written whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from monkeyjump.errors import ConfigError

FORMAT = 1  # under the key "monkeyjump_record": what makes a JSON file one of ours
PACKAGES = ("torch", "transformers", "peft", "monkeyjump", "triton", "liger-kernel", "python")
Status = Literal["finished", "failed", "cancelled"]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def portable_command(argv: Sequence[str]) -> list[str]:
    """The command as given, without this machine's folders: absolute paths become relative to here, or a bare name."""
    if not argv:
        return []
    program = PureWindowsPath(argv[0])  # which knows both kinds of slashes
    if program.name == "__main__.py":  # `python -m monkeyjump`, the same as the command
        program = program.parent
    return [program.name, *(_portable(argument) for argument in argv[1:])]


def _portable(argument: str) -> str:
    key, equals, value = argument.partition("=")
    if "," in value:  # several paths as one value
        return f"{key}={','.join(map(_portable, value.split(',')))}"
    if argument.startswith(("/", "~")) or PureWindowsPath(argument).is_absolute():
        path, here = Path(argument).expanduser(), Path.cwd()
        return str(path.relative_to(here)) if path.is_relative_to(here) else PureWindowsPath(argument).name or "/"
    return f"{key}={_portable(value)}" if equals else argument


@cache  # a process runs the source it has imported, however the files change later
def source_commit() -> str | None:
    """The commit this package's source is at (with "-dirty" if files were changed since); None for an installed one."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A virtual environment inside someone else's repository is not our source: the file itself must be tracked.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None


def device_in_words(device: Any = None) -> str:
    """Where a run happened: the given device, or the one a run would use."""
    import torch

    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type == "cuda":
        properties = torch.cuda.get_device_properties(found)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if found.type == "cpu":
        return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    return f"{found.type} ({platform.machine()})"


def _version(package: str) -> str | None:
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # on the path without being installed
        return getattr(sys.modules.get(package), "__version__", None)


@dataclass
class RunRecord:
    """Everything needed to repeat a run and to compare it with another. `config` is kept as the run got it."""

    kind: str  # train, evaluate, compare, ...
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    status: Status = "finished"
    extra: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=lambda: {name: _version(name) for name in PACKAGES})
    commit: str | None = field(default_factory=source_commit)
    device: str = field(default_factory=device_in_words)
    command: list[str] = field(default_factory=lambda: portable_command(sys.argv))
    started: str = field(default_factory=_now)  # UTC
    finished: str | None = None


@contextmanager
def recording(path: str | Path, kind: str, name: str, **known: Any) -> Iterator[RunRecord]:
    """Write the record of the block at its end, whatever the end is: finished, failed, or cancelled by Ctrl-C."""
    record = RunRecord(kind=kind, name=name, **known)
    try:
        yield record
    except BaseException as error:
        record.status = "cancelled" if isinstance(error, KeyboardInterrupt) else "failed"
        record.extra["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        write_record(record, path)


def write_record(record: RunRecord, path: str | Path) -> Path:
    """Write a record, atomically: a reader, or a full disk, never leaves half a file in place of the old one."""
    record.finished = record.finished or _now()
    content = {"monkeyjump_record": FORMAT, **{f.name: getattr(record, f.name) for f in fields(record)}}
    return write_atomic(path, json.dumps(jsonable(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_record(path: str | Path) -> RunRecord:
    """Read a record; a file that is missing, broken or not ours is an error that says which."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, f"cannot be read ({error.strerror or error}). Check the path") from error
    except ValueError as error:  # JSON and UTF-8 errors alike
        raise _unreadable(path, f"is not valid JSON ({error}): it is damaged or something else") from error
    if not isinstance(content, dict) or "monkeyjump_record" not in content:
        raise _unreadable(path, "is JSON but no run record (it has no key 'monkeyjump_record')")
    if content["monkeyjump_record"] != FORMAT:
        version = content["monkeyjump_record"]
        raise _unreadable(path, f"has record format {version!r}, this version reads {FORMAT}: update monkeyjump")
    missing = [name for name in ("kind", "name", "status", "metrics", "config") if name not in content]
    if missing:
        raise _unreadable(path, f"lacks {', '.join(missing)}: it is incomplete")
    return RunRecord(**{f.name: content[f.name] for f in fields(RunRecord) if f.name in content})


def write_atomic(path: str | Path, content: str | bytes, *, cached: bool = False) -> Path:
    """Write a file through a temporary neighbour, on disk before it takes the name.

    What is only `cached` can be made again: nobody waits for the disk, and it stays private.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if not cached:
                file.flush()
                os.fsync(file.fileno())
                os.chmod(temporary, 0o644)  # mkstemp makes it private; a result is not
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def numbered(path: str | Path) -> Iterator[Path]:
    """The path itself, then the same with -2, -3, ... at its end."""
    path = Path(path)
    return (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in itertools.count(1))


def free_path(path: str | Path, *endings: str) -> Path:
    """The first of the numbered paths that nothing has; with endings, that no such file has."""
    return next(p for p in numbered(path) if not any(os.path.lexists(f"{p}{ending}") for ending in endings or ("",)))


def output_path(asked: str | None, default: Path, *endings: str) -> Path:
    """Where results go: a name that nothing has yet. One that was asked for and is taken is an error."""
    wanted = Path(asked).expanduser() if asked else default
    writable_folder(wanted.parent, "--output")
    free = free_path(wanted, *endings)
    if asked and free != wanted:
        problem = f"--output {wanted} is there already. Name another, such as {free}."
        raise ConfigError(problem, title="nothing is overwritten")
    return free


def writable_folder(folder: str | Path, field: str) -> Path:
    """Make a folder and be sure that files can be written there, before the work whose results it is for."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:
        reason = "it is a file" if folder.is_file() else error
        raise ConfigError(
            f"{field}={str(folder)!r} is no folder that can be written ({reason}). Name another one.",
            title="no place for results",
        ) from error


def jsonable(value: Any) -> Any:
    """Plain JSON values. NumPy and torch values become numbers or lists; NaN and infinities become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(value, key=str)
        if hasattr(value, "tolist"):  # NumPy arrays and scalars, torch tensors: a number or nested lists
            return value.tolist()
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)  # paths, dtypes

    return json.loads(json.dumps(value, default=plain), parse_constant=lambda name: None)


def _unreadable(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{str(path)!r} {reason}.", title="record not readable")
