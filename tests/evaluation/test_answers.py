"""What a generated text is taken to mean."""

from __future__ import annotations

import pytest

from monkeyjump.evaluation.answers import (
    free_credit,
    match_option,
    normalize,
    number_in,
    relaxed_accuracy,
    vqa_accuracy,
    vqa_normalize,
)
from monkeyjump.evaluation.rows import task_score
from monkeyjump.evaluation.score import Prediction
from monkeyjump.tasks import Example

COLOURS = ("red", "green", "blue")


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("B", 1),
        (" b", -1),  # a small letter is a word ("a") more often than an answer
        ("B.", 1),
        ("(C)", 2),
        ("**A**", 0),
        ("B) green", 1),
        ("C: blue", 2),
        ("green", 1),
        (" Green.\nBecause it is.", 1),
        ("The answer is C", 2),
        ("The correct answer is: (C).", 2),
        ("answer: B", 1),
        ("D", -1),  # there are three options
        ("not red", -1),
        ("red or blue", -1),
        ("Blueberry", -1),
        ("", -1),
        ("\n\n", -1),
    ],
)
def test_options(text, option):
    assert match_option(text, COLOURS) == option


def test_the_wanted_format_decides_a_conflict():
    options = ("B", "A")  # option A is called "B"
    assert match_option("B", options, "letter") == 1
    assert match_option("B", options, "text") == 0


def test_articles_are_not_letters():
    options = ("a dog", "a cat")
    assert match_option("A cat", options, "text") == 1
    assert match_option("A cat", options, "letter") == 1
    assert match_option("A horse", options, "letter") == -1


def test_a_hundred_classes_have_no_letters():
    options = ("A", "D", *(f"class {n}" for n in range(98)))
    assert match_option("class 7", options, "letter") == 9
    assert match_option("D", options, "letter") == 1  # by its name
    assert match_option("B.", options, "letter") == -1


def test_normalize():
    assert normalize('  "Hello"  World! ') == 'hello" world'
    assert normalize("\uff21\uff22\uff23") == "abc"


@pytest.mark.parametrize(("text", "value"), [("3.5", 3.5), ("about 4,2 of 5", 4.2), ("-1", -1.0), ("none", None)])
def test_numbers(text, value):
    assert number_in(text) == value


# -- free answers -------------------------------------------------------------------------------


@pytest.mark.parametrize(("same", "score"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (9, 1.0), (10, 1.0)])
def test_ten_answers(same, score):
    """The values that the VQA challenge's leave-one-out mean gives for n people of the same answer."""
    answers = ["Two dogs."] * same + [f"other {n}" for n in range(10 - same)]
    assert vqa_accuracy("2 dogs", answers) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The dog.", "dog"),
        ("a cat and an owl", "cat and owl"),
        ("None", "0"),
        ("ten", "10"),
        ("eleven", "eleven"),
        ("dont know", "don't know"),
        ("couldnt've", "couldn't've"),
        ("couldn'tve", "couldn't've"),
        ("'ows'at", "'ow's'at"),
        ("it's", "it's"),
        ("1,000", "1000"),  # a comma in a number takes all marks away
        ("red, white", "red white"),  # a mark beside a space goes
        ("red/white", "red white"),  # one between letters is a space
        ("black-and-white?", "black and white"),
        ("3.50 dollars.", "3.50 dollars"),
        ("U.S.A.", "usa"),
        ("  new\nline\t", "new line"),
    ],
)
def test_the_vqa_challenges_normalisation(text, normal):
    assert vqa_normalize(text) == normal


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("105", "100", 1),  # 5 % off
        ("105.1", "100", 0),
        ("95", "100", 1),
        ("94.9", "100", 0),
        ("-10.4", "-10", 1),
        ("14%", "0.14", 1),
        ("14%", "14", 0),  # as the first code has it
        ("0", "0", 1),  # of zero nothing is 5 %
        ("0.01", "0", 0),
        ("2009", "2010", 1),
        ("Yes", "yes", 1),
        ("No", "yes", 0),
        ("nan", "5", 0),
        ("5", "five", 0),
    ],
)
def test_chart_answers_may_be_a_little_off(text, answer, score):
    assert relaxed_accuracy(text, answer) == score


def test_the_task_says_how_a_free_answer_is_judged():
    votes = tuple(["red"] * 2 + ["blue"] * 8)
    assert free_credit("red", Example("?", free_answer="blue", answers=votes, metric="vqa_accuracy")) == 0.6
    assert free_credit("104", Example("?", free_answer="100", metric="relaxed_accuracy")) == 1
    assert free_credit("104", Example("?", free_answer="100")) == 0
    assert free_credit("Red.", Example("?", free_answer="red", metric="vqa_accuracy")) == 1  # a copy with one answer


def test_partly_right_answers_count_in_part():
    found = [
        Prediction(0, -1, -1, True, points=0.6),
        Prediction(1, -1, -1, False, points=0.3),
        Prediction(2, 1, 1, True),
    ]
    assert task_score("vqa_accuracy", found) == pytest.approx(1.9 / 3)
