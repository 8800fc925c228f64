"""Answers about pictures and clips, as the page of an evaluation shows them: a few wrong ones and a few right ones."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.score import NO_ANSWER, Prediction
from monkeyjump.tables import shortened
from monkeyjump.tasks.media import Media, open_image, read_frames
from monkeyjump.tasks.task import Example

WRONG, RIGHT = 6, 3  # answers of a task that are shown
SIDE, PICTURES = 120, 4  # pixels of a thumbnail, and how many of them an answer has
_QUESTION, _ANSWER = 240, 80  # characters


@dataclass(frozen=True)
class ShownAnswer:
    """A question with its pictures, the right answer, and what each side said."""

    example: Example
    said: Mapping[str, str]
    correct: bool


def chosen_answers(examples: Sequence[Example], sides: Mapping[str, Sequence[Prediction]]) -> list[ShownAnswer]:
    """Some answers of what was evaluated, wrong ones first. They lie far apart, since files are often sorted."""
    judged = sides.get("adapter", sides.get("base", ()))
    found = []
    for correct, most in ((False, WRONG), (True, RIGHT)):
        places = [place for place, prediction in enumerate(judged) if prediction.correct is correct]
        for n in np.linspace(0, len(places) - 1, min(most, len(places)), dtype=int):
            example = examples[judged[places[n]].index]
            given = {side: predictions[places[n]] for side, predictions in sides.items()}
            said = {
                side: example.options[one.predicted] if one.predicted >= 0 else one.text or NO_ANSWER
                for side, one in given.items()
            }
            found.append(ShownAnswer(example, said, correct))
    return found


def section(shown: Mapping[str, Sequence[ShownAnswer]]) -> str:
    """The part of the page; empty where no task shows pictures."""
    page = ""
    for task, answers in shown.items():
        right = sum(answer.correct for answer in answers)
        title = f"{escape(task)}: {len(answers) - right} wrong and {right} right answers"
        if answers:
            page += f'<h2>{title}</h2>\n<div class="panel shown">\n{"".join(map(_figure, answers))}</div>\n'
    return page


def _figure(answer: ShownAnswer) -> str:
    media = answer.example.media
    pictures = "".join(map(_thumbnail, media[:PICTURES]))
    more = f"<span>and {len(media) - PICTURES} more</span>" if len(media) > PICTURES else ""
    lines = [("right", answer.example.answer), *answer.said.items()]
    said = "".join(f"<dt>{name}</dt><dd>{escape(shortened(text, _ANSWER))}</dd>" for name, text in lines)
    classes = ("right" if answer.correct else "wrong") + (" several" if len(media) > 1 else "")
    return (
        f'<figure class="{classes}">\n<div>{pictures}{more}</div>\n'
        f"<figcaption>{escape(shortened(answer.example.question, _QUESTION))}\n<dl>{said}</dl></figcaption></figure>\n"
    )


def _thumbnail(media: Media) -> str:
    """A picture, or the first frame of a clip, inside the page; of a broken file its name without its folder."""
    name = Path(media.content).name if isinstance(media.content, str) else ""
    try:
        image = open_image(media) if media.kind == "image" else read_frames(media, 1)[0]
    except ConfigError:
        return f"<em>{escape(f'{media.kind} {name}'.strip())} cannot be read</em>"
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=75)
    data = base64.b64encode(file.getvalue()).decode()
    label = "picture" if media.kind == "image" else "first frame of a clip"
    size = f'width="{image.width}" height="{image.height}"'
    return f'<img alt="{label}" {size} src="data:image/jpeg;base64,{data}">'
