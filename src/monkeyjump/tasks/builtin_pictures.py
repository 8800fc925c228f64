"""Three small tasks about drawings made by this file: for the quickstart with pictures, and machines without data.

| task | what is asked |
|---|---|
| figure | which of five figures is drawn |
| paint | its colour, of six |
| corner | in which corner the figure is |

Size, turn, place, colours and background of a drawing are drawn at random; everything follows from the seed.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monkeyjump.tasks.cells import Row, pick
from monkeyjump.tasks.task import Example, GeneratedSource, Task

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

SIZES = {"train": 300, "test": 100}
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


def _figure(rng: random.Random, draw: ImageDraw, figure: str, paint: str, corner: int | None = None) -> None:
    size = rng.uniform(0.2, 0.34) * SIDE if corner is None else rng.uniform(0.12, 0.18) * SIDE
    if corner is None:
        x, y = (SIDE * rng.uniform(0.4, 0.6) for _ in range(2))
    else:
        x, y = (SIDE * (0.25 + 0.5 * side + rng.uniform(-0.04, 0.04)) for side in (corner % 2, corner // 2))
    draw.polygon(_outline(figure, x, y, size, rng.uniform(0, 2 * math.pi)), fill=PAINTS[paint])


def _drawn(rng: random.Random, name: str, options: tuple[str, ...]) -> dict[str, Any]:
    from PIL import Image, ImageDraw

    label = rng.randrange(len(options))
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(225, 255),) * 3)
    draw = ImageDraw.Draw(image)
    figure = options[label] if name == "figure" else rng.choice(FIGURES)
    paint = options[label] if name == "paint" else rng.choice(list(PAINTS))
    _figure(rng, draw, figure, paint, label if name == "corner" else None)
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"image": {"bytes": file.getvalue(), "path": None}, "label": label}


def _generator(name: str, options: tuple[str, ...]) -> Callable[[str, int], list[Row]]:
    def generate(split: str, seed: int) -> list[Row]:
        rng = random.Random(f"{name}/{split}/{0 if split == 'test' else seed}")
        return [_drawn(rng, name, options) for _ in range(SIZES[split])]

    return generate


def _renderer(question: str, options: tuple[str, ...]) -> Callable[[Row], Example]:
    def render(row: Row) -> Example:
        return Example(question=question, options=options, label=pick(row["label"], range(len(options))))

    return render


def _task(name: str, question: str, options: tuple[str, ...], description: str) -> Task:
    return Task(
        name,
        "builtin_pictures",
        _renderer(question, options),
        ("label",),
        GeneratedSource(_generator(name, options)),
        options,
        modality="image",
        description=description,
        media=("image",),
    )


PICTURE_TASKS: tuple[Task, ...] = (
    _task("figure", "Which figure is this?", FIGURES, "which figure is drawn"),
    _task("paint", "What colour is the figure?", tuple(PAINTS), "the colour of a figure"),
    _task("corner", "Where is the figure?", CORNERS, "the corner a figure is in"),
)
