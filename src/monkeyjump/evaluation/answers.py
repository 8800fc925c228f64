"""Generated text to an answer: normalisation, the option it names, the number it says."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from monkeyjump.tasks.task import LETTERS, AnswerFormat

_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)?")
_LEADING_LETTER = re.compile(r"^[\s(\[\"'*]*([A-Z])(?:[)\]\"'*.:,]|\s*$)")  # not "A cat"
_SAID_LETTER = re.compile(r"\b(?:answer|option|choice)(?:\s+is)?\s*:?\s*[(\[\"'*]*([A-Z])\b", re.IGNORECASE)
_EDGES = " \t\n\r.,;:!?\"'`*()[]"


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
    by_letter = _letter(line, len(options))
    first, second = (by_letter, by_text) if answer_format == "letter" else (by_text, by_letter)
    return first if first >= 0 else second


def _letter(line: str, count: int) -> int:
    found = _LEADING_LETTER.search(line) or _SAID_LETTER.search(line)
    if found is None:
        return -1
    index = LETTERS.find(found.group(1).upper())
    return index if index < count else -1


def number_in(text: str) -> float | None:
    """The first number of a text; a comma may be the decimal point."""
    found = _NUMBER.search(text)
    return float(found.group().replace(",", ".")) if found else None
