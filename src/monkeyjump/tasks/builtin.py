"""Small tasks made by this file: for the quickstarts, the tests, and machines without data.

| task | kind | what must be learned |
|---|---|---|
| opinion | sentiment | good or bad, by the adjective |
| agreement | grammar | the verb agrees with the first noun, not with the nearest |
| place | category membership | animals are in the stable, food in the kitchen, tools in the workshop |
| quantifier | entailment | what "every", "no", "all", "none" say about one member |
| tense | time | past or future, by the form of the verb |
| figure | picture | which of five figures is drawn |
| paint | picture | its colour, of six |
| corner | picture | in which corner the figure is |

Train and test of the language tasks share no content word, name or sentence frame: what is learned must be the rule.
Size, turn, place, colours and background of a drawing are drawn at random. Everything follows from the seed.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Sequence
from functools import partial

from monkeyjump.tasks import builtin_words as words
from monkeyjump.tasks.cells import Row, pick
from monkeyjump.tasks.task import Example, GeneratedSource, Modality, Task

SIZES = {"text": {"train": 1000, "test": 200}, "image": {"train": 300, "test": 100}}  # at most: rows are distinct
SIDE = 112
PAINTS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (240, 210, 30),
    "purple": (140, 60, 180),
    "black": (20, 20, 20),
}
FIGURES = ("circle", "square", "triangle", "star", "cross")
CORNERS = ("top left", "top right", "bottom left", "bottom right")
Maker = Callable[[random.Random, words.Material], tuple[str, int]]  # a text and its label


# -- language -----------------------------------------------------------------------------------


def _opinion(rng: random.Random, material: words.Material) -> tuple[str, int]:
    good = rng.random() < 0.5
    adjective = rng.choice(material.praise if good else material.blame)
    return rng.choice(material.opinions).format(noun=rng.choice(material.reviewed), adjective=adjective), int(good)


def _agreement(rng: random.Random, material: words.Material) -> tuple[str, int]:
    plural = rng.random() < 0.5
    subject, near = rng.sample(material.nouns, 2)
    near_plural = plural if rng.random() < 0.3 else not plural  # mostly the nearest noun misleads
    frame = rng.choice(material.agreements)
    text = frame.format(subject=subject[plural], near=near[near_plural], adjective=rng.choice(material.states))
    return text, int(plural)


def _place(rng: random.Random, material: words.Material) -> tuple[str, int]:
    kind = rng.randrange(3)
    word = rng.choice((material.animals, material.foods, material.tools)[kind])
    return rng.choice(material.places).format(word=word), kind


def _quantifier(rng: random.Random, material: words.Material) -> tuple[str, int]:
    yes = rng.random() < 0.5
    one, many = rng.choice(material.nouns)
    fact = rng.choice(material.all_of if yes else material.none_of)
    adjective = rng.choice(material.states)
    return f"{fact} {rng.choice(material.members)}".format(one=one, many=many, adjective=adjective), int(yes)


def _tense(rng: random.Random, material: words.Material) -> tuple[str, int]:
    future = rng.random() < 0.5
    base, past = rng.choice(material.verbs)
    verb = f"{rng.choice(material.will)} {base}" if future else past
    frame, name, (noun, _) = (rng.choice(part) for part in (material.events, material.names, material.nouns))
    return frame.format(name=name, verb=verb, noun=noun), int(future)


# -- pictures -----------------------------------------------------------------------------------


def _outline(figure: str, x: float, y: float, size: float, turn: float) -> list[tuple[float, float]]:
    """The corners of a figure around a point."""
    if figure == "cross":
        arm = 0.34
        places = [(-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm)]
        places += [(-a, -b) for a, b in places]
        return [(x + size * a, y + size * b) for a, b in places]
    corners = {"square": 4, "triangle": 3, "star": 10, "circle": 48}[figure]
    radii = [size * (0.42 if figure == "star" and n % 2 else 1) for n in range(corners)]
    angles = [turn + 2 * math.pi * n / corners for n in range(corners)]
    return [(x + r * math.cos(angle), y + r * math.sin(angle)) for r, angle in zip(radii, angles, strict=True)]


def _drawn(rng: random.Random, name: str, options: tuple[str, ...]) -> tuple[bytes, int]:
    from PIL import Image, ImageDraw

    label = rng.randrange(len(options))
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(225, 255),) * 3)
    figure = options[label] if name == "figure" else rng.choice(FIGURES)
    paint = options[label] if name == "paint" else rng.choice(list(PAINTS))
    if name == "corner":
        size = rng.uniform(0.12, 0.18) * SIDE
        x, y = (SIDE * (0.25 + 0.5 * side + rng.uniform(-0.04, 0.04)) for side in (label % 2, label // 2))
    else:
        size = rng.uniform(0.2, 0.34) * SIDE
        x, y = (SIDE * rng.uniform(0.4, 0.6) for _ in range(2))
    ImageDraw.Draw(image).polygon(_outline(figure, x, y, size, rng.uniform(0, 2 * math.pi)), fill=PAINTS[paint])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), label


# -- rows ---------------------------------------------------------------------------------------


def _task(name: str, make: Maker | None, options: tuple[str, ...], description: str, question: str = "") -> Task:
    """A task of a maker, or without one a task of drawings."""
    kind: Modality = "text" if make else "image"
    family, fields, media = ("builtin", ("text", "label"), ()) if make else ("builtin_pictures", ("label",), ("image",))
    source, render = GeneratedSource(partial(_generated, name, make, options)), partial(_rendered, question, options)
    return Task(name, family, render, fields, source, options, "accuracy", kind, description, media)


def _generated(name: str, make: Maker | None, options: tuple[str, ...], split: str, seed: int) -> Sequence[Row]:
    """Distinct rows. Test is the same for every seed: results of different seeds must be comparable."""
    rng = random.Random(f"{name}/{split}/{0 if split == 'test' else seed}")
    material, size = words.TEST if split == "test" else words.TRAIN, SIZES["text" if make else "image"][split]
    rows: dict[str | bytes, Row] = {}
    for _ in range(10 * size):
        content, label = make(rng, material) if make else _drawn(rng, name, options)
        shown = {"text": content} if make else {"image": {"bytes": content, "path": None}}
        rows.setdefault(content, {**shown, "label": label})
        if len(rows) == size:
            break
    return list(rows.values())


def _rendered(question: str, options: tuple[str, ...], row: Row) -> Example:
    label = pick(row["label"], range(len(options)))
    return Example(question=f"{row.get('text', '')}{question}", options=options, label=label)


BUILTIN_TASKS: tuple[Task, ...] = (
    _task("opinion", _opinion, ("bad", "good"), "sentiment of a short remark", " Good or bad?"),
    _task("agreement", _agreement, ("is", "are"), "subject-verb agreement past a misleading noun"),
    _task("place", _place, ("stable", "kitchen", "workshop"), "where things of a kind are found"),
    _task("quantifier", _quantifier, ("no", "yes"), "what a quantified sentence says about one member"),
    _task("tense", _tense, ("past", "future"), "when something happens", " Past or future?"),
)
PICTURE_TASKS: tuple[Task, ...] = (
    _task("figure", None, FIGURES, "which figure is drawn", "Which figure is this?"),
    _task("paint", None, tuple(PAINTS), "the colour of a figure", "What colour is the figure?"),
    _task("corner", None, CORNERS, "the corner a figure is in", "Where is the figure?"),
)
