"""A task in a YAML file of about ten lines; what its keys may be is in the types, which the reference is made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from monkeyjump.checked import Section, validated
from monkeyjump.errors import ConfigError
from monkeyjump.tasks.custom import simple_task
from monkeyjump.tasks.task import Metric, Task
from monkeyjump.yaml_files import parse_yaml

_SCALAR = {"type": ["string", "number", "boolean"]}
_OPTIONS_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": _SCALAR, "minItems": 1},
        {"type": "object", "additionalProperties": _SCALAR, "minProperties": 1},
        {"type": "string"},
        {"type": "null"},
    ]
}


def _options(value: Any) -> Any:
    """A file is read as it was written, so that every option is the text `no` or `010` that the user typed."""
    texts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value or ""]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("rule", "must be a list of texts, labels with a text each, or the name of a column")
    return value


class TaskData(Section):
    """Where the rows are: files beside the task's file, or a dataset on the hub."""

    train: str | None = Field(
        None,
        description="file of training rows, or a folder with a folder of pictures for every class, which has the "
        "columns image and label; with hub, the name of its split",
    )
    validation: str | None = Field(None, description="the same for validation; left out: a twentieth of train")
    test: str | None = Field(None, description="the same for test, which the final table is made from")
    hub: str | None = Field(None, description="a dataset on the Hugging Face hub, such as owner/name")
    config: str | None = Field(None, description="which configuration of that dataset")
    revision: str | None = Field(None, description="which revision of that dataset (main)")


class TaskFile(Section):
    """A task of your own."""

    name: str = Field(description="what the task is called in tables and folders", min_length=1)
    prompt: str = Field(
        description="the question, with columns in braces: {text}, nested ones as {choices.text[0]}", min_length=1
    )
    context: str = Field("", description="what comes before the question and may be cut where a text is too long")
    options: Annotated[Any, BeforeValidator(_options), WithJsonSchema(_OPTIONS_SCHEMA)] = Field(
        None,
        description="the answers to choose from: a list, labels with a text each ({0: no, 1: yes}), or a column that "
        "holds a list, {label: [...], text: [...]} or {A: ..., B: ...}; left out: the answer is free text",
    )
    answer: str = Field(
        description="the column of the right answer: a label of the options, a text, an index from 0 or a letter",
        min_length=1,
    )
    image: str | list[str] | None = Field(
        None, description="the column of a picture, or several: paths from the folder of the data file, bytes, or lists"
    )
    video: str | list[str] | None = Field(None, description="the same for clips")
    data: TaskData = Field(description="where the rows are")
    metric: Metric | None = Field(None, description="left out: accuracy with options, exact_match without")
    family: str = Field("custom", description="tasks of one family share a mean in tables")
    description: str = Field("", description="a few words for lists")


def load_task_file(path: str | Path) -> Task:
    """A task from YAML; every problem of the file at once."""
    path = Path(path).expanduser()
    content = validated(TaskFile, read_task_file(path), f"task file {str(path)!r}", _data_problem)
    data = content.data.model_dump(exclude_none=True)
    if "hub" not in data:
        data = {split: str(path.parent / Path(file).expanduser()) for split, file in data.items()}
    return simple_task(data=data, **content.model_dump(exclude={"data"}))


def read_task_file(path: Path) -> dict[str, Any]:
    """The keys of a file as they were written; one left empty is as one left out."""
    source = f"task file {str(path)!r}"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{source} cannot be read ({error.strerror}). Check the path.") from error
    content = _given(parse_yaml(text, source, as_written=True))
    if isinstance(content.get("data"), dict):
        content["data"] = _given(content["data"])
    return content


def _given(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value not in ("", "null", "~")}


def _data_problem(task: TaskFile) -> list[str]:
    data, problems = task.data, list[str]()
    if task.image and task.video:
        problems.append("image and video are both given: a task has pictures or clips. Leave one out.")
    if data.hub is None and not (data.train or data.test):
        problems.append("data must name files ({train: a.jsonl, test: b.jsonl}) or a dataset ({hub: owner/name}).")
    if data.hub is None and (data.config or data.revision):
        problems.append(
            "data.config and data.revision are for datasets of the hub: name one with hub, or leave them out."
        )
    return problems
