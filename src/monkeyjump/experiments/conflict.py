"""Where routing helps: its gain over a constant gate and over LoRA, by conflict, number of rules, rank and cue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from monkeyjump import count_parameters
from monkeyjump import methods as presets
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.metrics import holm, paired_difference
from monkeyjump.experiments.compare import run_grid
from monkeyjump.experiments.comparison import Comparison, failed
from monkeyjump.experiments.conflict_tasks import ANSWERS, Setting, write_tasks
from monkeyjump.experiments.forecast import forecast
from monkeyjump.experiments.tables import spread
from monkeyjump.methods.presets import PAPER_TARGETS
from monkeyjump.models import resolve
from monkeyjump.registry import did_you_mean
from monkeyjump.training.recipe import Recipe, overridden

GATE = 0.23  # the mean gate of whatever has centres, so that strength explains no difference
RECIPE = (
    *("name=conflict", "adapter.dropout=0.0", "data.answer=text", "data.max_length=128", "data.validation=400"),
    *("train.lr=4e-3", "train.max_steps=300", "train.batch_size=32", "train.accumulation=1", "train.warmup=0.05"),
    *("train.weight_decay=0.0", "train.eval_steps=300", "evaluate.before=false", "evaluate.validation_limit=400"),
    "adapter.init_tokens=5000",  # of whole prompts, where they are routed
)
CENTRED = ("adapter.route_space=centered", f"adapter.mean_gate={GATE}")
ROUTED: dict[str, tuple[str, ...]] = {
    "paper": ("method=mjlora",),
    "centred": ("method=mjlora", *CENTRED),
    "ranks": ("method=mjlora", *CENTRED, "adapter.expert_unit=rank", "adapter.temperature=0.2"),
    "prompt": ("method=mjlora_prompt",),
    "random": ("method=mjlora_prompt_random",),
    "oracle": ("method=mjlora_task",),  # the groups of `prompt`, chosen by the rule itself
}
MIXTURES = {"lime": ("method=lime",), "moelora": ("method=moelora",), "hydralora": ("method=hydralora",)}
CONSTANT, LORA = "constant gate", "lora"
REFERENCES = {CONSTANT: ("method=mjlora_uniform", f"adapter.uniform_gate={GATE}"), LORA: ("method=lora",)}
FORECAST_ROWS = 512  # of all rules, at most 128 of each: more rules have more pairs, whose errors average
CERTAIN = 0.01  # the corrected p-value below which a gain is marked
LEARNED = 0.1  # above what whoever does not know the rules reaches; above guessing, where they are all one


@dataclass(frozen=True)
class Gain:
    """A method less a reference at one place of the map, paired by seed."""

    setting: Setting
    method: str
    reference: str
    points: dict[str, Any]  # of the mean accuracy
    nll: dict[str, Any]  # of the right answer; below zero is better
    corrected: float  # the p-value of the points, for the number of places and methods of this reference

    @property
    def certain(self) -> bool:
        return self.corrected < CERTAIN


@dataclass
class Map:
    """All runs of all places in one grid, so that they share the base model and run side by side."""

    settings: list[Setting]
    methods: list[str]
    recipe: Recipe
    grid: Comparison
    forecasts: dict[str, dict[str, Any]]  # by the name of the tasks

    def gains(self) -> list[Gain]:
        found: list[Gain] = []
        for kind in ("constant", "lora"):
            raw = []
            for setting in self.settings:
                for method in self.methods:
                    reference = CONSTANT if kind == "constant" else _size_of(method)
                    points, nll = (
                        paired_difference(
                            self._measured(setting, method, measure), self._measured(setting, reference, measure)
                        )
                        for measure in ("mean", "mean_nll")
                    )
                    raw.append(Gain(setting, method, reference, asdict(points), asdict(nll), points.p_value))
            corrected = holm([gain.corrected for gain in raw])
            found += [replace(gain, corrected=p) for gain, p in zip(raw, corrected, strict=True)]
        return found

    def unlearned(self) -> list[Setting]:
        """Where nothing that was trained tells the rules apart: a gain of 0 says nothing there."""
        best = {s: max(self.accuracy(s, name) for name in _names(self.methods)) for s in self.settings}
        return [s for s, top in best.items() if top < (s.blind if s.disputed else 1 / len(ANSWERS)) + LEARNED]

    def _measured(self, setting: Setting, method: str, measure: str) -> list[float]:
        values = self.grid.measured(_label(method, setting), measure)
        return [float("nan") if value is None else value for value in values]

    def accuracy(self, setting: Setting, method: str) -> float:
        return fmean(self._measured(setting, method, "mean"))

    def rows(self) -> list[dict[str, Any]]:
        """What every run of a place measured, over seeds."""
        found = []
        for setting in self.settings:
            for method in _names(self.methods):
                cells = [c.metrics for c in self.grid.final if c.method == _label(method, setting)]
                points, nlls = (self._measured(setting, method, measure) for measure in ("mean", "mean_nll"))
                row = {**asdict(setting), "method": method, "lr": self.grid.best_lr(_label(method, setting))}
                row |= {"trainable": cells[0]["trainable"], "mean": fmean(points), "sd": spread(points)}
                row |= {"nll": fmean(nlls), "values": points, "nlls": nlls}
                found.append(row | {"failed": sum(failed(cell) for cell in cells)})
        return found


def chosen(names: str | None) -> list[str]:
    """The methods of a map from a list with commas; all of them by default."""
    known = [*ROUTED, *MIXTURES]
    found = names.split(",") if names else known
    unknown = [f"--methods {name!r} is not on the map.{did_you_mean(name, known)}" for name in {*found} - {*known}]
    if unknown:
        raise ConfigError([*unknown, f"Choose among {', '.join(known)}."], title="study conflict")
    return list(dict.fromkeys(found))


def run_map(
    settings: Sequence[Setting], methods: list[str], base: Recipe, seeds: Sequence[int],
    lrs: Sequence[float], output: Path, widen: bool = False, **where: Any,
) -> Map:  # fmt: skip
    """Search the rate of every method and rank at one place, then make the runs of all places with it."""
    recipes = {}
    tasks = {data: write_tasks(setting, output / "data") for data, setting in {s.data: s for s in settings}.items()}
    for setting in settings:
        place = base.model_copy(update={"tasks": tasks[setting.data]})
        for method in _names(methods):
            recipes[_label(method, setting)] = overridden(place, _settings(method, setting, base.model))
    rates = {name: list(lrs) for name in recipes}
    folders = {name: name.replace(" ", "-").replace("@", "+") for name in recipes}
    if len(set(lrs)) > 1:
        for rank in {setting.rank for setting in settings}:
            easiest = _easiest([setting for setting in settings if setting.rank == rank])
            there = {_label(method, easiest): method for method in _names(methods)}
            search = Comparison(
                base, {name: recipes[name] for name in there}, [seeds[0]], {name: list(lrs) for name in there},
                folders={name: folders[name] for name in there}, widen=widen,
            )  # fmt: skip
            run_grid(search, output, **where)
            for name, method in there.items():
                same = [_label(method, setting) for setting in settings if setting.rank == rank]
                rates |= {other: [search.best_lr(name)] for other in same}
    grid = Comparison(base, recipes, list(seeds), rates, folders=folders)
    run_grid(grid, output, **where)
    forecasts = {}
    for setting in settings:  # the first of each data set
        if setting.data not in forecasts:
            recipe = overridden(recipes[_label(CONSTANT, setting)], _settings("paper", setting, base.model))
            recipe.adapter.pop("uniform_gate", None)
            rows = min(128, FORECAST_ROWS // setting.rules)
            forecasts[setting.data] = forecast(recipe, rows=rows, shared=grid.shared).to_dict()
    return Map(list(settings), methods, base, grid, forecasts)


def _easiest(settings: list[Setting]) -> Setting:
    """Where rates are searched: of the places of the highest conflict the one with the fewest rules.

    More rules are learned later or not at all, and where nothing is learned all rates are alike.
    """
    most = [setting for setting in settings if setting.conflict == max(s.conflict for s in settings)]
    return min(most, key=lambda setting: setting.rules)


def _label(method: str, setting: Setting) -> str:
    return f"{setting}@{method}"


def _size_of(method: str) -> str:
    """The LoRA of as many parameters."""
    return f"{LORA} for {method}" if method in MIXTURES else LORA


def _names(methods: list[str]) -> list[str]:
    """The methods with all that they are compared with."""
    return [*REFERENCES, *(_size_of(method) for method in methods if method in MIXTURES), *methods]


def _settings(method: str, setting: Setting, model: str) -> list[str]:
    own = [f"adapter.r={setting.rank}"]
    if method.startswith(f"{LORA} for "):
        own = [f"adapter.r={_as_large(method.removeprefix(f'{LORA} for '), setting.rank, model)}"]
    elif method == "ranks":
        own.append(f"adapter.top_k={-(-3 * setting.rank // 2)}")  # half of the ranks of q, k and v
    elif method in ("prompt", "random", "oracle"):  # a group for each rule, as far as the ranks go
        own.append(f"adapter.task_experts={min(setting.rules, len(PAPER_TARGETS) * setting.rank)}")
    named = REFERENCES | ROUTED | MIXTURES
    return [*named.get(method, REFERENCES[LORA]), *own]


@cache
def _as_large(method: str, rank: int, model: str) -> int:
    """The rank at which LoRA has as many trainable parameters as a mixture, or a few more."""
    found = resolve(model)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(found.source, **found.options))
        sizes = []
        for name, r in ((LORA, 1), (method, rank)):
            adapted = get_peft_model(base, presets.build(name, "mj_paper", r=r))
            sizes.append(count_parameters(adapted).trainable)
            base = adapted.unload()
    return -(-sizes[1] // sizes[0])
