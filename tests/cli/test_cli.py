"""What a person sees at the command line."""

from __future__ import annotations

import gc
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from monkeyjump.cli.main import VERBS, main
from monkeyjump.first_imports import uncollected
from monkeyjump.tasks import groups
from tests.tiny_folder import save_tiny_model, write_recipe


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_is_quick_and_fits_80_columns(verb: str) -> None:
    command = [sys.executable, "-m", "monkeyjump", *([verb] if verb else []), "--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80", "PATH": ""}, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor time: what the program needs, however busy the machine is
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "usage: monkeyjump" in done.stdout


def test_the_collector_is_off_during_the_first_imports_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = list[bool]()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with uncollected():
        assert gc.isenabled()  # torch is here already
    monkeypatch.delitem(sys.modules, "torch")
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == [False]


def test_importing_the_package_registers_the_method_whatever_the_command_line_says(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__init__.py").write_text("import monkeyjump\n")
    (tmp_path / "program" / "train.py").write_text(
        "import sys\n"
        "light = 'torch' not in sys.modules\n"
        "from monkeyjump.tuner.layer import MonkeyJumpLayer\n"  # here PEFT is imported by what registering imports
        "from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING\n"
        "print(light, PEFT_TYPE_TO_TUNER_MAPPING['MONKEYJUMP'].tuner_layer_cls is MonkeyJumpLayer)\n"
    )
    command = [sys.executable, "-W", "ignore", "-m", "program.train", "--method", "monkeyjump"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["True", "True"]


def test_bad_input_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "quickstart", "method=mjlra", "train.lr=1e-3"]) == 2
    assert "Did you mean 'mjlora'?" in capsys.readouterr().err
    assert main(["validate", "quickstart", "tasks=sst"]) == 2
    assert "Did you mean 'sst2'?" in capsys.readouterr().err
    assert main(["evaluate", "/nowhere/adapter"]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "data"),
    [
        ("image", r"tasks camelyon, svhn, .*, vqa_rad: did not load from the hub, which cannot be used .* --data DIR"),
        ("video", r"tasks action_sequence, .*: pictures and clips are in archives, .*hf download Srikant86/MVTamperB"),
        ("mmt47", r"tasks mmt47_train, .*: pictures and clips are in archives, .*hf download Kowsher/MMT-47 "),
    ],
)
def test_a_recipe_without_network_says_what_is_missing(
    recipe: str, data: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["validate", recipe]) == 2
    first, *problems = capsys.readouterr().err.splitlines()
    assert first == f"error: not ready, {len(problems)} problems:"
    assert len(problems) == (3 if recipe == "mmt47" else 2)  # its texts are in no archive
    assert re.search(data, problems[0])
    assert re.search(r"llava-onevision-qwen2-7b-ov-hf' is not .*`hf download llava-hf/.*'vlm-tiny'", problems[-1])


def test_lists_name_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["tasks"]) == 0
    text = capsys.readouterr().out
    for name in ("sst2", "stsb", "openbookqa", "builtin", *groups()["image14"], *groups()["video19"]):
        assert name in text
    assert "hub Srikant86/MVTamperBench: make a copy: `hf download" in text
    assert main(["models"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


def test_train_then_evaluate_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, save_tiny_model(tmp_path / "tiny"))
    settings = ["train.max_steps=4", "train.save_steps=4", "name=$^$"]  # not a formula of a plot
    assert main(["train", str(recipe), f"output={tmp_path / 'run'}", *settings]) == 0
    text = capsys.readouterr().out
    for name in ("adapter", "evaluation.html", "expert-usage.png", "record.json", "Try next"):
        assert name in text
    for name in ("adapter/adapter_model.safetensors", "evaluation.html", "evaluation.csv", "expert-usage.png"):
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert main(["evaluate", str(tmp_path / "run" / "adapter"), "--limit", "4", "--mode", "generate"]) == 0
    assert "opinion" in capsys.readouterr().out


def test_run_registers_the_method_for_programs_that_do_not_import_it() -> None:
    code = (
        "import sys; light = 'torch' not in sys.modules\n"  # a child that never imports PEFT pays nothing
        "import peft; print(light, peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING['MONKEYJUMP'].__name__)"
    )
    command = [sys.executable, "-m", "monkeyjump", "run", "--", sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "MonkeyJumpModel"]


def test_methods_counts_on_a_shape(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["methods", "--model", "tiny", "--preset", "mj_paper", "--targets", "q_proj,k_proj,v_proj"]) == 0
    text = capsys.readouterr().out
    assert "mola: " in text  # two blocks cannot hold its four parts: said below the table
    assert max(map(len, text.splitlines())) <= 80
    for part in ("moelora", "mjlora_oracle", "mj_paper", "of them router", "buffers"):
        assert part in text
    assert main(["methods", "--about", "hydralora"]) == 0
    assert "Tian" in capsys.readouterr().out
    assert main(["methods", "--about", "hydra"]) == 2
    assert main(["methods", "--model", "tiny", "--preset", "published", "--targets", "nothing"]) == 0
    assert "names 'nothing'" in " ".join(capsys.readouterr().out.split())  # said once for all methods, wrapped


@pytest.mark.parametrize("words", [["validate"], ["evaluate"], ["inspect"], ["generate", "Hi."]])
def test_a_name_that_no_file_can_have(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([words[0], "x" * 5000, *words[1:]]) == 2
    assert capsys.readouterr().err.startswith("error: ")
