"""Questions from a file of JSON lines, answers into another: line by line, so that what is done stays done."""

from __future__ import annotations

import json
from collections.abc import Callable
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

    def asked(self) -> dict[str, Any]:
        """What a line of answers repeats of its question."""
        return self.model_dump(exclude_none=True)


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
            fits = number <= len(rows) and asked == rows[number - 1].asked() and columns == set(found) - set(asked)
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


def answer_file(
    source: Path,
    out: Path,
    load: Callable[[], Answerer],
    how: Sampling,
    *,
    batch: int = 8,
    with_base: bool = False,
    task: str | None = None,
) -> tuple[int, int]:
    """Answer what is not answered yet; how many lines were there and how many are new. The model is loaded last."""
    rows = read_rows(source)
    done = done_rows(out, rows, with_base)
    if done == len(rows):
        return done, 0
    out.parent.mkdir(parents=True, exist_ok=True)
    answerer, questions = load(), [row.question(source.parent, task) for row in rows]
    _check(source, answerer, questions)
    names = {"answer": answerer.names[0], **({"base": answerer.base_name} if with_base else {})}
    bar = tqdm(total=len(rows), initial=done, desc="answering", unit="row", leave=False)
    with bar, out.open("a", encoding="utf-8") as file:
        for start in range(done, len(rows), batch):
            asked = questions[start : start + batch]
            columns = {key: answerer.answers(asked, name, how) for key, name in names.items()}
            for place, row in enumerate(rows[start : start + batch]):
                found = {key: answers[place] for key, answers in columns.items()}
                file.write(json.dumps({**row.asked(), **found}, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(len(asked))
    return done, len(rows) - done


def _check(source: Path, answerer: Answerer, questions: list[Question]) -> None:
    """Tell every prompt that cannot be read before the first is answered."""
    problems = []
    for number, question in enumerate(questions, start=1):
        try:
            answerer.prompt_ids(question)
            answerer.task_id(answerer.names[0], question.task)
        except ConfigError as error:
            problems += [f"row {number}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems, title=f"questions of {str(source)!r}")
