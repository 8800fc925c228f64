"""A small mixture of five language tasks made by this file: for the quickstart, the tests, and machines without data.

Train and test share no content word, name or sentence frame: what is learned must be the rule. Everything follows from
the seed.

| task | kind | what must be learned |
|---|---|---|
| opinion | sentiment | good or bad, by the adjective |
| agreement | grammar | the verb agrees with the first noun, not with the nearest |
| place | category membership | animals are in the stable, food in the kitchen, tools in the workshop |
| quantifier | entailment | what "every", "no", "all", "none" say about one member |
| tense | time | past or future, by the form of the verb |

Two more, the family `builtin_hard`, are not learned by a quickstart of some 60 steps of 8 sequences and leave room for
longer runs: `shelf` (a colour for each category, which the prompt does not tell) and `lineup` (who is first, second or
last of three names).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from monkeyjump.tasks import builtin_words as words
from monkeyjump.tasks.cells import Row, pick
from monkeyjump.tasks.task import Example, GeneratedSource, Task

SIZES = {"train": 1000, "test": 200}  # at most: as many distinct rows as the material gives
Maker = Callable[[random.Random, words.Material], dict[str, Any]]


def _opinion(rng: random.Random, material: words.Material) -> dict[str, Any]:
    good = rng.random() < 0.5
    adjective = rng.choice(material.praise if good else material.blame)
    text = rng.choice(material.opinions).format(noun=rng.choice(material.reviewed), adjective=adjective)
    return {"text": text, "label": int(good)}


def _agreement(rng: random.Random, material: words.Material) -> dict[str, Any]:
    plural = rng.random() < 0.5
    subject, near = rng.sample(material.nouns, 2)
    near_plural = plural if rng.random() < 0.3 else not plural  # mostly the nearest noun misleads
    frame = rng.choice(material.agreements)
    text = frame.format(subject=subject[plural], near=near[near_plural], adjective=rng.choice(material.states))
    return {"text": text, "label": int(plural)}


def _place(rng: random.Random, material: words.Material) -> dict[str, Any]:
    kind = rng.randrange(3)
    word = rng.choice((material.animals, material.foods, material.tools)[kind])
    return {"text": rng.choice(material.places).format(word=word), "label": kind}


def _quantifier(rng: random.Random, material: words.Material) -> dict[str, Any]:
    yes = rng.random() < 0.5
    noun = rng.choice(material.nouns)
    fact = rng.choice(material.all_of if yes else material.none_of)
    adjective = rng.choice(material.states)
    question = rng.choice(material.members)
    text = fact.format(one=noun[0], many=noun[1], adjective=adjective)
    return {"text": f"{text} {question.format(one=noun[0], adjective=adjective)}", "label": int(yes)}


def _tense(rng: random.Random, material: words.Material) -> dict[str, Any]:
    future = rng.random() < 0.5
    base, past = rng.choice(material.verbs)
    verb = f"{rng.choice(material.will)} {base}" if future else past
    text = rng.choice(material.events).format(
        name=rng.choice(material.names), verb=verb, noun=rng.choice(material.nouns)[0]
    )
    return {"text": text, "label": int(future)}


def _shelf(rng: random.Random, material: words.Material) -> dict[str, Any]:
    kind = rng.randrange(3)
    word = rng.choice((material.animals, material.foods, material.tools)[kind])
    return {"text": rng.choice(material.shelves).format(word=word), "label": kind}


def _lineup(rng: random.Random, material: words.Material) -> dict[str, Any]:
    people = rng.sample(material.names, 3)
    place = rng.randrange(3)
    text = rng.choice(material.lineups).format(*people, place=("first", "second", "last")[place])
    options = rng.sample(people, 3)
    return {"text": text, "options": options, "label": options.index(people[place])}


def _renderer(options: tuple[str, ...] | None, question: str) -> Callable[[Row], Example]:
    def render(row: Row) -> Example:
        offered = options or tuple(row["options"])
        label = pick(row["label"], range(len(offered)))
        return Example(question=f"{row['text']}{question}", options=offered, label=label)

    return render


def _rows(name: str, make: Maker) -> Callable[[str, int], Sequence[Row]]:
    """Distinct rows of one task. Test is the same for every seed: results of different seeds must be comparable."""

    def generate(split: str, seed: int) -> Sequence[Row]:
        rng = random.Random(f"{name}/{split}/{0 if split == 'test' else seed}")
        material = words.TEST if split == "test" else words.TRAIN
        rows: dict[str, dict[str, Any]] = {}
        for _ in range(10 * SIZES[split]):
            row = make(rng, material)
            rows.setdefault(row["text"], row)
            if len(rows) == SIZES[split]:
                break
        return list(rows.values())

    return generate


def _task(
    name: str,
    make: Maker,
    options: tuple[str, ...] | None,
    description: str,
    question: str = "",
    family: str = "builtin",
) -> Task:
    return Task(
        name=name,
        family=family,
        render=_renderer(options, question),
        fields=("text", "label") if options else ("text", "options", "label"),
        source=GeneratedSource(_rows(name, make)),
        options=options,
        description=description,
    )


BUILTIN_TASKS: tuple[Task, ...] = (
    _task("opinion", _opinion, ("bad", "good"), "sentiment of a short remark", " Good or bad?"),
    _task("agreement", _agreement, ("is", "are"), "subject-verb agreement past a misleading noun"),
    _task("place", _place, ("stable", "kitchen", "workshop"), "where things of a kind are found"),
    _task("quantifier", _quantifier, ("no", "yes"), "what a quantified sentence says about one member"),
    _task("tense", _tense, ("past", "future"), "when something happens", " Past or future?"),
    _task(
        "shelf", _shelf, ("red", "green", "blue"), "category by a rule the prompt does not tell", family="builtin_hard"
    ),
    _task("lineup", _lineup, None, "who stands where in a list of names", family="builtin_hard"),
)
