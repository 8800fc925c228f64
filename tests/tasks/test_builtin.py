from __future__ import annotations

import re
from collections import Counter

import pytest

from monkeyjump import tasks
from monkeyjump.tasks import builtin_words
from monkeyjump.tasks.builtin import BUILTIN_TASKS
from monkeyjump.tasks.task import GeneratedSource, Task

# words of the questions and of the rules themselves; everything else must differ between train and test
FUNCTION_WORDS = set(
    re.findall(
        r"\w+",
        """the a an and or of in on at to from for is are was be not no it its this that there what which who
        where word fits very then good bad i did my would you put right name
        all any one next does go will ___""",
    )
)


def words_of(task: Task, split: str) -> set[str]:
    assert isinstance(task.source, GeneratedSource)
    rows = task.source.generate(split, 0)
    return {word.lower() for row in rows for word in re.findall(r"[\w-]+", row["text"])} - FUNCTION_WORDS


@pytest.mark.parametrize("task", BUILTIN_TASKS, ids=lambda task: task.name)
def test_train_and_test_share_no_content_word(task: Task) -> None:
    assert words_of(task, "train") & words_of(task, "test") == set()


def test_no_frame_is_shared() -> None:
    frames = ("opinions", "agreements", "places", "all_of", "none_of", "members", "events")
    for name in frames:
        assert not set(getattr(builtin_words.TRAIN, name)) & set(getattr(builtin_words.TEST, name))


@pytest.mark.parametrize("task", BUILTIN_TASKS, ids=lambda task: task.name)
def test_same_seed_same_rows_and_test_never_moves(task: Task) -> None:
    source = task.source
    assert isinstance(source, GeneratedSource)
    assert source.generate("train", 3) == source.generate("train", 3)
    assert source.generate("train", 3) != source.generate("train", 4)
    assert source.generate("test", 3) == source.generate("test", 4)


@pytest.mark.parametrize("task", BUILTIN_TASKS, ids=lambda task: task.name)
def test_rows_are_distinct_enough_and_balanced(task: Task) -> None:
    for split, least in (("train", 300), ("test", 150)):
        assert isinstance(task.source, GeneratedSource)
        examples = [task.example(row) for row in task.source.generate(split, 0)]
        assert len(examples) >= least
        assert len({example.question for example in examples}) == len(examples)
        counts = Counter(example.letter for example in examples)
        chance = 1 / len(examples[0].options)
        assert max(counts.values()) / len(examples) < chance + 0.1  # always saying one thing is no better than chance


def test_gold_answers() -> None:
    """The rule behind each task, stated a second time on finished rows."""
    for example in tasks.load_examples(tasks.get("agreement"), "test"):
        head = example.question.split()[1]
        assert example.answer == ("are" if head.endswith("s") and head != "glass" else "is"), example.question
    for example in tasks.load_examples(tasks.get("opinion"), "test"):
        praised = any(word in example.question for word in builtin_words.TEST.praise)
        assert example.answer == ("good" if praised else "bad"), example.question
    for example in tasks.load_examples(tasks.get("tense"), "test"):
        assert example.answer == ("future" if " will " in example.question else "past"), example.question
    for example in tasks.load_examples(tasks.get("quantifier"), "test"):
        assert example.answer == ("no" if re.search(r"\bno\b|never", example.question) else "yes"), example.question
    for example in tasks.load_examples(tasks.get("place"), "test"):
        is_food = any(re.search(rf"\b{word}\b", example.question) for word in builtin_words.TEST.foods)
        assert (example.answer == "kitchen") == is_food, example.question


def test_the_quickstart_mixture_is_the_learnable_five() -> None:
    assert tasks.groups()["builtin"] == ["opinion", "agreement", "place", "quantifier", "tense"]
