"""Studies: variants of one method that differ in one thing, declared in a few lines of YAML and run as one grid."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from contextlib import suppress
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from monkeyjump.checked import Section, validated
from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.training.recipe import Recipe, overridden
from monkeyjump.yaml_files import parse_yaml

if TYPE_CHECKING:
    from monkeyjump.experiments.comparison import Comparison

LONGEST = 100  # characters of a folder's name
PLAIN = "constant gate"  # the control that every study of routing has: the mean gate of its reference, for all tokens


class Choice(Section):
    """All combinations of some names."""

    of: list[str] = Field(description="the names")
    sizes: list[int] = Field(description="how many of them at a time")
    rest: bool = Field(False, description="whether the value is what is left over")


class Study(Section):
    title: str = Field(description="the question, in a line")
    section: str = Field("", description="where the paper asks it")
    claim: str = Field("", description="what the paper found")
    expect: list[str] = Field([], description="the claim as pairs of variants: `a > b`, or `a ~ b` for no difference")
    method: str = Field("mjlora", description="what is varied")
    settings: list[str] = Field([], description="key=value, for all variants")
    vary: str = Field("", description="the key that has each of the values")
    values: list[Any] = Field([], description="the values of `vary`; one that has a comma is a list")
    choose: Choice | None = Field(None, description="the values of `vary`: combinations")
    variants: dict[str, list[str]] = Field({}, description="further variants by name: key=value, each")
    reference: str = Field("", description="the variant that the others are compared with; the first, if none is named")
    figures: list[str] = Field(
        [], description="figures of `inspect` on the adapter of the reference that show the answer"
    )
    control: bool = Field(True, description="whether a constant gate of the same strength stands beside them")


def names() -> list[str]:
    return sorted(path.name.removesuffix(".yaml") for path in _home().iterdir() if path.name.endswith(".yaml"))


def load_study(source: str) -> Study:
    """A study by name or path."""
    path = _home() / f"{source}.yaml" if source in names() else Path(source)
    if not path.is_file():
        raise ConfigError(
            f"no study {source!r}.{did_you_mean(source, names())} Give a YAML file, or one of: {', '.join(names())}.",
            title="study not found",
        )
    return validated(Study, parse_yaml(path.read_bytes(), f"study {source!r}"), f"study {source!r}", _problems)


def variants_of(study: Study) -> dict[str, list[str]]:
    """The settings of every variant by its name, the reference first."""
    named = {_label(value): value for value in study.values}
    if study.choose is not None:
        of, rest = study.choose.of, study.choose.rest
        named |= {label: [n for n in of if (n in names) != rest] for label, names in combined(study.choose).items()}
    found = {label: [f"{study.vary}={_text(value)}"] for label, value in named.items()}
    found |= study.variants
    first = study.reference or next(iter(found))
    return {first: found[first], **found}


def combined(choice: Choice) -> dict[str, list[str]]:
    """All combinations, each by the name of its variant."""
    found = (list(names) for size in choice.sizes for names in combinations(choice.of, size))
    return {_label(names): names for names in found}


def grid_of(study: Study, recipe: Recipe, seeds: Iterable[int], lrs: Iterable[float], widen: bool) -> Comparison:
    """The runs of a study, not made yet."""
    from monkeyjump.experiments.comparison import Comparison  # it brings torch, which no mistake in a file waits for

    variants, base = variants_of(study), recipe
    recipe = overridden(recipe, [f"method={study.method}", *study.settings])
    recipes = {label: _plain(overridden(recipe, settings)) for label, settings in variants.items()}
    folders, gates = {label: _folder(found, base) for label, found in recipes.items()}, {}
    if study.control:
        reference = next(iter(recipes))
        recipes[PLAIN] = recipes[reference].model_copy(update={"method": f"{study.method}_uniform"})
        gates[PLAIN] = reference
        folders[PLAIN] = folders[reference].replace(study.method, recipes[PLAIN].method, 1)  # as `compare` names it
    return Comparison(recipe, recipes, list(seeds), {label: list(lrs) for label in recipes}, gates, folders, widen)


def joined(grids: Iterable[Comparison]) -> Comparison:
    """The runs of several grids as one grid: what several of them need is made once, and processes serve all of them.

    A run that has the folder of another, and a recipe of its own, is left to its grid.
    """
    from monkeyjump.experiments.comparison import Comparison

    recipes: dict[str, Recipe] = {}
    lrs: dict[str, list[float]] = {}
    gates: dict[str, str] = {}
    for grid in grids:
        for label, recipe in grid.recipes.items():
            if recipes.setdefault(grid.folders[label], recipe) == recipe:
                lrs[grid.folders[label]] = list(grid.lrs[label])
                if label in grid.gates:
                    gates[grid.folders[label]] = grid.folders[grid.gates[label]]
    return Comparison(grid.recipe, recipes, grid.seeds, lrs, gates, {name: name for name in recipes}, grid.widen)


def _plain(recipe: Recipe) -> Recipe:
    """Without settings of the adapter that are those of its preset anyway: the same run then has the same recipe."""
    from monkeyjump import methods

    config, kept = methods.build(recipe.method, recipe.preset, **recipe.adapter), dict(recipe.adapter)
    for key in recipe.adapter:
        without = {name: value for name, value in kept.items() if name != key}
        with suppress(ConfigError):  # some settings go together
            kept = without if methods.build(recipe.method, recipe.preset, **without) == config else kept
    return recipe.model_copy(update={"adapter": kept})


def _folder(recipe: Recipe, base: Recipe) -> str:
    """The method and what differs from the recipe of all studies: runs that several of them need lie in one place."""
    common, own = _flat(base.to_dict()), _flat(recipe.to_dict())
    differs = [f"{key.rpartition('.')[2]}={value}" for key, value in own.items() if common.get(key) != value]
    name = re.sub(r"[^\w.+=-]+", "-", "+".join([recipe.method, *(word for word in differs if word[:7] != "method=")]))
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}-{zlib.crc32(name.encode()):08x}"


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _problems(study: Study) -> list[str]:
    found = []
    if bool(study.vary) != bool(study.values or study.choose):
        found.append(f"vary={study.vary!r} needs `values` or `choose`, and they need `vary`: give both or none.")
    elif not (study.vary or study.variants):
        found.append("a study needs `vary` with `values`, or `variants`: it compares nothing.")
    elif study.reference and study.reference not in (known := variants_of(study.model_copy(update={"reference": ""}))):
        found.append(f"reference={study.reference!r} is none of the variants ({', '.join(known)}).")
    if not found:
        there = [*variants_of(study), *([PLAIN] if study.control else [])]
        found += [
            f"expect: {words!r} must be `a > b` or `a ~ b` with variants ({', '.join(there)})."
            for words in study.expect
            if (pair := expected(words)) is None or not {pair[0], pair[2]} <= {*there}
        ]
    if study.control and study.method != "mjlora":
        found.append(f"control: true needs method='mjlora', which has one, not method={study.method!r}: write false.")
    return found


def expected(words: str) -> tuple[str, str, str] | None:
    """The two variants of an expectation with what is between them, `>` or `~`."""
    parts = re.fullmatch(r"(.+) ([>~]) (.+)", words)
    return (parts[1], parts[2], parts[3]) if parts else None


def _label(value: Any) -> str:
    return "+".join(name.removesuffix("_proj") for name in value) if isinstance(value, list) else str(value)


def _text(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _home() -> Any:
    return resources.files("monkeyjump") / "studies"
