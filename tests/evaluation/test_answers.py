"""What a generated text is taken to mean."""

from __future__ import annotations

import pytest

from monkeyjump.evaluation.answers import match_option, normalize, number_in

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


def test_normalize():
    assert normalize('  "Hello"  World! ') == 'hello" world'
    assert normalize("\uff21\uff22\uff23") == "abc"


@pytest.mark.parametrize(("text", "value"), [("3.5", 3.5), ("about 4,2 of 5", 4.2), ("-1", -1.0), ("none", None)])
def test_numbers(text, value):
    assert number_in(text) == value
