"""`monkeyjump export`: what leaves the package is what the adapter computes, and what cannot leave says why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.load import load_adapter
from monkeyjump.export import constant_gates, mean_gates, save_lora, task_names, why_not_exact
from monkeyjump.export.gates import mean_over_tasks
from monkeyjump.export.lora import require_lora
from tests.helpers import REORDERED, VOCAB, adapted, disturb, tiny_llama, token_ids
from tests.tiny_folder import save_tiny_model, write_recipe

FEED_FORWARDS = {"placement": "ffn", "shared_modules": None, "renormalize": True}
WITHOUT_US = """
import sys
sys.modules["monkeyjump"] = None  # an import of it now fails
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
base, adapter, ids, out = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
with torch.no_grad():
    torch.save(model(input_ids=torch.load(ids)).logits, out)
assert type(model.base_model).__name__ == "LoraModel"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and three adapters of it that a recipe trained: by token, by task, and without routing."""
    home = tmp_path_factory.mktemp("export")
    recipe = write_recipe(home, save_tiny_model(home / "tiny"))
    settings = ["train.max_steps=2", "train.eval_steps=null", "train.save_steps=null", "evaluate.test_limit=2"]
    for name, changes in {"token": [], "task": ["adapter.granularity=task"], "plain": ["method=lora"]}.items():
        assert main(["train", str(recipe), f"output={home / name}", *settings, *changes]) == 0
    return home


def logits(model: Any, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=token_ids(), **more).logits


def as_peft(folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(tiny_llama(), str(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"granularity": "task"},
        {"granularity": "task", "task_experts": [2, 0]},
        {"granularity": "task", "task_experts": 2, "expert_unit": "rank"},
        {"granularity": "task", "expert_unit": "rank"},
        {"granularity": "task", "adapter": "adalora", "layers_to_route": [1]},
        {"placement": "nested", "shared_modules": None, "tasks": 3, "r": 4},
        {"router": "uniform", "uniform_gate": 0.3},
        {"router": "uniform", "placement": "projection", "experts": [2, 3], "shared_modules": None},
        {"router": "uniform", "placement": "projection", "share_A": True, "shared_modules": None},
        {"layers_to_route": [], "adapter": "lora_fa"},
    ],
    ids=str,
)
def test_gates_that_no_token_changes_become_plain_lora(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = adapted(**changes)
    tasks = task_names(model) or {"": 0}
    for task, number in tasks.items():
        save_lora(model, constant_gates(model, number), tmp_path / f"x{task}", "about")
        ids = {"task_ids": torch.full((3,), number)} if task else {}
        torch.testing.assert_close(logits(as_peft(tmp_path / f"x{task}")), logits(model, **ids), **REORDERED)
    assert not torch.allclose(logits(model, **ids), logits(tiny_llama()), atol=1e-2)


def test_names_that_find_more_than_was_adapted_become_paths(tmp_path: Path) -> None:
    """GPT-2 has a c_proj in its attention and one in its feed-forward, and keeps its weights transposed."""

    def gpt2() -> GPT2LMHeadModel:
        torch.manual_seed(0)
        shape: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=2)).eval()

    targets: dict[str, Any] = {"target_modules": ["c_attn", "c_fc", "attn.c_proj"], "shared_modules": ["c_fc"]}
    model = adapted(gpt2(), granularity="task", **targets)
    save_lora(model, constant_gates(model, 1), tmp_path / "x", "about")
    config = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    assert "transformer.h.0.attn.c_proj" in config["target_modules"]
    assert config["fan_in_fan_out"]
    expected = logits(model, task_ids=torch.ones(3, dtype=torch.long))
    loaded = PeftModel.from_pretrained(gpt2(), str(tmp_path / "x"))
    torch.testing.assert_close(logits(loaded), expected, **REORDERED)


def test_modules_that_are_saved_whole_come_along(tmp_path: Path) -> None:
    model: Any = adapted(granularity="task", modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
    save_lora(model, constant_gates(model, 1), tmp_path / "x", "about")
    expected = logits(model, task_ids=torch.ones(3, dtype=torch.long))
    torch.testing.assert_close(logits(as_peft(tmp_path / "x")), expected, **REORDERED)


def test_only_what_a_task_uses_is_saved(tmp_path: Path) -> None:
    model = adapted(granularity="task")
    save_lora(model, constant_gates(model, 1), tmp_path / "x", "about")
    config = json.loads((tmp_path / "x" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["gate_proj", "k_proj", "o_proj"]
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 2)


def test_the_mean_over_tasks_is_the_mean_of_their_gates() -> None:
    model = adapted(granularity="task")
    each = [constant_gates(model, task) for task in range(3)]
    mean = mean_over_tasks(each)
    for path, gate in mean.items():
        assert (gate is None) == path.endswith(("o_proj", "gate_proj"))
        assert gate is None or torch.allclose(gate, torch.tensor([1 / 3]))


@pytest.mark.parametrize("names", [("..", "tense"), ("a/b", "a-b")])
def test_names_of_tasks_that_give_no_folder_each(names: tuple[str, str], home: Path, tmp_path: Path) -> None:
    """They come with the adapter, which may be a stranger's."""
    shutil.copytree(home / "task" / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "recipe.json"
    recipe = json.loads(file.read_text())
    recipe["origin"]["task_ids"] = {name: number for number, name in enumerate(names)}
    file.write_text(json.dumps(recipe | {"model": str(home / "tiny")}))
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "out" / "in"), "--as", "lora"]) == 2
    assert not list((tmp_path / "out").rglob("adapter_config.json"))


def test_task_folders_load_where_the_package_is_not(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(home / "task" / "adapter"), str(out), "--as", "lora"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["opinion", "tense"]
    torch.save(token_ids(), tmp_path / "ids.pt")
    command = [sys.executable, "-c", WITHOUT_US, home / "tiny", out / "tense", tmp_path / "ids.pt", tmp_path / "out.pt"]
    subprocess.run([str(word) for word in command], check=True, timeout=120, cwd=tmp_path)
    model, _ = load_adapter(home / "task" / "adapter")
    expected = logits(model, task_ids=torch.full((3,), 1))
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), expected, **REORDERED)
    assert not torch.equal(expected, logits(model, task_ids=torch.full((3,), 0)))


def test_an_adapter_that_is_always_on_becomes_a_model(home: Path, tmp_path: Path) -> None:
    assert main(["export", str(home / "plain" / "adapter"), str(tmp_path / "out"), "--as", "merged"]) == 0
    model, _ = load_adapter(home / "plain" / "adapter")
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(found, logits(model), **REORDERED)
    assert not torch.equal(found, logits(AutoModelForCausalLM.from_pretrained(home / "tiny")))


def test_the_average_is_measured_and_called_lossy(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["export", str(home / "token" / "adapter"), str(out), "--as", "average-lora"]
    assert main([*command, "--rows", "4", "--limit", "4"]) == 0
    shown, card = capsys.readouterr().out, (out / "README.md").read_text()
    assert "what the average loses" in shown
    assert "Lossy" in card
    assert "| opinion | accuracy | 4 |" in card
    assert PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(home / "tiny"), str(out))
    text = ["--text", "one two three", "--tasks", "tense", "--limit", "2"]
    assert main([*command[:2], str(tmp_path / "text"), *command[3:], *text]) == 0


@pytest.mark.parametrize("changes", [{}, {"placement": "projection", "router": "linear", "shared_modules": None}])
def test_mean_gates_are_those_that_a_trace_has(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With gates that are all alike the average is exact, and in general its gates are the recorded means."""
    import monkeyjump as mj
    from monkeyjump.analysis.collect import collect

    model = adapted(**changes, top_k=None if changes else 3, temperature=1e6)
    batch = {"input_ids": token_ids(), "attention_mask": torch.ones_like(token_ids())}
    gates = mean_gates(model, collect(model, {"a": [batch]}).usage)
    save_lora(model, gates, tmp_path / "x", "about")
    torch.testing.assert_close(logits(as_peft(tmp_path / "x")), logits(model), atol=1e-2, rtol=1e-2)
    with mj.record_routing(model) as trace:
        logits(model)
    block = trace.blocks()[0]
    first = next(gate for gate in gates.values() if gate is not None)
    torch.testing.assert_close(first, torch.tensor(trace.load(block).mean_gate[: len(first)]))


def test_transformers_loads_the_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    out = tmp_path / "out"
    assert main(["export", str(home / "token" / "adapter"), str(out), "--as", "transformers"]) == 0
    model, _ = load_adapter(home / "token" / "adapter")
    disturb(model, scale=0.05)
    model.save_pretrained(out / "adapter")  # an adapter that two steps have hardly moved would show little
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    torch.testing.assert_close(logits(loaded), logits(model), **REORDERED)
    ids = token_ids(1)
    made = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(loaded.generate(ids, max_new_tokens=5, do_sample=False), made)


@pytest.mark.parametrize(
    ("adapter", "form", "words"),
    [
        ("token", "lora", ["granularity='token'", "no LoRA equals it", "--as average-lora"]),
        ("token", "merged", ["granularity='token'", "--as average-lora"]),
        ("task", "merged", ["no one weight", "--as lora is exact"]),
        ("plain", "average-lora", ["nothing here depends on tokens", "--as lora is exact"]),
    ],
)
def test_what_cannot_be_exported_says_why(
    home: Path, tmp_path: Path, adapter: str, form: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(home / adapter / "adapter"), str(tmp_path / "out"), "--as", form]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "exact", "low_rank"),
    [
        ({"granularity": "sequence"}, "granularity='sequence'", None),
        ({"router": "linear"}, "router='linear'", None),
        ({"adapter": "propulsion", "granularity": "task"}, None, "adapter='propulsion'"),
        ({"adapter": "flylora", "layers_to_route": [], "r": 4}, "chooses its ranks anew", "adapter='flylora'"),
        ({**FEED_FORWARDS, "router": "linear"}, "router='linear'", "whole feed-forwards"),
    ],
    ids=str,
)
def test_reasons(tmp_path: Path, changes: dict[str, Any], exact: str | None, low_rank: str | None) -> None:
    model = adapted(**changes)
    reason = why_not_exact(model)
    assert reason is None if exact is None else reason is not None and exact in reason
    with pytest.raises(ConfigError, match=low_rank) if low_rank else nullcontext():
        require_lora(model)


def test_a_folder_is_not_overwritten_and_unknown_tasks_are_named(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["export", str(home / "task" / "adapter"), str(tmp_path), "--as", "lora"]) == 2
    assert "is there already" in capsys.readouterr().err
    command = ["export", str(home / "task" / "adapter"), str(tmp_path / "new"), "--as", "lora"]
    assert main([*command, "--tasks", "tens"]) == 2
    assert "Did you mean 'tense'" in capsys.readouterr().err


def test_push_uploads_the_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    class StandIn:
        def create_repo(self, repo_id: str, exist_ok: bool) -> None:
            calls.append(("create", repo_id, exist_ok))

        def upload_folder(self, folder_path: Path, repo_id: str, commit_message: str) -> str:
            calls.append(("upload", sorted(path.name for path in folder_path.iterdir()), repo_id))
            if repo_id.startswith("bad"):
                raise OSError("no network")
            return f"https://hub/{repo_id}"

    monkeypatch.setattr("huggingface_hub.HfApi", StandIn)
    command = ["export", str(home / "task" / "adapter"), str(tmp_path / "a"), "--as", "lora"]
    assert main([*command, "--push", "me/mine"]) == 0
    assert calls == [("create", "me/mine", True), ("upload", ["opinion", "tense"], "me/mine")]
    assert "https://hub/me/mine" in capsys.readouterr().out
    command[2] = str(tmp_path / "b")
    assert main([*command, "--push", "bad/mine"]) == 2
    assert "complete in" in capsys.readouterr().err
    assert (tmp_path / "b" / "tense" / "adapter_config.json").is_file()
