"""What scoring adapters of one base model, one after another, need not make again."""

from __future__ import annotations

from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from monkeyjump.evaluation.jobs import Job, Mode, make_jobs
from monkeyjump.evaluation.score import Prediction, Scorer, Sides
from monkeyjump.tasks import Example
from monkeyjump.tasks.encode import EncodeCounts, Encoder


@dataclass
class Memory:
    """The jobs of examples that were encoded before, and the answers of the base model to jobs.

    Examples are recognised by their content, so that other rows, as another seed may give, are encoded and scored.
    """

    _base: dict[Job, Prediction] = field(default_factory=dict)
    _encoded: dict[Any, list[tuple[list[Example], list[Job], EncodeCounts]]] = field(default_factory=dict)

    def jobs(self, encoder: Encoder, examples: list[Example], mode: Mode) -> list[Job]:
        """The same as `make_jobs`, with its counts."""
        task, counts = examples[0].task, encoder.counts
        key = task, encoder.task_ids.get(task), encoder.max_length, encoder.answer_format, mode
        for seen, jobs, known in self._encoded.setdefault(key, []):
            if seen == examples:
                for name, count in vars(counts).items():
                    count[task] += getattr(known, name)[task]
                return jobs
        jobs = make_jobs(encoder, examples, mode)
        self._encoded[key].append((examples, jobs, deepcopy(counts)))
        return jobs

    def score(self, scorer: Scorer, lists: list[Future[list[Job]]], sides: Sides) -> dict[str, dict[Job, Prediction]]:
        """The same as `scorer.score`, without the base model where it has answered all of this before."""
        known = "base" in sides and all(job in self._base for jobs in lists for job in jobs.result())
        if known and scorer.progress is not None:
            scorer.progress.update(sum(len(jobs.result()) for jobs in lists))
        left = {side: switched for side, switched in sides.items() if not (known and side == "base")}
        found = scorer.score((jobs.result() for jobs in lists), left)
        self._base.update(found.get("base", {}))
        return {**({"base": self._base} if known else {}), **found}
