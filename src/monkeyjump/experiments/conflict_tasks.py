"""Tasks whose conflict is a dial: the same sentences, and rules that answer a share of them differently.

A sentence has a noun, a place and an adjective. The adjective is of one of four kinds, and the answer is one of four
directions. Rules of even numbers answer each kind with a direction of its own. In those of odd numbers the disputed
kinds, a share of the four, pass their directions on, by one place, two or three in turn. At conflict 0 all rules are
one; at 1 two neighbouring rules agree on no sentence. Half of the rules or more agree with each other: if all answers
to a kind were equally frequent, nothing could be learned of kinds before the rules, nor of rules before the kinds. What
tells the rule is the cue: its number (given), the way the question is put (wording), or only what the sentence is about
(domain). Training and test share no noun, place or adjective.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.record import write_atomic
from monkeyjump.tables import csv_text

CUES = ("given", "wording", "domain")
ANSWERS = ("north", "east", "south", "west")
ROWS = {"train": 9_600, "test": 1_280}  # of all rules together, so that more rules are not more steps
MOST_RULES = 32
HELD_OUT = {"kinds": 4, "nouns": 3, "places": 2}  # words at the end of each list that only the test has

KINDS = (
    "red blue green yellow purple orange pink brown grey violet scarlet turquoise",
    "huge tiny large small enormous little gigantic big miniature vast immense minuscule",
    "hot cold warm chilly freezing boiling cool icy lukewarm frozen scorching frosty",
    "happy sad angry proud jealous cheerful lonely nervous joyful gloomy furious anxious",
)
NOUNS = (
    "horse rabbit goat wolf camel otter tiger donkey",
    "doctor baker teacher farmer pilot nurse lawyer plumber",
    "hammer shovel wrench chisel rake drill mallet spade",
    "violin trumpet flute piano drum guitar cello harp",
    "lorry tractor bicycle canoe ferry tram scooter van",
    "oak willow pine maple birch cedar palm elm",
    "sofa table wardrobe desk stool shelf armchair bench",
    "pancake onion cheese noodle muffin carrot omelette sausage",
)
PLACES = (
    "kitchen cellar attic bedroom bathroom",
    "forest meadow desert valley swamp",
    "harbour lagoon ocean lake river",
    "station airport garage tunnel bridge",
)
OPENINGS = (
    *("Tell me this.", "Dear reader,", "Listen:", "A riddle.", "For the record,", "Hello again.", "Please note:"),
    "By the way,",
)
QUESTIONS = ("Which way?", "Where to now?", "What is the direction?", "Where does it point?")


@dataclass(frozen=True)
class Setting:
    """One place of the map."""

    conflict: float
    rules: int
    rank: int
    cue: str

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.conflict <= 1 or self.conflict * len(ANSWERS) % 1 or self.disputed == 1:
            problems.append(
                f"conflict={self.conflict:g} must be 0, 0.5, 0.75 or 1: two of four kinds dispute at least."
            )
        if not 2 <= self.rules <= MOST_RULES:
            problems.append(f"rules={self.rules} must be from 2 to {MOST_RULES}.")
        if self.rank < 1:
            problems.append(f"rank={self.rank} must be 1 or more.")
        if self.cue not in CUES:
            problems.append(f"cue={self.cue!r} must be one of {', '.join(CUES)}.")
        if problems:
            raise ConfigError(problems, title="study conflict")

    @property
    def disputed(self) -> int:
        """How many kinds the rules answer differently."""
        return round(self.conflict * len(ANSWERS))

    @property
    def data(self) -> str:
        """The name of its tasks, which settings of other ranks share."""
        return f"{self.cue}-{self.rules}-{100 * self.conflict:g}"

    def __str__(self) -> str:
        return f"{self.data}-r{self.rank}"

    @property
    def blind(self) -> float:
        """The share of right answers, at best, of whoever knows the kinds and not the rules."""
        by_kind = (Counter(self.answer(rule, kind) for rule in range(self.rules)) for kind in range(len(KINDS)))
        return fmean(max(counts.values()) / self.rules for counts in by_kind)

    def answer(self, rule: int, kind: int) -> str:
        if kind >= self.disputed:
            return ANSWERS[kind]
        passed_on = 1 + rule // 2 % (self.disputed - 1) if rule % 2 else 0
        return ANSWERS[(kind + passed_on) % self.disputed]


def write_tasks(setting: Setting, folder: Path) -> list[str]:
    """The rules as task files with their rows beside them; returns the paths."""
    home, found = folder / setting.data, []
    for rule in range(setting.rules):
        name = f"rule-{rule:02}"
        for split in ROWS:
            rows = list(rows_of(setting, rule, split))
            write_atomic(home / name / f"{split}.csv", csv_text([["text", "answer"], *rows]))
        content: dict[str, Any] = {"name": name, "prompt": "{text}", "options": list(ANSWERS), "answer": "answer"}
        content |= {"data": {split: f"{name}/{split}.csv" for split in ROWS}, "family": setting.data}
        found.append(str(write_atomic(home / f"{name}.yaml", json.dumps(content, indent=1) + "\n")))  # JSON is YAML
    return found


def rows_of(setting: Setting, rule: int, split: str) -> Iterator[tuple[str, str]]:
    """(text, answer), all kinds alike. With a cue other than the domain, every rule asks about the same sentences."""
    nouns, places = (NOUNS, PLACES) if setting.cue != "domain" else ([NOUNS[rule % 8]], [PLACES[rule // 8]])
    things = list(product(_words(nouns, "nouns", split), _words(places, "places", split)))
    all_of = [
        [
            (f"The {noun} in the {place} is {word}.", kind)
            for noun, place in things
            for word in _words([words], "kinds", split)
        ]
        for kind, words in enumerate(KINDS)
    ]
    for sentences in all_of:
        random.Random(split).shuffle(sentences)
    wanted = ROWS[split] // setting.rules // len(KINDS)
    for number in range(wanted if split == "train" else min(wanted, len(all_of[0]))):  # no test row twice
        for sentence, kind in (sentences[number % len(sentences)] for sentences in all_of):
            if setting.cue == "given":
                text = f"Rule {rule}. {sentence} {QUESTIONS[0]}"
            elif setting.cue == "wording":
                text = f"{OPENINGS[rule % 8]} {sentence} {QUESTIONS[rule // 8]}"
            else:
                text = f"{sentence} {QUESTIONS[0]}"
            yield text, setting.answer(rule, kind)


def _words(texts: Sequence[str], what: str, split: str) -> list[str]:
    held_out = HELD_OUT[what]
    own = slice(None, -held_out) if split == "train" else slice(-held_out, None)
    return [word for text in texts for word in text.split()[own]]
