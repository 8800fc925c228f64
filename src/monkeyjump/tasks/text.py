"""The 14 text tasks of the paper as rows: 6 of GLUE, 8 of commonsense reasoning and question answering.

Test is the split with public labels: GLUE, BoolQ, PIQA, Social IQA, HellaSwag and WinoGrande have none on their
official test split, so their validation split is our test (the paper's sample counts say the same); the validation
split we tune on is carved from train. Columns and label values are the hub's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from monkeyjump.tasks.cells import BadLabelError, Row, columns_of, listed, lookup, missing, number, pick
from monkeyjump.tasks.task import LETTERS, Example, HubSource, Task

_DIGITS = "123456789"
_TAG = re.compile(r"\s*\[(?:header|title|step|substeps)\]\s*")  # layout of WikiHow rows, not language
_PAIR = "Sentence 1: {sentence1}\nSentence 2: {sentence2}"
_NO_YES = ("no", "yes")


def _text(row: Row, column: str) -> str:
    return "" if missing(row[column]) else str(row[column]).strip()


def _stsb(row: Row) -> Example:
    """Six whole-number options; `score` keeps the gold decimal.

    Options, not a decimal to be written out: the three ways of scoring then work as for every other task, and the
    expected value under the options' probabilities is a continuous prediction, which is what a rank correlation wants.
    """
    value = row["score"] if "score" in row else row["label"]  # the hub calls it label
    score = number(value)
    if score is None or not 0 <= score <= 5:
        raise BadLabelError(f"score {value!r} is not a number from 0 to 5")
    return Example(
        context=_PAIR.format(sentence1=_text(row, "sentence1"), sentence2=_text(row, "sentence2")),
        question="How similar are the two sentences, from 0 (unrelated) to 5 (same meaning)?",
        options=tuple("012345"),
        label=int(score + 0.5),  # half up: 2.5 is nearer to "rather similar"
        score=score,
    )


def _boolq(row: Row) -> Example:
    question, passage = _text(row, "question").rstrip("?"), f"Passage: {_text(row, 'passage')}"
    label = pick(row["answer"], (False, True))
    return Example(f"{question[:1].upper()}{question[1:]}?", _NO_YES, label, context=passage)


def _hellaswag(row: Row) -> Example:
    context, *endings = (_TAG.sub(" ", str(text)).strip() for text in (row["ctx"], *listed(row["endings"], "endings")))
    label = pick(row["label"], range(len(endings)))
    return Example("How does this go on?", tuple(endings), label, context=context, cut="start")


def _choices(column: str, row: Row) -> Example:
    """ARC and OpenBookQA: choices with labels of their own, A-E in most rows, 1-5 in some; ours are always letters."""
    options, names = (
        [str(entry).strip() for entry in listed(lookup(row, path), path)] for path in ("choices.text", "choices.label")
    )
    key = str(row["answerKey"]).strip()
    if key not in names:  # a key of the other alphabet, seen in copies of ARC
        swapped = dict(zip(_DIGITS + LETTERS[:9], LETTERS[:9] + _DIGITS, strict=True))
        key = swapped.get(key, key) if swapped.get(key) in names else key
    return Example(_text(row, column), tuple(options), pick(key, names))


def _ask(
    context: str, question: str, options: tuple[str, ...], answer: str = "label", labels: Sequence[Any] = (0, 1)
) -> dict[str, Any]:
    """What a task of templates is: how its rows are rendered, the columns it reads, and options if they never change.

    `labels` are the values of the column `answer`, in the order of the options.
    """
    columns = list(dict.fromkeys(columns_of("".join((context, question, *options)))))
    fixed = None if columns_of("".join(options)) else options
    render = partial(_asked, context, question, options, answer, labels, columns)
    return {"render": render, "fields": (*columns, answer), "options": fixed}


def _asked(
    context: str,
    question: str,
    options: tuple[str, ...],
    answer: str,
    labels: Sequence[Any],
    columns: list[str],
    row: Row,
) -> Example:
    texts = {column: _text(row, column) for column in columns}
    offered = tuple(option.format_map(texts) for option in options)
    return Example(question.format_map(texts), offered, pick(row[answer], labels), context.format_map(texts))


def _own(render: Callable[[Row], Example], fields: str, options: tuple[str, ...] | None = None) -> dict[str, Any]:
    return {"render": render, "fields": tuple(fields.split()), "options": options}


def _glue(name: str, description: str, *asked: Any, **how: Any) -> Task:
    how = how or _ask(*asked)
    return Task(name, "glue", source=HubSource("nyu-mll/glue", name), description=description, **how)


def _qa(name: str, hub: str, description: str, **asked: Any) -> Task:
    """`hub` is "owner/name configuration"; the official test split is used where its gold is public."""
    id, _, config = hub.partition(" ")
    test = "test" if id in ("allenai/ai2_arc", "allenai/openbookqa") else "validation"
    source = HubSource(id, config or None, splits={"train": "train", "test": test})
    return Task(name, "commonsense", source=source, description=description, **asked)


_SENTENCE, _QUESTIONS = "Sentence: {sentence}", "Question 1: {question1}\nQuestion 2: {question2}"
_ENTAILED = "Does the sentence answer this question: {question}"
_STSB = {"metric": "spearman", **_own(_stsb, "sentence1 sentence2 score|label", tuple("012345"))}
_ARC = _own(partial(_choices, "question"), "question choices answerKey")
_BOOK = _own(partial(_choices, "question_stem"), "question_stem choices answerKey")
_SOLUTIONS = _ask("", "Goal: {goal}\nWhich way works?", ("{sol1}", "{sol2}"))
_SOCIAL = _ask("{context}", "{question}", ("{answerA}", "{answerB}", "{answerC}"), "label", ("1", "2", "3"))
_BLANK = _ask("", "{sentence}\nWhat fits the blank?", ("{option1}", "{option2}"), "answer", ("1", "2"))
_REVIEW = ("Review: {sentence}", "What is the sentiment of the review?", ("negative", "positive"))

TEXT_TASKS: tuple[Task, ...] = (
    _glue("sst2", "sentiment of film reviews", *_REVIEW),
    _glue("qnli", "does the sentence answer the question", _SENTENCE, _ENTAILED, ("yes", "no")),  # 0 is entailment
    _glue("qqp", "duplicate questions", _QUESTIONS, "Do the two questions ask the same thing?", _NO_YES),
    _glue("cola", "linguistic acceptability", _SENTENCE, "Is the sentence grammatically acceptable?", _NO_YES),
    _glue("mrpc", "paraphrases", _PAIR, "Do the two sentences mean the same?", _NO_YES),
    _glue("stsb", "semantic similarity", **_STSB),
    _qa("boolq", "google/boolq", "yes/no reading", **_own(_boolq, "question passage answer", _NO_YES)),
    # the original piqa and social_i_qa are loading scripts, which `datasets` no longer runs: these are parquet copies
    _qa("piqa", "baber/piqa", "physical commonsense", **_SOLUTIONS),
    _qa("social_iqa", "lighteval/siqa", "social commonsense", **_SOCIAL),
    _qa("hellaswag", "Rowan/hellaswag", "sentence completion", **_own(_hellaswag, "ctx endings label")),
    _qa("winogrande", "allenai/winogrande winogrande_xl", "pronoun resolution", **_BLANK),
    _qa("arc_easy", "allenai/ai2_arc ARC-Easy", "school science questions (ARC-Easy)", **_ARC),
    _qa("arc_challenge", "allenai/ai2_arc ARC-Challenge", "school science questions (ARC-Challenge)", **_ARC),
    _qa("openbookqa", "allenai/openbookqa main", "elementary science with common knowledge", **_BOOK),
)
