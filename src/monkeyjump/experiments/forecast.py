"""Before training: do the tasks of a mixture pull the adapter in different directions, and do centres tell them apart?

The gradient of an untrained adapter says mostly how answers are written, which is the same for all tasks. What a task
asks for is in how its answers go with its inputs. So the gradient of the same rows with their answers passed around
among them is taken off, and what is left of one task is compared with what is left of another. Each task is read in two
halves: the agreement of its own halves is the most that noise leaves of the agreement with another task.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn
from tqdm.auto import tqdm

from monkeyjump import methods
from monkeyjump.analysis.rows import Rows, measure_usage
from monkeyjump.errors import ConfigError
from monkeyjump.tables import Table
from monkeyjump.tasks import Example, expand, load_examples
from monkeyjump.tasks.collate import PaddingCollator
from monkeyjump.tasks.encode import Encoder
from monkeyjump.tasks.preflight import look_at
from monkeyjump.training.data import encoding, training_data
from monkeyjump.training.fast import FastSettings
from monkeyjump.training.fused_loss import fused_loss
from monkeyjump.training.recipe import Recipe
from monkeyjump.training.shared import Shared
from monkeyjump.tuner.centers.calibrate import initialize_centers
from monkeyjump.tuner.centers.sample import forward_inputs
from monkeyjump.tuner.model import require_context

Cosines = list[list[float]]
BIT_ROWS = 384  # of all tasks together, from which the bits are counted; at most 64 of each
PLACES = ("target_modules", "shared_modules", "layers_to_transform", "layers_to_route")  # where adapters are


@dataclass(frozen=True)
class Forecast:
    """`cosines[a][b]`: the first half of task a with the second half of task b, the mean over all draws of rows."""

    tasks: list[str]
    cosines: Cosines
    bits: float  # of task information in the choice of an expert, the mean over blocks; see `analysis.usage`
    most_bits: float  # of the block that says most
    draws: list[tuple[float, float]] = field(default_factory=list)  # `within` and `between` of every draw by itself
    prompt_bits: float = 0.0  # the same, where the whole prompt decides for one group
    experts: int = 2  # in a block

    @property
    def within(self) -> float:
        return fmean(self.cosines[task][task] for task in range(len(self.tasks)))

    @property
    def between(self) -> float:
        count = range(len(self.tasks))
        return fmean(self.cosines[a][b] for a in count for b in count if a != b)

    @property
    def agreement(self) -> float:
        """1: all tasks ask for the same; 0: they have nothing to do with each other; below 0: they are opposed."""
        return self.between / self.within if self.within > 0 else float("nan")

    @property
    def standard_error(self) -> float | None:
        """Of the agreement, as of a ratio of two means over draws; None for one draw."""
        if len(self.draws) < 2 or self.within <= 0:
            return None
        apart = [between - self.agreement * within for within, between in self.draws]
        return stdev(apart) / len(apart) ** 0.5 / self.within

    @property
    def told_apart(self) -> bool:
        """Whether experts that are chosen by the prompt know half of what they could of the task."""
        return self.prompt_bits >= math.log2(min(len(self.tasks), self.experts)) / 2

    @property
    def advice(self) -> str:
        """What was found on such mixtures; docs/studies.md says on which.

        A task whose own halves do not agree is left out, as there is nothing to measure it by.
        """
        unsure = [task for place, task in enumerate(self.tasks) if place not in self.known]
        named = ", ".join(unsure[:2]) + (f" and {len(unsure) - 2} more" if len(unsure) > 2 else "")
        if len(self.known) < 2:
            return f"The halves of {named} do not agree with themselves: nothing is known. Read more --rows."
        left = f" Left out, as their halves do not agree (read more --rows): {named}." if unsure else ""
        agreement, error = self.agreement_of_known
        if agreement + 2 * (error or 0.0) >= 0:
            found = "Nothing says that the tasks are opposed, and no route was found to help then: take method=lora."
        elif self.told_apart:
            found = "The tasks are opposed, and prompts tell them apart: "
            found += "for few steps, try method=mjlora_prompt, with lora beside it."
        else:
            found = "The tasks are opposed, and prompts do not tell them apart: "
            found += "for few steps, try method=mjlora_task."
        return found + left

    @property
    def known(self) -> list[int]:
        """The places of the tasks whose own halves agree."""
        return [place for place in range(len(self.tasks)) if self.cosines[place][place] > 0]

    @property
    def agreement_of_known(self) -> tuple[float, float | None]:
        """Of these tasks, with its standard error: over draws, or of one draw over the pairs of tasks."""
        if len(self.known) < 2:
            return float("nan"), None
        within = fmean(self.cosines[place][place] for place in self.known)
        pairs = [self.cosines[a][b] for a in self.known for b in self.known if a != b]
        over_pairs = stdev(pairs) / len(pairs) ** 0.5 / within if len(self.known) > 2 else None
        return fmean(pairs) / within, over_pairs if self.standard_error is None else self.standard_error

    def table(self) -> Table:
        count, rows = range(len(self.tasks)), []
        for task in count:
            others = {b: (self.cosines[task][b] + self.cosines[b][task]) / 2 for b in count if b != task}
            least = min(others, key=others.__getitem__)
            own = self.cosines[task][task]
            cells = [f"{own:.2f}", f"{fmean(others.values()):+.2f}", f"{others[least]:+.2f} {self.tasks[least]}"]
            rows.append([self.tasks[task], *cells])
        return Table("Gradients before training", ["task", "own halves", "with others", "least with"], rows)

    def to_dict(self) -> dict[str, Any]:
        names = ("within", "between", "agreement", "standard_error", "agreement_of_known", "told_apart", "advice")
        derived = {name: getattr(self, name) for name in names}
        return {**asdict(self), **derived}


def forecast(recipe: Recipe, rows: int = 64, draws: int = 1, shared: Shared | None = None) -> Forecast:
    """Read `rows` training rows of each task, other ones in every draw, and the centres that the recipe starts from."""
    tasks = [task for task in expand(recipe.tasks, recipe.data.bad_media) if "train" not in task.absent]
    if len(tasks) < 2:
        raise ConfigError(f"tasks={recipe.tasks} is one task: a forecast compares at least two.", title="forecast")
    look_at(tasks, recipe.data.folder)
    shared = shared or Shared()
    base, tokenizer = shared.take(recipe)
    encoder = Encoder(tokenizer, {task.name: place for place, task in enumerate(tasks)}, **encoding(recipe))
    rank = recipe.adapter.get("r", 2)
    torch.manual_seed(recipe.seed)  # the adapter begins with random numbers
    plain = get_peft_model(base, methods.build("lora", "mj_paper", r=rank, dropout=0.0))
    examples = [load_examples(task, "train", recipe.data.folder, seed=recipe.seed) for task in tasks]
    found, total = [], 2 * draws * sum(min(rows, len(there)) for there in examples)
    with (
        fused_loss(plain, "auto", plain.device.type == "cuda", evaluation=True),
        tqdm(total=total, desc="gradients", unit="row", leave=False) as bar,
    ):
        for draw in range(draws):
            halves = []
            for there in examples:
                drawn = random.Random(recipe.seed + draw).sample(there, min(rows, len(there)))
                for half in (drawn[::2], drawn[1::2]):
                    own, others = (_gradient(plain, encoder, each, bar) for each in (half, passed_around(half)))
                    halves.append(own - others)
            both = nn.functional.normalize(torch.stack(halves), dim=1).view(len(tasks), 2, -1)
            found.append(both[:, 0] @ both[:, 1].T)
    shared.give_back(plain, tokenizer)
    (bits, experts), named = _bits(recipe, tasks, shared), [task.name for task in tasks]
    placed = {name: value for name, value in recipe.adapter.items() if name in PLACES}
    by_prompt, _ = _bits(recipe.model_copy(update={"method": "mjlora_prompt", "adapter": placed}), tasks, shared)
    each = [Forecast(named, cosines.tolist(), 0.0, 0.0) for cosines in found]
    pairs = [(one.within, one.between) for one in each]
    cosines = torch.stack(found).mean(0).tolist()
    return Forecast(named, cosines, fmean(bits), max(bits), pairs, fmean(by_prompt), experts)


def passed_around(examples: Sequence[Example]) -> list[Example]:
    """The same rows, each with the answer of another."""
    order = list(range(len(examples)))
    random.Random(0).shuffle(order)
    found = []
    for place, example in enumerate(examples):
        other = examples[order[(order.index(place) + 1) % len(order)]]
        label = other.label % len(example.options) if example.options else other.label
        found.append(
            replace(example, label=label, free_answer=other.free_answer, answers=other.answers, score=other.score)
        )
    return found


def _gradient(model: Any, encoder: Encoder, examples: list[Example], bar: tqdm) -> Tensor:
    """Of the mean loss of a row, over all trained weights, in fp32."""
    model.zero_grad()
    base = require_context(model).base
    collate = PaddingCollator(encoder.tokenizer.pad_token_id, pictures=encoder.pictures)
    for batch in Rows(encoder.encode_all(examples), collate):
        inputs = forward_inputs(base, batch, model.device)
        inputs.pop("logits_to_keep", None)  # the loss needs them where the answer is
        (model(**inputs).loss * len(inputs["input_ids"])).backward()
        bar.update(len(inputs["input_ids"]))
    found = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return torch.cat(found) / len(examples)


def _bits(recipe: Recipe, tasks: list[Any], shared: Shared) -> tuple[list[float], int]:
    """Bits of task information in every block, with the first centres and nothing trained; and how many centres."""
    base, tokenizer = shared.take(recipe)
    model = get_peft_model(base, methods.build(recipe.method, recipe.preset, **recipe.adapter))
    calibration = training_data(recipe, tasks, tokenizer, FastSettings(False, False)).calibration
    report = initialize_centers(model, calibration, seed=recipe.seed)
    usage = measure_usage(model, tokenizer, tasks, recipe, min(64, -(-BIT_ROWS // len(tasks))))
    shared.give_back(model, tokenizer)
    if usage is None:
        raise ConfigError(f"method={recipe.method!r} has no centres to look at: choose mjlora.", title="forecast")
    return [found.bits for found in usage.information.values()], max(map(len, report.shares.values()))
