"""A small mixture of five language tasks made by this file: for the quickstart, the tests, and machines without data.

Train and test share no content word, name or sentence frame: what is learned must be the rule. Everything follows from
the seed.

| task | kind | what must be learned |
|---|---|---|
| opinion | sentiment with negation | "not" turns the judgement round |
| agreement | grammar | the verb agrees with the first noun, not with the nearest |
| shelf | category membership | animals, food and tools each have a shelf; the prompt does not say which |
| quantifier | entailment | what "every", "no", "all", "none" say about one member |
| lineup | word order | who is first, second or last in a list |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from monkeyjump.tasks import builtin_words as words
from monkeyjump.tasks.task import Example, GeneratedSource, Row, Task, pick

SIZES = {"train": 1000, "test": 200}  # at most: as many distinct rows as the material gives
Maker = Callable[[random.Random, words.Material], dict[str, Any]]


def _opinion(rng: random.Random, material: words.Material) -> dict[str, Any]:
    good, negated = rng.random() < 0.5, rng.random() < 0.5
    adjective = rng.choice(material.praise if good else material.blame)
    frame = rng.choice(material.negated_opinions if negated else material.opinions)
    text = frame.format(noun=rng.choice(material.reviewed), adjective=adjective)
    return {"text": text, "label": int(good != negated)}


def _agreement(rng: random.Random, material: words.Material) -> dict[str, Any]:
    plural = rng.random() < 0.5
    subject, near = rng.sample(material.nouns, 2)
    near_plural = plural if rng.random() < 0.3 else not plural  # mostly the nearest noun misleads
    frame = rng.choice(material.agreements)
    text = frame.format(subject=subject[plural], near=near[near_plural], adjective=rng.choice(material.states))
    return {"text": text, "label": int(plural)}


def _shelf(rng: random.Random, material: words.Material) -> dict[str, Any]:
    shelf = rng.randrange(3)
    word = rng.choice((material.animals, material.foods, material.tools)[shelf])
    return {"text": rng.choice(material.shelves).format(word=word), "label": shelf}


def _quantifier(rng: random.Random, material: words.Material) -> dict[str, Any]:
    yes = rng.random() < 0.5
    noun = rng.choice(material.nouns)
    fact = rng.choice(material.all_of if yes else material.none_of)
    adjective = rng.choice(material.states)
    question = rng.choice(material.members)
    text = fact.format(one=noun[0], many=noun[1], adjective=adjective)
    return {"text": f"{text} {question.format(one=noun[0], adjective=adjective)}", "label": int(yes)}


def _lineup(rng: random.Random, material: words.Material) -> dict[str, Any]:
    people = rng.sample(material.names, 3)
    place = rng.randrange(3)
    text = rng.choice(material.lineups).format(*people, place=("first", "second", "last")[place])
    options = rng.sample(people, 3)
    return {"text": text, "options": options, "label": options.index(people[place])}


def _fixed(options: tuple[str, ...], question: str = "") -> Callable[[Row], Example]:
    def render(row: Row) -> Example:
        label = pick(row["label"], range(len(options)))
        return Example(question=f"{row['text']}{question}", options=options, label=label)

    return render


def _own_options(row: Row) -> Example:
    options = tuple(row["options"])
    return Example(question=row["text"], options=options, label=pick(row["label"], range(len(options))))


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


def _task(name: str, make: Maker, options: tuple[str, ...] | None, description: str, question: str = "") -> Task:
    return Task(
        name=name,
        family="builtin",
        render=_fixed(options, question) if options else _own_options,
        fields=("text", "label") if options else ("text", "options", "label"),
        source=GeneratedSource(_rows(name, make)),
        options=options,
        description=description,
    )


BUILTIN_TASKS: tuple[Task, ...] = (
    _task("opinion", _opinion, ("bad", "good"), "sentiment with negation", " Good or bad?"),
    _task("agreement", _agreement, ("is", "are"), "subject-verb agreement past a misleading noun"),
    _task("shelf", _shelf, ("red", "green", "blue"), "category membership, by a rule the prompt does not tell"),
    _task("quantifier", _quantifier, ("no", "yes"), "what a quantified sentence says about one member"),
    _task("lineup", _lineup, None, "who stands where in a list of names"),
)
