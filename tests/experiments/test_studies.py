"""Studies: what they vary, that every one of them can be run, and what they save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monkeyjump import methods
from monkeyjump.analysis import changed_models, inspect
from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.experiments import ablate, compare
from monkeyjump.experiments.study import PLAIN, Study, grid_of, load_study, names, variants_of
from monkeyjump.record import write_atomic
from monkeyjump.training.recipe import load_recipe
from tests.experiments.test_compare import FakeRuns, fakes
from tests.tiny_folder import save_tiny_model, write_recipe

__all__ = ["fakes"]
OF_THE_PAPER = {
    *("init", "tokens", "coverage", "blocks", "granularity", "similarity", "temperature", "momentum", "stop"),
    *("shared", "rank", "combinations", "kmeans", "adapters", "complexity"),
    *("specialisation", "probes", "permutation", "balance", "clusters"),
}
OURS = Path(__file__).parents[2] / "benchmarks" / "opposed"  # also recipes and tasks
STUDIES = [*names(), *(str(file) for file in sorted(OURS.glob("*.yaml")) if "\nvariants:" in file.read_text())]


def test_studies_of_the_paper_are_there() -> None:
    assert set(names()) >= OF_THE_PAPER
    assert all(load_study(name).claim and load_study(name).section for name in OF_THE_PAPER)


@pytest.mark.parametrize("name", STUDIES, ids=lambda name: Path(name).stem)
def test_every_variant_is_a_configuration_of_its_own(name: str) -> None:
    """The first is the reference; no two are the same; the control has the method's own constant gate."""
    study = load_study(name)
    grid = grid_of(study, load_recipe("text14-study"), [0, 1], [1e-3], widen=False)
    configs = [methods.build(r.method, r.preset, **r.adapter) for r in grid.recipes.values()]
    assert all(config not in configs[:place] for place, config in enumerate(configs))
    assert len(set(grid.folders.values())) == len(grid.recipes)
    assert not study.reference or grid.methods[0] == study.reference
    assert (PLAIN in grid.recipes) == (study.control or PLAIN in study.variants)
    assert all(len(folder) < 120 and "/" not in folder for folder in grid.folders.values())


def test_runs_that_several_studies_need_are_one() -> None:
    """The reference of most studies is the paper's setting, whatever they vary."""
    recipe, shared = load_recipe("text14-study"), ("similarity", "temperature", "momentum", "stop", "top-k", "jitter")
    firsts = [next(iter(grid_of(load_study(n), recipe, [0], [1e-3], False).recipes.items())) for n in shared]
    assert all(found == firsts[0][1] for _, found in firsts)
    assert firsts[0][1].adapter == recipe.adapter


def test_combinations_route_what_they_name() -> None:
    variants = variants_of(load_study("combinations"))
    assert len(variants) == 21 + 35 + 35 + 21
    assert variants["q+up"] == ["adapter.shared_modules=[k_proj,v_proj,o_proj,gate_proj,down_proj]"]


def test_what_each_projection_adds() -> None:
    """The rows are sums of what their projections add: that is what the table says, with nothing unexplained."""
    study, adds = load_study("combinations"), {"q": 0.01, "v": 0.02, "up": -0.03}
    rows = [
        {"variant": name, "values": [0.5 + sum(adds.get(part, 0) for part in name.split("+"))] * 2, "nlls": []}
        for name in variants_of(study)
    ]
    table = ablate.choice_effects(study, rows)
    assert table is not None
    parts = ("q", "k", "v", "o", "gate", "up", "down")
    said = {part: f"{100 * adds.get(part, 0):+.2f}" for part in parts}
    assert table.rows == [[f"{part}_proj", f"{said[part]} [{said[part]}, {said[part]}]"] for part in parts]
    assert ablate.choice_effects(load_study("rank"), rows) is None
    assert study.choose is not None
    one_size = study.model_copy(update={"choose": study.choose.model_copy(update={"sizes": [3]})})
    assert ablate.choice_effects(one_size, rows) is None


WRONG: dict[str, dict[str, Any]] = {
    "compares nothing": {"title": "x"},
    "vary='adapter.r' needs `values`": {"title": "x", "vary": "adapter.r"},
    "reference='9' is none of the variants \\(1, 2\\)": {
        "title": "x", "vary": "adapter.r", "values": [1, 2], "reference": "9",
    },
    "control: true needs method='mjlora'": {"title": "x", "method": "lora", "vary": "adapter.r", "values": [1]},
    "valeus": {"title": "x", "valeus": [1]},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_in_a_study_are_named(message: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(json.dumps(WRONG[message]))
    with pytest.raises(ConfigError, match=message):
        load_study(str(tmp_path / "own.yaml"))
    with pytest.raises(ConfigError, match=r"no study 'temprature'.*Did you mean 'temperature'"):
        load_study("temprature")


def test_a_study_ends_in_a_table_a_record_and_a_picture(
    fakes: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Study(title="Ranks", vary="adapter.r", values=[1, 2], reference="2")
    (tmp_path / "ranks.yaml").write_text(study.model_dump_json())
    words = ["ablate", str(tmp_path / "ranks.yaml"), "--recipe", "quickstart", "--seeds", "2"]
    words += ["--output", str(tmp_path / "out"), "--jobs", "1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Ranks (2 seeds; differences to 2" in said
    assert max(map(len, said.splitlines())) <= 120
    record = json.loads((tmp_path / "out" / "ranks.json").read_text())
    assert [row["variant"] for row in record["metrics"]["rows"]] == ["2", "1", PLAIN]
    assert fakes.gates == [0.25, 0.25]
    assert (tmp_path / "out" / "ranks.png").stat().st_size > 5000
    assert (
        (tmp_path / "out" / "ranks.csv")
        .read_text()
        .startswith("variant,lr,mean,sd,nll,failed,trainable,router,peak_memory_bytes,steps_per_second,sst2,boolq")
    )
    made = len(fakes.asked)
    assert main(words) == 0
    assert len(fakes.asked) == made
    assert main([*words, "--seeds", "3"]) == 0  # another table, beside the first
    assert len(json.loads((tmp_path / "out" / "ranks-2.json").read_text())["metrics"]["seeds"]) == 3
    assert json.loads((tmp_path / "out" / "ranks.json").read_text())["metrics"] == record["metrics"]
    capsys.readouterr()
    assert main([*words, "--seeds", "1"]) == 0
    alone = capsys.readouterr().out
    table = alone[alone.index("Ranks (1 seed; differences to 2)") :]
    assert "±" not in table  # nothing is known of the spread of one seed


def test_pictures_keep_the_order_of_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the first of the rows, and has its own place among the temperatures."""
    written: list[list[str]] = []
    monkeypatch.setattr(ablate, "name_ticks", lambda axis, which, names, **_: written.append(names))
    study = load_study("temperature")
    rows = [{"variant": name, "values": [0.5, 0.6], "nlls": [0.9, 1.0]} for name in (*variants_of(study), PLAIN)]
    assert rows[0]["variant"] == "1.0"
    assert ablate.plot_study(study, rows, tmp_path / "picture.png").stat().st_size > 10_000
    assert written == [["0.1", "0.5", "1.0", "1.5", "2.0"]] * 2
    ablate.plot_study(study, [{**row, "nlls": []} for row in rows], tmp_path / "alone.png")
    assert len(written) == 3


def test_all_studies_are_one_grid(
    fakes: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that several studies need is made once, small studies come first, and one that fails stops no other."""

    def figures(study: Study, *_: Any) -> list[Path]:
        if "permuted" in study.title:
            raise ConfigError("no figure of it.")
        return []

    monkeypatch.setattr(ablate, "draw_figures", figures)
    monkeypatch.setattr(ablate, "plot_study", lambda study, rows, path: write_atomic(path, study.title))
    monkeypatch.setattr(compare, "look_at", lambda *_: [])
    words = ["ablate", "all", "--seeds", "1", "--jobs", "1", "--output", str(tmp_path / "out")]
    assert main([*words, "--dry-run"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert main(words) == 2
    said = capsys.readouterr()
    assert "studies that did not end" in said.err
    assert "permutation: invalid configuration: no figure of it." in said.err
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == set(names())
    grids = [grid_of(load_study(name), load_recipe("text14-study"), [0], [4e-3], False) for name in names()]
    wanted = {folder for grid in grids for folder in grid.folders.values()}
    assert len(fakes.asked) == len(wanted) == len({path.parent for path in (tmp_path / "out").rglob("record.json")})
    assert len(listed) < len(wanted) + 5
    assert said.out.index("Tokens that centres follow") < said.out.index("The projections that are routed")


def test_a_real_study(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))
    words = ["ablate", "space", "--recipe", str(recipe), "train.max_steps=2", "--seeds", "1"]
    assert main([*words, "--output", str(tmp_path / "out"), "--jobs", "1"]) == 0
    rows = json.loads((tmp_path / "out" / "space.json").read_text())["metrics"]["rows"]
    assert [row["variant"] for row in rows] == ["raw", "centred", PLAIN]
    assert len({row["nll"] for row in rows}) == 3
    gates = json.loads((tmp_path / "out" / "cells/mjlora_uniform/lr-0.01/seed-0/record.json").read_text())
    assert 0 < gates["config"]["adapter"]["uniform_gate"] < 1


def test_studies_of_one_adapter_show_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "SAMPLE", 90)  # as in tests/cli/test_inspect.py, which looks at what they show
    monkeypatch.setattr(changed_models, "SHUFFLES", 2)
    recipe = write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))
    words = [
        "--recipe",
        str(recipe),
        "train.max_steps=2",
        "--seeds",
        "1",
        "--output",
        str(tmp_path / "out"),
        "--jobs",
        "1",
    ]
    assert main(["ablate", "balance", *words]) == 0
    said = capsys.readouterr().out
    figures = tmp_path / "out/cells/mjlora/lr-0.01/seed-0/inspection"
    assert all(f"{figures / name}.png" in said for name in ("health", "before-after"))
    made = (figures / "report.html").stat().st_mtime_ns
    assert main(["ablate", "permutation", *words]) == 0
    assert (figures / "report.html").stat().st_mtime_ns == made  # one report serves all of them
    assert str(figures / "permutation.png") in capsys.readouterr().out
