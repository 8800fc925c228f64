"""Tables of measurements in docs: they are those of the records, and a verdict follows from the numbers."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.experiments.ablate import verdicts
from monkeyjump.experiments.study import Study

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "make_results.py"))
CELLS = runpy.run_path(str(ROOT / "benchmarks" / "cells.py"))
BLOCK, rendered = SCRIPT["BLOCK"], SCRIPT["rendered"]
FIGURE, outdated = SCRIPT["FIGURE"], SCRIPT["outdated"]
PAGE, RECORDS = ROOT / "docs" / "results.md", ROOT / "benchmarks" / "results"


def test_the_tables_of_the_pages_are_those_of_the_records() -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGE.parent.glob("*.md")}
    tables = {name: len(BLOCK.findall(text)) for name, text in pages.items()}
    assert tables["results.md"] >= 5
    assert tables["serve.md"] == 1
    for text in pages.values():
        assert rendered(text, RECORDS) == text, "run: python docs/make_results.py"


def test_the_pictures_of_the_pages_are_those_of_the_records(tmp_path: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in PAGE.parent.glob("*.md")}
    named = [name for text in pages.values() for name, _ in FIGURE.findall(text)]
    assert named
    assert not any(outdated(text, PAGE.parent, RECORDS) for text in pages.values()), "run: python docs/make_results.py"
    record = json.loads((RECORDS / f"{named[0]}.json").read_text())
    record["metrics"]["rows"][0]["values"][0] += 0.01
    (tmp_path / f"{named[0]}.json").write_text(json.dumps(record))
    line = f"<!-- figure: study {named[0]} -->\n![x](pictures/{named[0]}.png)\n"
    assert not outdated(line, PAGE.parent, RECORDS)
    assert outdated(line, PAGE.parent, tmp_path)


def test_another_record_is_another_page(tmp_path: Path) -> None:
    name = "compare-text14-study-smollm2-135m-h200.json"
    shutil.copytree(RECORDS, tmp_path, dirs_exist_ok=True)
    record = json.loads((tmp_path / name).read_text())
    record["metrics"]["results"]["mean"]["lora"][0] += 0.03
    (tmp_path / name).write_text(json.dumps(record))
    before = PAGE.read_text(encoding="utf-8").splitlines()
    after = rendered(PAGE.read_text(encoding="utf-8"), tmp_path).splitlines()
    changed = [line for line in after if line not in before]
    # a headline, LoRA, the six that are compared with it, MJ-LoRA less LoRA, and two p that are corrected with it
    assert len(changed) == 11
    assert any(line.startswith("| lora | 0.008 | 357,120 | 55.9 ± ") for line in changed)


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "does not hold"), (1.35, "holds in part"), (1.7, "holds")])
def test_a_slower_mixture_is_another_verdict(slower: float, verdict: str, tmp_path: Path) -> None:
    shutil.copytree(RECORDS, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "bench-step-qwen2-0.5b-h200.json"
    record = json.loads(path.read_text())
    for row in record["metrics"]["rows"]:
        row["median_ms"] *= slower if row["variant"] == "moelora" else 1
    path.write_text(json.dumps(record))
    table = rendered("<!-- table: headlines -->\n", tmp_path)
    (row,) = [line for line in table.splitlines() if "faster training" in line]
    assert row.endswith(f"| {verdict} |")


@pytest.mark.parametrize(
    ("moelora", "mola", "verdict"),
    [(105.0, 100.0, "holds"), (115.0, 100.0, "holds in part"), (115.0, 120.0, "does not hold")],
)
def test_throughput_is_read_where_it_was_measured(tmp_path: Path, moelora: float, mola: float, verdict: str) -> None:
    """MJ-LoRA decodes 120 tokens a second."""
    shutil.copytree(RECORDS, tmp_path, dirs_exist_ok=True)
    record = json.loads((RECORDS / "bench-inference-qwen2-0.5b-h200.json").read_text())
    speeds = {"floor": 150.0, "peft-lora": 90.0, "mjlora": 120.0, "moelora": moelora, "mola": mola}
    rows = [{"variant": name, "mode": "decode-graph", "tokens_per_second": speed} for name, speed in speeds.items()]
    record["metrics"] = {"rows": [*rows, {"variant": "mola", "mode": "prefill", "tokens_per_second": 1.0}]}
    (tmp_path / "bench-inference-mixtures-qwen2-0.5b-h200.json").write_text(json.dumps(record))
    table = rendered("<!-- table: headlines -->\n", tmp_path)
    (row,) = [line for line in table.splitlines() if "throughput" in line]
    assert row.endswith(f"| {verdict} |")


COMPARISONS = {
    "compare-text14-study-smollm2-135m-h200": "cells-text14-study-smollm2-135m-h200",
    "compare-text14-one-rate-smollm2-135m-h200": "cells-text14-study-smollm2-135m-h200",
    "compare-text14-methods-smollm2-135m-h200": "cells-text14-study-smollm2-135m-h200",
    "compare-drawings-vlm-tiny-h200": "cells-drawings-vlm-tiny-h200",
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_is_what_its_runs_say(name: str, tmp_path: Path) -> None:
    """The command of the record finds all of its runs made, and says the same of them."""
    record = json.loads((RECORDS / f"{name}.json").read_text())
    CELLS["unpack"](RECORDS / f"{COMPARISONS[name]}.json", tmp_path, "DIR" if "DIR" in record["command"] else None)
    cells = {path: path.read_bytes() for path in tmp_path.glob("cells/**/record.json")}
    assert main([*record["command"][1:], "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "compare.json").read_text())["metrics"] == record["metrics"]
    assert {path: path.read_bytes() for path in tmp_path.glob("cells/**/record.json")} == cells


def test_what_methods_cost_follows_from_what_they_are() -> None:
    """Monkey Jump has its base adapter once and no router, a mixture four times and five routers a block."""
    page = rendered("<!-- table: costs study-complexity -->\n", RECORDS).splitlines()[3:]
    rows = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in page)}
    assert len(rows) == 17
    for routed, plain in {"mjlora": "lora", "mjadalora": "adalora", "mjpropulsion": "propulsion"}.items():
        assert rows[routed][:3] == rows[plain][:3]
        assert rows[routed][1:3] == ["0", "1.00"]
    for mixture in ("moelora", "mixlora", "moe_lora_fa", "moe_adalora", "moe_propulsion"):
        assert rows[mixture][1:3] == [f"{30 * 5 * 4 * 576:,}", "4.00"]
    assert rows["mjlora"][3:] == ["1.086", "1.053"]


def test_a_kind_of_table_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="table: metods is not known: choose among methods, tasks"):
        rendered("<!-- table: metods x -->\n", RECORDS)


@pytest.mark.parametrize(
    ("expectation", "difference", "noise", "verdict"),
    [
        ("a > b", 0.02, 0.002, "holds"),
        ("a > b", -0.02, 0.002, "does not hold"),
        ("a > b", 0.001, 0.01, "undecided"),
        ("a ~ b", 0.001, 0.001, "holds"),
        ("a ~ b", 0.02, 0.002, "does not hold"),
        ("a ~ b", 0.0, 0.01, "undecided"),
    ],
)
def test_verdicts_follow_from_intervals(expectation: str, difference: float, noise: float, verdict: str) -> None:
    study = Study(title="x", variants={"a": [], "b": []}, expect=[expectation])
    b = [0.5, 0.52, 0.48, 0.51]
    a = [value + difference + noise * sign for value, sign in zip(b, (1, -1, 1, -1), strict=True)]
    (found,) = verdicts(study, [{"variant": "a", "values": a}, {"variant": "b", "values": b}])
    assert found[1] == verdict
    assert found[0].startswith(f"{expectation}: {100 * difference:+.1f} [")
