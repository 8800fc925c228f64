"""What does not fit the model or the data: a clear error, every problem at once, and the model left as it was."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import MambaConfig, MambaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import monkeyjump as mj
from tests.helpers import (
    adapted,
    assert_same,
    lm_batch,
    mj_config,
    routing_state,
    tiny_llama,
    token_ids,
    wrap,
)


def anatomy(model: nn.Module) -> list[Any]:
    """Everything wrapping could have changed: modules, hooks, parameters and what of them is trained."""
    return [
        (
            path,
            id(module),
            type(module),
            len(module._forward_pre_hooks),
            len(module._forward_hooks),
            sorted(vars(module).keys() - {"peft_config"}),  # PEFT itself hangs its table on the model
            [(name, id(p), p.requires_grad) for name, p in module.named_parameters(recurse=False)],
        )
        for path, module in model.named_modules()
    ]


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown module": (
        {"target_modules": ["q_proj", "kproj"], "shared_modules": None, "top_k": 1},
        [r"target_modules names 'kproj', which no module.*Did you mean 'k_proj'\?.*Linear layers here: .*v_proj"],
    ),
    "unknown pattern": (
        {"target_modules": r".*nothing.*", "shared_modules": None, "top_k": 1},
        [r"'\.\*nothing\.\*' matches no module.*Linear layers here"],
    ),
    "not a linear": (
        {"target_modules": ["q_proj", "input_layernorm"], "shared_modules": None, "top_k": 1},
        ["is a LlamaRMSNorm; only linear layers can carry an adapter"] * 2,
    ),
    "top_k too large": (
        {"top_k": 4},
        [r"top_k=4 is larger than the 3 routed projection\(s\) \['q_proj', 'k_proj', 'v_proj'\].*lower top_k to 3"],
    ),
    "all shared, by pattern": (
        {"target_modules": r".*\.(q_proj|o_proj)", "shared_modules": ["q_proj", "o_proj"]},
        [r"leaves nothing to route in block 'model\.layers\.0'"],
    ),
    "shared is no target": (
        {"target_modules": r".*\.(q_proj|k_proj|v_proj)", "shared_modules": ["up_proj"]},
        ["shared_modules names 'up_proj', which is not among the adapted modules"],
    ),
    "layers out of range": (
        {"layers_to_route": [0, 7]},
        [r"layers_to_route=\[0, 7\] names blocks \[7\] that are not among the adapted blocks: 0\.\.1"],
    ),
    "adapted layers out of range": (
        {"layers_to_transform": [1, 9]},
        [r"layers_to_transform=\[1, 9\] names blocks \[9\]"],
    ),
    "every adapted layer out of range": (
        {"layers_to_transform": [8, 9]},
        [r"layers_to_transform=\[8, 9\] names blocks \[8, 9\].*0\.\.1"],
    ),
    "outside the blocks": (
        {"target_modules": ["q_proj", "k_proj", "lm_head"], "shared_modules": None},
        [r"'lm_head' is in no block.*add it to shared_modules"],
    ),
    "task expert out of range": (
        {"granularity": "task", "task_experts": [0, 5]},
        [r"task_experts=\[0, 5\] names expert 5, but block 'model\.layers\.0' has only experts 0\.\.2"],
    ),
    "more groups than experts": (
        {"task_experts": 4},
        [r"task_experts=4 deals the 3 experts of block 'model\.layers\.0' out.*at least 2 and at most 3 groups"],
    ),
    "more groups chosen than there are": (
        {"task_experts": 1},
        [r"task_experts=1 deals .* jumps to top_k=2: use at least 2"],
    ),
    "several at once": (
        {"target_modules": ["q_proj", "k_proj", "nope"], "shared_modules": None, "layers_to_route": [5], "top_k": 1},
        ["target_modules names 'nope'", r"layers_to_route=\[5\]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_configuration_that_does_not_fit_changes_nothing(case: str) -> None:
    settings, expected = BAD[case]
    base = tiny_llama()
    before, weights = anatomy(base), {k: v.clone() for k, v in base.state_dict().items()}
    with pytest.raises(mj.ConfigError) as caught:
        get_peft_model(base, mj_config(**settings))
    assert len(caught.value.problems) == len(expected), caught.value.problems
    for pattern, problem in zip(expected, caught.value.problems, strict=True):
        assert re.search(pattern, problem, re.DOTALL), problem
    assert anatomy(base) == before
    assert_same(weights, base.state_dict())
    wrap(base)  # and the model can still be adapted


@pytest.mark.parametrize("case", BAD)
def test_a_second_adapter_that_does_not_fit_leaves_the_first_alone(case: str) -> None:
    model = adapted()
    before, state = anatomy(model), routing_state(model)
    with torch.no_grad():
        logits = model.eval()(**lm_batch()).logits
    with pytest.raises(mj.ConfigError):
        model.add_adapter("second", mj_config(**BAD[case][0]))
    assert "second" not in model.peft_config
    assert anatomy(model) == before
    assert_same(state, routing_state(model))
    with torch.no_grad():
        assert torch.equal(model(**lm_batch()).logits, logits)


class Attention(nn.Module):
    """A model whose block holds an attention module of torch, which never calls its own output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2)])


@pytest.mark.filterwarnings("ignore:target_modules is not a list")
@pytest.mark.parametrize("method", ["mjlora", "lora"])
@pytest.mark.parametrize("targets", [["in_proj", "out_proj"], "all-linear"])
@pytest.mark.parametrize("kind", ["mamba", "attention"])
def test_a_linear_that_is_never_called_carries_no_adapter(method: str, targets: Any, kind: str) -> None:
    """Its parent hands the weight alone to a kernel, so an adapter there would be trained on nothing."""
    mamba = MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=8, state_size=2, pad_token_id=0)
    base = MambaForCausalLM(mamba) if kind == "mamba" else Attention()
    with pytest.raises(mj.ConfigError) as caught:
        get_peft_model(base, mj.methods.build(method, target_modules=targets, task_type=None))
    found = re.findall(r"'[\w.]+\.(\w+)' is never called: \w+ hands its weight.*exclude_modules", str(caught.value))
    every = ["x_proj", "dt_proj", "out_proj"] if kind == "mamba" else ["out_proj"]
    assert sorted(found) == sorted(every if targets == "all-linear" else ["out_proj"])


def test_training_before_initialisation() -> None:
    model = adapted(center_init="kmeans").train()
    with pytest.raises(mj.ConfigError, match=r"'default' are not initialised.*initialize_centers\(model, dataloader\)"):
        model(**lm_batch())
    mj.initialize_centers(model, [lm_batch()], progress=False)
    model(**lm_batch())


@pytest.mark.parametrize("training", [True, False])
def test_task_routing_without_task_ids(training: bool) -> None:
    model = adapted(granularity="task").train(training)
    with pytest.raises(mj.ConfigError, match=r"granularity='task' needs `task_ids`.*remove_unused_columns=False"):
        model(**lm_batch())
    model(**lm_batch(), task_ids=torch.tensor([0, 1, 2]))
    with pytest.raises(mj.ConfigError, match="needs `task_ids`"):  # those of the last call are gone
        model(**lm_batch())
    with pytest.raises(mj.ConfigError, match="task_ids has 2 entries for a batch of 3 rows"):
        model(**lm_batch(), task_ids=torch.tensor([0, 1]))
    with pytest.raises(mj.ConfigError, match="needs `task_ids`"):
        model(**lm_batch())


def test_nan_states_in_kmeans() -> None:
    base = tiny_llama()
    with torch.no_grad():
        base.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    model = wrap(base, center_init="kmeans")
    before = routing_state(model)
    with pytest.raises(mj.ConfigError, match=r"states entering block 'model.layers.1' are NaN or infinite.*float32"):
        mj.initialize_centers(model, [lm_batch()], progress=False)
    assert_same(before, routing_state(model))  # block 0, whose states were fine, was not touched either


def test_fewer_tokens_than_experts() -> None:
    model = wrap(tiny_llama(), center_init="kmeans")
    before = routing_state(model)
    with pytest.raises(mj.ConfigError, match=r"3 centres but only 2 tokens were found.*more data"):
        mj.initialize_centers(model, [{"input_ids": token_ids(1, 2)}], progress=False)
    assert_same(before, routing_state(model))
    sequence = wrap(tiny_llama(), center_init="kmeans", granularity="sequence")
    with pytest.raises(mj.ConfigError, match=r"3 centres but only 2 sequences"):
        mj.initialize_centers(sequence, [lm_batch(batch=2, length=20)], progress=False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no real token"),
        ([{"input_ids": token_ids(1, 4), "attention_mask": torch.zeros(1, 4, dtype=torch.long)}], "no real token"),
        (["text"], "batch of type str: batches are dicts of tensors"),
        (None, "needs data for center_init='kmeans'"),
    ],
)
def test_data_that_is_none(data: Any, message: str) -> None:
    model = wrap(tiny_llama(), center_init="kmeans")
    with pytest.raises(mj.ConfigError, match=message):
        mj.initialize_centers(model, data, progress=False)


def test_a_model_without_adapter() -> None:
    with pytest.raises(mj.ConfigError, match=r"LlamaForCausalLM carries no Monkey Jump adapter.*get_peft_model"):
        mj.initialize_centers(tiny_llama(), [lm_batch()])


def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    adapted().save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("missing", ["monkeyjump_center", "monkeyjump_step", "layers.1.self_attn.q_proj.monkeyjump_c"])
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_a_saved_adapter_with_missing_centres(tmp_path: Path, missing: str, low_cpu_mem_usage: bool) -> None:
    folder = saved(tmp_path)
    weights = folder / "adapter_model.safetensors"
    kept = {key: value for key, value in load_file(weights).items() if missing not in key}
    save_file(kept, weights)
    with pytest.raises(mj.ConfigError, match=r"no centres for \d+ of its projections.*incomplete"):
        PeftModel.from_pretrained(tiny_llama(), folder, low_cpu_mem_usage=low_cpu_mem_usage)


def test_a_saved_adapter_with_missing_factors(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    weights = folder / "adapter_model.safetensors"
    save_file(
        {key: value for key, value in load_file(weights).items() if not key.endswith("k_proj.monkeyjump_adapter.A")},
        weights,
    )
    with pytest.raises(mj.ConfigError, match=r"lacks 2 tensors of this one, e\.g\. .*k_proj"):
        PeftModel.from_pretrained(tiny_llama(), folder)


def test_the_wrong_base_model(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(mj.ConfigError, match=r"another shape than in this model.*saved \(2, 32\), here \(2, 64\)"):
        PeftModel.from_pretrained(tiny_llama(hidden_size=64), folder)
    with pytest.raises(mj.ConfigError, match=r"lacks|no centres for"):  # one block more than was saved
        PeftModel.from_pretrained(tiny_llama(3), folder)
    with pytest.raises(mj.ConfigError, match="this model has no place for"):  # one less
        PeftModel.from_pretrained(tiny_llama(1), folder)


def test_a_base_model_of_another_kind(tmp_path: Path) -> None:
    """Same names and sizes, other model: nothing tells, as with LoRA; other names: a clear error."""
    folder = saved(tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = ["c_attn"]
    config["shared_modules"] = None
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(config))
    base = Qwen2ForCausalLM(
        Qwen2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=101)
    )  # fmt: skip
    with pytest.raises(mj.ConfigError, match="'c_attn', which no module of the model has"):
        PeftModel.from_pretrained(base, tmp_path / "other")


@pytest.mark.parametrize(("part", "value"), [("monkeyjump_center", torch.nan), ("monkeyjump_adapter", torch.inf)])
def test_a_saved_adapter_with_numbers_that_are_none(part: str, value: float, tmp_path: Path) -> None:
    adapted().save_pretrained(str(tmp_path))
    state = load_file(tmp_path / "adapter_model.safetensors")
    name = next(name for name in state if part in name)
    state[name].view(-1)[0] = value
    save_file(state, tmp_path / "adapter_model.safetensors")
    with pytest.raises(mj.ConfigError, match=rf"1 tensors of the saved adapter hold NaN or infinity, e.g. .*{part}"):
        PeftModel.from_pretrained(tiny_llama(), tmp_path)


def test_merging_a_routed_adapter() -> None:
    model = adapted()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="is routed: its strength depends on the token"):
            merge()
    assert_same(before, model.state_dict())


def test_a_mask_that_does_not_cover_the_tokens() -> None:
    model = adapted().eval()
    with pytest.raises(mj.ConfigError, match=r"attention_mask of shape \(3, 5\) does not cover 8 tokens"):
        model(input_ids=token_ids(), attention_mask=torch.ones(3, 5, dtype=torch.long))


def test_a_projection_called_outside_its_block() -> None:
    model = adapted()
    with pytest.raises(RuntimeError, match="ran outside its block: call the whole block"):
        model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")(torch.randn(1, 2, 32))
