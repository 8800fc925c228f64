"""The scripts of examples/ train a step on a tiny model, and what they save loads."""

from __future__ import annotations

import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import Trainer, TrainingArguments

from monkeyjump.models import load_model
from tests.helpers import lm_batch, tiny_llama
from tests.tiny_folder import save_tiny_model

pytest.importorskip("trl")
pytest.importorskip("datasets")
FOLDER = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_an_example_trains_and_saves(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = save_tiny_model(tmp_path / "tiny")
    main = runpy.run_path(str(path))["main"]
    trainer: Any = main(["--model", str(tiny), "--steps", "2", "--output", str(tmp_path / "out")])
    trainer.model.to("cpu")
    state = trainer.model.state_dict()
    steps = {int(value) for name, value in state.items() if name.endswith("monkeyjump_step.default")}
    assert steps == {2}  # centres were initialised, and two training forwards counted
    trained = [value for name, value in state.items() if name.endswith(".monkeyjump_adapter.default.B")]
    assert any(value.any() for value in trained)
    loaded = PeftModel.from_pretrained(load_model(str(tiny))[0], str(tmp_path / "out"))
    ids = torch.arange(5, 15).reshape(1, -1)
    with torch.no_grad():
        assert torch.allclose(loaded.eval()(ids).logits, trainer.model.eval()(ids).logits, atol=1e-5)


def test_the_plug_in_for_axolotl_trains_with_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of docs/trainers.md, with hooks called in Axolotl's order on a plain Trainer."""
    page = (FOLDER.parent / "docs" / "trainers.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[-1]
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = object  # type: ignore[attr-defined]
    names: dict[str, Any] = {}
    exec(code, names)
    plugin, model = names["MonkeyJumpPlugin"](), tiny_llama()
    plugin.post_model_load(None, model)
    assert all("monkeyjump_" in name for name, value in model.named_parameters() if value.requires_grad)
    rows: Any = [{name: tensor[0] for name, tensor in lm_batch(1, 8).items()}] * 16
    settings: dict[str, Any] = {"max_steps": 2, "report_to": "none", "save_strategy": "no", "use_cpu": True}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **settings), train_dataset=rows)
    for callback in plugin.add_callbacks_post_trainer(None, trainer):
        trainer.add_callback(callback)
    trainer.train()
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    loaded = tiny_llama()
    loaded.load_adapter(str(tmp_path / "adapter"))
    with torch.no_grad():
        ids = lm_batch()["input_ids"]
        assert torch.allclose(loaded(ids).logits, model.eval()(ids).logits, atol=1e-5)
        assert not torch.allclose(loaded(ids).logits, tiny_llama()(ids).logits, atol=1e-5)
