"""The notebooks run from their first cell to their last, and are kept without outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_folder import save_tiny_model

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return notebook["cells"]


@pytest.fixture
def ran(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the cells of a notebook leave behind, with a tiny model in the place of the one they name."""
    from monkeyjump import models

    load, tiny = models.load_model, save_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(models, "load_model", lambda name: load(str(tiny)))
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib").use("agg")
    names: dict[str, Any] = {}
    for cell in cells(FOLDER / request.param):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), request.param, "exec"), names)
    return names


@pytest.mark.parametrize("ran", ["five_lines.ipynb"], indirect=True)
def test_five_lines_train_and_save(ran: dict[str, Any]) -> None:
    assert ran["losses"][-1] < ran["losses"][0]
    assert ran["report"].rows[0].n == 30
    assert Path("my-adapter/adapter_config.json").is_file()


@pytest.mark.parametrize("ran", ["routing.ipynb"], indirect=True)
def test_routing_shows_gates(ran: dict[str, Any]) -> None:
    gates = ran["trace"].gates("0")
    assert gates.shape[-1] == 3
    assert ((gates > 0).sum(-1) == 2).all()  # top-2 of q, k, v
    assert float((ran["whole"] - ran["without"]).abs().max()) == 0  # a new adapter adds nothing


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_clean(path: Path) -> None:
    for cell in cells(path):
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))
