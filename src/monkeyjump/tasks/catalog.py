"""The tasks there are: the paper's, the built-in ones, and those a user adds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.tasks.builtin import BUILTIN_TASKS, PICTURE_TASKS
from monkeyjump.tasks.hub import copy_of, how_to_get
from monkeyjump.tasks.image import IMAGE14, IMAGE_TASKS
from monkeyjump.tasks.load import describe_source, find_file
from monkeyjump.tasks.mmt47 import MMT47_TASKS
from monkeyjump.tasks.task import BadMedia, FileSource, GeneratedSource, HubSource, Task
from monkeyjump.tasks.text import TEXT_TASKS
from monkeyjump.tasks.video import VIDEO_TASKS

_TASKS = {task.name: task for task in (*TEXT_TASKS, *IMAGE_TASKS, *VIDEO_TASKS, *BUILTIN_TASKS, *PICTURE_TASKS)}
_MMT47 = {task.name: task for task in MMT47_TASKS}  # the same tasks in another form: in lists only if asked for


@dataclass(frozen=True)
class TaskState:
    """One line of `monkeyjump tasks`."""

    name: str
    family: str
    metric: str
    description: str
    source: str
    state: str  # built in | local | in the folder | on the hub | to unpack | missing
    how_to_get: str = ""  # where the data does not come by itself


def register(task: Task) -> Task:
    """Add a task of your own; its name must be free."""
    if task.name in (*_TASKS, *_MMT47, *groups()):
        raise ConfigError(f"task name {task.name!r} is taken. Choose another name.")
    _TASKS[task.name] = task
    return task


def names() -> list[str]:
    return list(_TASKS)


def groups() -> dict[str, list[str]]:
    """Names that stand for several tasks: every family, the paper's three benchmarks, MMT-47, and `all` but it."""
    families: dict[str, list[str]] = {}
    for name, task in _TASKS.items():
        families.setdefault(task.family, []).append(name)
    paper = {"text14": TEXT_TASKS, "image14": IMAGE14, "video19": VIDEO_TASKS, "mmt47": MMT47_TASKS}
    return {**families, **{name: [task.name for task in tasks] for name, tasks in paper.items()}, "all": names()}


def get(name: str) -> Task:
    """A task by name, or from a YAML file (a path that ends in .yaml or .yml)."""
    if name.endswith((".yaml", ".yml")):
        from monkeyjump.tasks.task_file import load_task_file  # only here: it brings pydantic

        return load_task_file(name)
    found = _TASKS.get(name, _MMT47.get(name))
    if found is None:
        known = [*names(), *groups()]
        raise ConfigError(
            f"unknown task {name!r}.{did_you_mean(name, known)} "
            f"Known: {', '.join(names())}; groups: {', '.join(groups())}.",
            title="unknown task",
        )
    return found


def expand(wanted: str | Iterable[str], bad_media: BadMedia = "raise") -> list[Task]:
    """Tasks from names, groups and YAML files ("glue", "boolq,piqa", ["my.yaml"]), each once, all bad names at once."""
    parts = wanted.split(",") if isinstance(wanted, str) else wanted
    found: dict[str, Task] = {}
    problems: list[str] = []
    for part in (part.strip() for part in parts):
        for name in groups().get(part, [part]):
            try:
                task = get(name)
            except ConfigError as error:
                problems += error.problems
            else:
                found.setdefault(task.name, task)
    if problems:
        raise ConfigError(problems, title="unknown task")
    if not found:
        raise ConfigError("tasks: none named. Name at least one task or group, e.g. 'glue'.")
    return [task if task.bad_media == bad_media else replace(task, bad_media=bad_media) for task in found.values()]


def describe(data_dir: str | Path | None = None, tasks: Iterable[Task] | None = None) -> list[TaskState]:
    """Tasks (all there are, unless told) with the state of their data, without touching the network."""
    found = []
    for task in _TASKS.values() if tasks is None else tasks:
        state, source = _state(task, data_dir), describe_source(task)
        get = f"{source.split(' (')[0]}: {how_to_get(task.source)}" if state in ("to unpack", "missing") else ""
        found.append(TaskState(task.name, task.family, task.metric, task.description, source, state, get))
    return found


def _state(task: Task, data_dir: str | Path | None) -> str:
    match task.source:
        case GeneratedSource():
            return "built in"
        case FileSource(files=files):
            return "local" if all(path.exists() for path in files.values()) else "missing"
        case HubSource(unpack=unpack) if data_dir is None:
            return "to unpack" if unpack else "on the hub"
    folder = Path(data_dir or "").expanduser() / task.name
    there = copy_of(task.source, data_dir) or (find_file(folder, "train") and find_file(folder, "test"))
    return "in the folder" if there else "missing"
