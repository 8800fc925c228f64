"""Questions from a file of JSON lines, answers into another: line by line, so that what is done stays done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from tqdm import tqdm

from monkeyjump.checked import Section, validated
from monkeyjump.errors import ConfigError
from monkeyjump.serving.answers import Answerer, Question, Sampling
from monkeyjump.tasks.media import Media


class Message(Section):
    """One message of a conversation."""

    role: str
    content: str


class Row(Section):
    """One line of the file: a prompt or a conversation, and what may belong to it."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    image: str | None = None
    task: str | None = None

    def question(self, folder: Path, task: str | None) -> Question:
        asked = [Message(role="user", content=self.prompt)] if self.prompt is not None else self.messages or []
        media = () if self.image is None else (Media("image", str(folder / Path(self.image).expanduser())),)
        return Question([message.model_dump() for message in asked], media, self.task or task)


@dataclass(frozen=True)
class FileRun:
    """What is answered by whom."""

    answerer: Answerer
    name: str
    how: Sampling
    batch: int = 8
    with_base: bool = False
    task: str | None = None

    def _check(self, source: Path, rows: list[Row]) -> None:
        """Tell every prompt that cannot be read before the first is answered."""
        problems = []
        for number, row in enumerate(rows, start=1):
            try:
                question = row.question(source.parent, self.task)
                self.answerer.prompt_ids(question)
                self.answerer.task_id(self.name, question.task)
            except ConfigError as error:
                problems += [f"row {number}: {problem}" for problem in error.problems]
        if problems:
            raise ConfigError(problems, title=f"questions of {str(source)!r}")

    def answer(self, source: Path, rows: list[Row], out: Path, done: int) -> Iterator[int]:
        """Append the answers to the rows after the first `done`; yields how many are new, after every batch."""
        self._check(source, rows)
        with out.open("a", encoding="utf-8") as file:
            for start in range(done, len(rows), self.batch):
                batch = rows[start : start + self.batch]
                questions = [row.question(source.parent, self.task) for row in batch]
                columns = {"answer": self.answerer.answers(questions, self.name, self.how)}
                if self.with_base:
                    columns["base"] = self.answerer.answers(questions, self.answerer.base_name, self.how)
                for place, row in enumerate(batch):
                    found = {key: answers[place] for key, answers in columns.items()}
                    file.write(json.dumps({**asked_in(row), **found}, ensure_ascii=False) + "\n")
                file.flush()
                yield len(batch)


def read_rows(path: Path) -> list[Row]:
    """The questions of a file; everything that is wrong with it is told at once."""
    rows, problems = [], []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # texts may hold other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {str(path)!r} cannot be read ({error}).", title="questions") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(validated(Row, json.loads(line), f"line {number}", _one_of_both))
        except ConfigError as error:
            problems += [f"line {number}: {problem}" for problem in error.problems]
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number} is not JSON ({error}).")
    if not rows and not problems:
        problems.append(f'--file {str(path)!r} has no line such as {{"prompt": "..."}}.')
    if problems:
        raise ConfigError(problems, title=f"questions of {str(path)!r}")
    return rows


def _one_of_both(row: Row) -> list[str]:
    named = [row.prompt is not None, row.messages is not None]
    return [] if sum(named) == 1 else ["it needs either 'prompt' or 'messages'."]


def asked_in(row: Row) -> dict[str, Any]:
    """What a line of answers repeats of its question."""
    return row.model_dump(exclude_none=True)


def done_rows(out: Path, rows: list[Row], with_base: bool) -> int:
    """How many questions the file of answers has from an earlier run; a last line that was cut short is taken away."""
    if not out.exists():
        return 0
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    columns = {"answer", "base"} if with_base else {"answer"}
    lines = whole.decode("utf-8", "replace").split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            asked = {key: value for key, value in found.items() if key not in ("answer", "base")}
            fits = number <= len(rows) and asked == asked_in(rows[number - 1]) and columns == set(found) - set(asked)
        except (ValueError, AttributeError):
            fits = False
        if not fits:
            raise ConfigError(
                f"--out {str(out)!r}: its line {number} is no answer to line {number} of the questions, so it is of "
                "another run. Name another file.",
                title="nothing is overwritten",
            )
    if len(whole) < len(content):
        with out.open("r+b") as file:
            file.truncate(len(whole))
    return len(lines)


def answer_file(source: Path, out: Path, load: Callable[[], FileRun], with_base: bool) -> tuple[int, int]:
    """Answer what is not answered yet; how many lines were there and how many are new. The model is loaded last."""
    rows = read_rows(source)
    done = done_rows(out, rows, with_base)
    if done == len(rows):
        return done, 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with tqdm(total=len(rows), initial=done, desc="answering", unit="row", leave=False) as bar:
        for count in load().answer(source, rows, out, done):
            bar.update(count)
    return done, len(rows) - done
