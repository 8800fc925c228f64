"""`monkeyjump inspect` from the command line: what it writes, what it says, what it refuses."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from monkeyjump import methods
from monkeyjump.analysis import changed_models
from monkeyjump.analysis import inspect as module
from monkeyjump.analysis.plots import draw_usage
from monkeyjump.analysis.style import Drawing
from monkeyjump.cli.main import main
from monkeyjump.pages import document
from tests.tiny_folder import save_tiny_model, write_recipe

pytest.importorskip("sklearn")
FIGURES = {
    *("usage", "health", "theory", "probes", "states", "before-after", "drift", "centers", "permutation", "similarity")
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run whose centres stayed where k-means put them."""
    folder = tmp_path_factory.mktemp("inspect")
    recipe = write_recipe(folder, save_tiny_model(folder / "tiny"))
    settings = ["train.max_steps=4", "train.save_steps=2", "adapter.ema_stop=0", "tasks=[opinion,place,tense]"]
    assert main(["train", str(recipe), f"output={folder / 'run'}", *settings]) == 0
    return folder / "run"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(module, "SAMPLE", 90)
    monkeypatch.setattr(changed_models, "SHUFFLES", 2)


def cut_off(figure: Any) -> list[str]:
    """The texts of a figure that reach over its edge."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in (axes for axes in figure.axes if axes.axison):
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label]
        texts += [] if axes.get_legend() is None else axes.get_legend().get_texts()
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    edge, found = figure.bbox.padded(1.0), []
    for text in (text for text in texts if text.get_text()):
        box = text.get_window_extent(canvas.get_renderer())
        if not (edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1):
            found.append(text.get_text())
    return found


def test_one_adapter_gets_every_figure_and_a_page_that_stands_alone(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: dict[str, list[str]] = {}
    saved = Drawing.saved

    def checked(drawing: Drawing, folder: Path) -> Drawing:
        problems[drawing.name] = cut_off(drawing.figure)
        return saved(drawing, folder)

    monkeypatch.setattr(Drawing, "saved", checked)
    assert main(["inspect", str(run / "adapter"), "--rows", "12"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.replace(str(run), "").splitlines())) <= 80
    assert "largest deviation" in text
    folder = run / "inspection"
    assert str(folder / "report.html") in text
    assert problems == {name: [] for name in FIGURES}
    for name in FIGURES:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"{name}.svg").read_text()
        assert json.loads((folder / f"{name}.json").read_text())["caption"]
        assert len(list(csv.reader((folder / f"{name}.csv").read_text().splitlines()))) > 1
    page = (folder / "report.html").read_text()
    assert "default-src 'none'; img-src data:" in page
    assert page.count("<script>") == 1  # the explorer's, with what it shows beside it
    assert 'data-recorded="mj-explorer-' in page
    assert re.findall(r'src="(?!data:)', page) == []
    assert page.count("<img") == len(FIGURES)
    # without EMA the centres end where k-means put them, so that the start is made again exactly
    assert "as it began" in json.loads((folder / "before-after.json").read_text())["caption"]
    for row in csv.DictReader((folder / "drift.csv").read_text().splitlines()):
        assert [float(row[when]) for when in ("end", "step 2", "step 4")] == pytest.approx([1.0] * 3, abs=1e-5)


def test_two_checkpoints_stand_side_by_side_and_nothing_is_overwritten(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "figures", lambda seen: iter([draw_usage(seen.collection.usage)]))
    first, second = (run / "checkpoints" / f"checkpoint-{step}" for step in (2, 4))
    command = ["inspect", str(first), str(second), "--rows", "4", "--output", str(tmp_path / "both")]
    assert main(command) == 0
    page = (tmp_path / "both" / "report.html").read_text()
    assert (tmp_path / "both" / "comparison.png").is_file()
    assert (tmp_path / "both" / "adapter-2" / "usage.csv").is_file()
    assert "<b>checkpoint-2</b>" in page
    assert "<b>checkpoint-4</b>" in page
    assert main(command) == 2


def test_a_text_of_the_user_is_read_line_by_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "figures", lambda seen: iter(()))
    (tmp_path / "lines.txt").write_text("one line\n\nanother line\n")
    for text, rows in ((str(tmp_path / "lines.txt"), 2), ("a single line", 1)):
        output = tmp_path / f"out-{rows}"
        assert main(["inspect", str(run / "adapter"), "--text", text, "--output", str(output)]) == 0
        assert re.search(rf"^text +{rows} ", capsys.readouterr().out, re.MULTILINE)


def test_what_cannot_be_inspected_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = str(run / "adapter")
    assert main(["inspect", adapter, "--tasks", "opinion", "--text", "x", "--rows", "0"]) == 2
    said = capsys.readouterr().err
    assert "--tasks and --text" in said
    assert "--rows=0" in said
    assert main(["inspect", adapter, "--image", str(tmp_path / "none.png")]) == 2
    assert "is no file" in capsys.readouterr().err
    base = AutoModelForCausalLM.from_pretrained(run.parent / "tiny")
    plain = tmp_path / "run" / "adapter"
    get_peft_model(base, methods.build("lora", target_modules=["q_proj"])).save_pretrained(str(plain))
    assert main(["inspect", adapter, str(plain), "--tasks", "opinion"]) == 2
    assert "does not route" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "holds no adapter that can be read" in capsys.readouterr().err
    (run / "adapter" / "recipe.json").rename(run / "kept.json")
    assert main(["inspect", adapter]) == 2
    assert "does not say what it was trained on" in capsys.readouterr().err
    (run / "kept.json").rename(run / "adapter" / "recipe.json")
    assert not (plain.parent / "inspection").exists()


def test_a_page_lets_in_the_scripts_it_was_given_and_no_others() -> None:
    page = document("<b>", "<p>text</p>", scripts=["let a = 1"])
    assert "<title>&lt;b&gt;</title>" in page
    # the base64 of the SHA-256 of the text between the tags, as browsers compute it
    assert "script-src 'sha256-" in page
    assert "<script>let a = 1</script>" in page
    assert "script-src" not in document("x", "")
