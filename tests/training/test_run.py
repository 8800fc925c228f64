"""Whole runs on a tiny model: resume, interruption, user tasks, packing, a disk that is full."""

from __future__ import annotations

import json
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import Trainer

from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.load import load_adapter
from monkeyjump.models.bundled import MANIFEST
from monkeyjump.training import run as run_module
from monkeyjump.training.recipe import Recipe, load_recipe
from monkeyjump.training.run import run
from monkeyjump.training.saving import saved_recipe
from monkeyjump.training.trainer import last_checkpoint
from tests.helpers import same_on_gpu
from tests.processes import start_process
from tests.tiny_folder import save_tiny_model, write_recipe


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_recipe(folder, save_tiny_model(folder / "tiny"))


def recipe(path: Path, output: Path, *overrides: str) -> Recipe:
    return load_recipe(str(path), [f"output={output}", *overrides])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    if torch.cuda.is_available():
        return same_on_gpu(a, b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def wait_for_step(process: BaseProcess, output: Path, step: int) -> None:
    deadline = time.time() + 120
    while time.time() < deadline and process.is_alive():
        if (output / "checkpoints" / f"checkpoint-{step}" / "complete").is_file():
            return
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint of step {step}; the process ended with {process.exitcode}")


def test_a_killed_run_resumes_to_the_same_weights_centres_and_metrics(recipe_file: Path, tmp_path: Path) -> None:
    whole = run(recipe(recipe_file, tmp_path / "whole", "train.max_steps=14"))
    command = ["train", str(recipe_file), f"output={tmp_path / 'killed'}", "train.max_steps=14"]
    killed = start_process(main, command)
    wait_for_step(killed, tmp_path / "killed", 4)
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "adapter").exists()
    with (tmp_path / "killed" / "log.jsonl").open("a") as log:  # a step after the checkpoint, and one cut short
        log.write('{"step": 13, "loss": 1.0}\n{"step": 14, "lo')
    assert main([*command, "--resume"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "killed" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 15))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    record = json.loads((tmp_path / "killed" / "record.json").read_text())
    assert whole.report is not None
    assert record["metrics"]["evaluation"]["rows"] == json.loads(whole.report.to_json())["rows"]


def test_a_checkpoint_that_was_cut_short_is_passed_over(recipe_file: Path, tmp_path: Path) -> None:
    run(recipe(recipe_file, tmp_path / "whole"), test=False)
    cut = tmp_path / "cut"
    run(recipe(recipe_file, cut, "train.save_steps=2"), test=False)
    shutil.rmtree(cut / "adapter")
    (cut / "checkpoints" / "checkpoint-8" / "complete").unlink()
    (cut / "checkpoints" / "checkpoint-8" / "trainer_state.json").write_text("{", encoding="utf-8")
    before = last_checkpoint(cut / "checkpoints")
    assert before is not None
    assert before.name == "checkpoint-6"  # between the evaluations of steps 4 and 8
    resumed = run(recipe(recipe_file, cut), resume=True, test=False)
    assert resumed.measurements["steps"] == 8
    assert same(weights(tmp_path / "whole"), weights(cut))


def test_a_run_killed_after_its_last_checkpoint_makes_no_step_more(recipe_file: Path, tmp_path: Path) -> None:
    run(recipe(recipe_file, tmp_path), test=False)
    whole = weights(tmp_path)
    shutil.rmtree(tmp_path / "adapter")
    resumed = run(recipe(recipe_file, tmp_path), resume=True, test=False)
    assert resumed.measurements["steps"] == 8
    assert same(whole, weights(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == 8


def test_an_interrupt_leaves_a_checkpoint_and_says_how_to_resume(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = Trainer.training_step

    def interrupted(self: Trainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == 2:
            signal.raise_signal(signal.SIGINT)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["train", str(recipe_file), f"output={tmp_path}", "train.max_steps=2000"]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    text = capsys.readouterr().out
    assert "go on with: monkeyjump train" in text
    assert "--resume" in text
    # the step that was under way is finished and kept, though none was due
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-3"]
    assert (tmp_path / "checkpoints" / "checkpoint-3" / "complete").is_file()
    with pytest.raises(ConfigError, match=r"unfinished run.*--resume"):
        run(recipe(recipe_file, tmp_path))


def test_training_learns_saves_and_reports(recipe_file: Path, tmp_path: Path) -> None:
    result = run(recipe(recipe_file, tmp_path, "train.max_steps=30"))
    losses = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    curve = [log["loss"] for log in losses if "loss" in log]
    assert curve[-1] < curve[0]
    assert any("router/load_entropy" in log for log in losses)
    assert result.report is not None
    assert [row.task for row in result.report.rows] == ["opinion", "tense"]
    assert all(row.base is not None for row in result.report.rows)
    again = saved_recipe(tmp_path / "adapter")
    assert again is not None
    assert again.method == "mjlora"


def test_the_best_checkpoint_is_the_one_that_is_kept(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.9, 0.1])
    monkeypatch.setattr("monkeyjump.training.run._validate", lambda *args: {"mean": next(scores)})
    run(recipe(recipe_file, tmp_path), test=False)
    best = load_file(tmp_path / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors")
    last = load_file(tmp_path / "checkpoints" / "checkpoint-8" / "adapter_model.safetensors")
    assert same(weights(tmp_path), best)
    assert not same(weights(tmp_path), last)


def test_a_run_that_diverges_says_so_and_when(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # validated once before the log tells
    chosen = recipe(recipe_file, tmp_path, "train.lr=1e30", "train.max_grad_norm=0.0", "train.log_steps=8")
    result = run(chosen, test=False)
    text = capsys.readouterr().out
    assert "training diverged" in text
    assert "the best checkpoint cannot be used" in text
    with pytest.raises(ConfigError, match="tensors of the saved adapter hold NaN or infinity"):
        load_adapter(tmp_path / "adapter")
    assert result.measurements["diverged_at"] == 8
    assert run(recipe(recipe_file, tmp_path / "early", "train.lr=1e30"), test=False).measurements["steps"] < 4
    assert "No validation came before it" in capsys.readouterr().out
    stable = run(recipe(recipe_file, tmp_path / "stable"), test=False)
    assert stable.measurements["diverged_at"] is None


def test_early_stopping(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monkeyjump.training.run._validate", lambda *args: {"mean": 0.5})
    result = run(recipe(recipe_file, tmp_path, "train.max_steps=40", "train.patience=1"), test=False)
    assert result.measurements["steps"] == 8


def test_packed_and_padded_rows_train_the_same_tokens(recipe_file: Path, tmp_path: Path) -> None:
    epoch = ("train.max_steps=none", "train.epochs=1", "data.cap=8")
    padded = run(recipe(recipe_file, tmp_path / "a", *epoch), test=False)
    packed = run(recipe(recipe_file, tmp_path / "b", *epoch, "data.packing=true"), test=False)
    assert packed.measurements["steps"] < padded.measurements["steps"]
    assert packed.parameters == padded.parameters


def test_streaming_trains(recipe_file: Path, tmp_path: Path) -> None:
    result = run(recipe(recipe_file, tmp_path, "data.streaming=true", "train.max_steps=4"), test=False)
    assert result.measurements["steps"] == 4


def test_a_user_task_of_ten_yaml_lines_trains_and_evaluates(recipe_file: Path, tmp_path: Path) -> None:
    kinds = {"oak": "tree", "cod": "fish", "elm": "tree", "eel": "fish"}
    rows = [{"word": word, "kind": kind} for word, kind in kinds.items()]
    for split in ("train", "test"):
        lines = "\n".join(json.dumps({**row, "word": f"{row['word']} {i}"}) for i in range(12) for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(lines + "\n", encoding="utf-8")
    task = tmp_path / "kinds.yaml"
    task.write_text(
        "name: kinds\nprompt: 'What is a {word}?'\noptions: [tree, fish]\nanswer: kind\n"
        f"data:\n  train: {tmp_path / 'train.jsonl'}\n  test: {tmp_path / 'test.jsonl'}\n",
        encoding="utf-8",
    )
    result = run(recipe(recipe_file, tmp_path / "run", f'tasks=["{task}"]'))
    assert result.report is not None
    assert [row.task for row in result.report.rows] == ["kinds"]


def test_a_full_disk_keeps_the_previous_checkpoint(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Trainer._save_checkpoint

    def full(self: Trainer, model: torch.nn.Module, trial: Any) -> None:
        save(self, model, trial)
        if self.state.global_step == 8:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trainer, "_save_checkpoint", full)
    with pytest.raises(ConfigError, match=r"could not be written.*No space left.*the previous one is whole.*--resume"):
        run(recipe(recipe_file, tmp_path))
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert "checkpoint-8" not in left
    assert "checkpoint-4" in left
    monkeypatch.setattr(Trainer, "_save_checkpoint", save)
    assert run(recipe(recipe_file, tmp_path), resume=True, test=False).measurements["steps"] == 8


def test_nothing_to_resume_is_said(recipe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to resume"):
        run(recipe(recipe_file, tmp_path), resume=True)


def test_a_folder_serves_one_run_at_a_time(recipe_file: Path, tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(ConfigError, match=r"another process trains in this folder"):
        run(recipe(recipe_file, tmp_path))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["output={}/taken"], r"output='.*taken' is no folder that can be written \(it is a file\)"),
        (["output={}/taken/below"], r"output='.*below' is no folder that can be written \(.*Not a directory"),
        (["output=/proc/runs"], r"output='/proc/runs' is no folder that can be written"),
        (["adapter.target_modules=(q_proj"], r"target_modules='\(q_proj' is no regular expression \(missing \)"),
        (["tasks=gone.yaml"], r"gone.yaml' cannot be read"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_touched(
    overrides: list[str], message: str, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "adapter").mkdir()
    monkeypatch.setattr("monkeyjump.training.shared.load_model", lambda *args, **kwargs: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=message):
        run(recipe(recipe_file, tmp_path, *(override.format(tmp_path) for override in overrides)))
    assert (tmp_path / "adapter").is_dir()


def test_an_adapter_finds_its_base_model_on_another_machine(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled model, trained with one cache and loaded with another after the first is gone."""
    for machine in ("here", "there"):
        folder = tmp_path / machine / "models" / "smollm2-135m"
        shutil.copytree(recipe_file.parent / "tiny", folder)
        (folder / MANIFEST).touch()
    monkeypatch.setenv("MONKEYJUMP_CACHE", str(tmp_path / "here"))
    run(recipe(recipe_file, tmp_path / "run", "model=smollm2-135m", "train.max_steps=2", "tasks=opinion"))
    adapter = (tmp_path / "run" / "adapter").rename(tmp_path / "moved")
    card = (adapter / "README.md").read_text()
    for text in (card, (adapter / "adapter_config.json").read_text()):
        assert "HuggingFaceTB/SmolLM2-135M-Instruct" in text
        assert str(tmp_path) not in text
    assert card.startswith("---\nlibrary_name: peft\nbase_model: ")
    assert "| method | mjlora (preset mj_paper) |" in card
    assert "| opinion | accuracy | 6 |" in card
    assert "monkeyjump run -- " in card
    monkeypatch.setenv("MONKEYJUMP_CACHE", str(tmp_path / "there"))
    shutil.rmtree(tmp_path / "here")
    code = card.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) == 6
    loaded: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(adapter)), loaded)
    expected = load_file(adapter / "adapter_model.safetensors")
    for model in (loaded["model"], load_adapter(adapter)[0]):
        assert same(get_peft_model_state_dict(model, save_embedding_layers=False), expected)
    (adapter / "recipe.json").unlink()  # then its own configuration must do
    model = load_adapter(adapter)[0]
    assert same(get_peft_model_state_dict(model, save_embedding_layers=False), expected)


def test_a_stream_is_not_downloaded(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    look = run_module.look_at

    def watched(*args: Any, streaming: bool, **options: Any) -> Any:
        looked.append(streaming)
        return look(*args, streaming=streaming, **options)

    monkeypatch.setattr(run_module, "look_at", watched)
    run(recipe(recipe_file, tmp_path / "stream", "data.streaming=true"), test=False)
    assert looked == [True]


def test_without_a_test_no_test_file_is_needed(recipe_file: Path, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"row {n}", "label": n % 2}) + "\n" for n in range(100))
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "own.yaml").write_text(
        'name: own\nprompt: "{text}"\noptions: [a, b]\nanswer: label\ndata: {train: train.jsonl, test: gone.jsonl}\n'
    )
    asked = recipe(recipe_file, tmp_path / "run", f"tasks={tmp_path / 'own.yaml'}", "train.max_steps=1")
    result = run(asked, test=False)
    assert [(entry["split"], entry["source"]) for entry in result.origin["data"]] == [("train", "train.jsonl")]
