"""Generated text to an answer: normalisation, the option it names, the number it says, what a free answer is worth."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from monkeyjump.tasks.task import LETTERS, AnswerFormat, Example

_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)?")
_LEADING_LETTER = re.compile(r"^[\s(\[\"'*]*([A-Z])(?:[)\]\"'*.:,]|\s*$)")  # not "A cat"
_SAID_LETTER = re.compile(r"\b(?:answer|option|choice)(?:\s+is)?\s*:?\s*[(\[\"'*]*([A-Z])\b", re.IGNORECASE)
_EDGES = " \t\n\r.,;:!?\"'`*()[]"

# The normalisation of the VQA challenge (Antol et al. 2015): https://visualqa.org/evaluation.html
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")  # not a decimal point
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_WORDS = {word: str(value) for value, word in enumerate(_NUMBERS)} | {"none": "0", "a": "", "an": "", "the": ""}
_CONTRACTED = """ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't
he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've
needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd somebody'd've
somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's
there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't
what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's
won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"""
_CONTRACTIONS = {  # each word without one of its apostrophes
    word[:place] + word[place + 1 :]: word
    for word in _CONTRACTED.split()
    for place, character in enumerate(word)
    if character == "'"
}


def normalize(text: str) -> str:
    """Case, width of spaces, and punctuation at the edges do not count."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(text.split()).strip(_EDGES)


def match_option(text: str, options: Sequence[str], answer_format: AnswerFormat = "letter") -> int:
    """The option a generated answer names, by its text or its letter; -1 for none.

    Only the first line counts, and it must *be* the answer: an option's text, a letter ("B", "B.", "(B)", "B. blue"),
    or a sentence that announces one ("The answer is B"). That an option's words occur somewhere is not enough: "not
    good" does not say "good". Where a text could be read both ways, the format that was asked for wins.
    """
    stripped = text.strip()
    line = stripped.splitlines()[0] if stripped else ""
    wanted = normalize(line)
    by_text = next((index for index, option in enumerate(options) if normalize(option) == wanted), -1)
    said = _LEADING_LETTER.search(line) or _SAID_LETTER.search(line)
    letters = LETTERS[: len(options)] if len(options) <= len(LETTERS) else ""
    by_letter = letters.find(said.group(1).upper()) if said else -1
    first, second = (by_letter, by_text) if answer_format == "letter" else (by_text, by_letter)
    return first if first >= 0 else second


def number_in(text: str) -> float | None:
    """The first number of a text; a comma may be the decimal point."""
    found = _NUMBER.search(text)
    return float(found.group().replace(",", ".")) if found else None


# -- free answers -------------------------------------------------------------------------------


def free_credit(text: str, example: Example) -> float:
    """What a free answer is worth by the metric of its task, from 0 to 1."""
    if example.metric == "vqa_accuracy" and example.answers:
        return vqa_accuracy(text, example.answers)
    if example.metric == "relaxed_accuracy":
        return relaxed_accuracy(text, example.free_answer)
    return float(normalize(text) == normalize(example.free_answer))


def relaxed_accuracy(text: str, answer: str) -> float:
    """ChartQA's measure (Masry et al. 2022): a number may be off by 5 % of the right one, a text must be the same."""
    said, right = _chart_number(text), _chart_number(answer)
    if said is not None and right:
        return float(abs(said - right) <= 0.05 * abs(right))
    return float(normalize(text) == normalize(answer))


def _chart_number(text: str) -> float | None:
    """A number, or a percentage as a part of one, as the metric's first code reads it."""
    text = text.strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def vqa_accuracy(text: str, answers: Sequence[str]) -> float:
    """min(n / 3, 1) for n people of the same answer, as a mean over all ways to leave one person out."""
    said = vqa_normalize(text)
    same = [vqa_normalize(answer) == said for answer in answers]
    if len(same) == 1:  # nobody is left without that one
        return float(same[0])
    return sum(min((sum(same) - own) / 3, 1.0) for own in same) / len(same)


def vqa_normalize(text: str) -> str:
    """Lower case, number words as digits, apostrophes where they belong; without articles and punctuation."""
    text = " ".join(text.split())
    plain = text
    for mark in _PUNCTUATION:
        glued = f"{mark} " in text or f" {mark}" in text or _COMMA_IN_NUMBER.search(text)
        plain = plain.replace(mark, "" if glued else " ")
    words = (_WORDS.get(word, word) for word in _PERIOD.sub("", plain).lower().split())
    return " ".join(_CONTRACTIONS.get(word, word) for word in words if word)
