"""The golden table: trainable parameters of every method on two real shapes, and what the paper's figure says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model

import monkeyjump as mj
from monkeyjump.bench.variants import empty_model
from monkeyjump.tuner.count import ParameterCount

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
PAPER = [*ATTENTION, "gate_proj"]
MATCHED: dict[str, Any] = {"preset": "mj_paper", "target_modules": ATTENTION}

# Qwen2-0.5B, q k v o, rank 2, 4 experts, 24 blocks: (method, changes, trainable, router)
QWEN2: list[tuple[str, dict[str, Any], int, int]] = [
    ("lora", {}, 270_336, 0),
    ("mjlora", {}, 270_336, 0),
    ("lora_fa", {}, 98_304, 0),
    ("mjlorafa", {}, 98_304, 0),
    ("adalora", {}, 270_528, 0),
    ("mjadalora", {}, 270_528, 0),
    ("propulsion", {}, 49_152, 0),
    ("mjpropulsion", {}, 49_152, 0),
    ("moelora", {}, 1_425_408, 344_064),
    ("moelora", {"router_scope": "block"}, 1_167_360, 86_016),
    ("hydralora", {}, 909_312, 344_064),
    ("moe_adalora", {}, 1_426_176, 344_064),
    ("moe_lora_fa", {}, 737_280, 344_064),
    ("moe_propulsion", {}, 540_672, 344_064),
    ("mixlora", {"layout": "ffn"}, 356_352, 86_016),
    ("mixlora", {"layout": "ffn", "target_modules": [*PAPER, "up_proj", "down_proj"]}, 3_674_112, 86_016),
    ("mola", {"experts": 4}, 1_425_408, 344_064),
    ("mola", {}, 1_425_408, 344_064),
    ("mola", {"experts": [2, 4, 6, 8]}, 1_781_760, 430_080),
    ("more", {"r": 2}, 1_130_688, 860_352),
    ("more", {"r": 4}, 1_573_248, 1_032_576),
    ("more", {"r": 8}, 2_458_368, 1_377_024),
    ("moa", {}, 356_448, 86_112),
    ("moa", {"router_hidden": "swiglu"}, 960_864, 690_528),
    ("moa", {"threshold": 0.5}, 377_976, 107_640),
]
# Llama-3-8B, q k v o gate, rank 2, 4 experts, 32 blocks
LLAMA3 = {
    "lora": 2_883_584,
    "lora_fa": 1_572_864,
    "adalora": 2_883_904,
    "propulsion": 786_432,
    "moelora": 14_155_776,
    "hydralora": 10_223_616,
    "moe_lora_fa": 8_912_896,
    "moe_adalora": 14_157_056,
    "moe_propulsion": 5_767_168,
}


# blocks are alike, so fewer are counted and multiplied; MoLA's allocation has four parts
@pytest.fixture(scope="module")
def qwen2() -> Any:
    return empty_model("qwen2-0.5b", layers=4)


@pytest.fixture(scope="module")
def llama3() -> Any:
    return empty_model("llama-3-8b", layers=1)


def count(base: Any, method: str, **changes: Any) -> ParameterCount:
    with torch.device("meta"):
        model = get_peft_model(base, mj.methods.build(method, **changes))
        counted = mj.count_parameters(model)
        model.unload()
    return counted


@pytest.mark.parametrize(("method", "changes", "trainable", "router"), QWEN2)
def test_qwen2(qwen2: Any, method: str, changes: dict[str, Any], trainable: int, router: int) -> None:
    counted = count(qwen2, method, **{**MATCHED, **changes})
    assert (6 * counted.trainable, 6 * counted.router) == (trainable, router)


@pytest.mark.parametrize("method", LLAMA3)
def test_llama3(llama3: Any, method: str) -> None:
    assert 32 * count(llama3, method, preset="mj_paper").trainable == LLAMA3[method]


def test_frozen_factors_are_buffers(qwen2: Any) -> None:
    """N frozen A's per projection, or one that all experts share."""
    assert count(qwen2, "moe_lora_fa", **MATCHED).buffers == 4 * 4 * 4 * 896 * 2
    assert count(qwen2, "moe_lora_fa", **MATCHED, share_A=True).buffers == 4 * 4 * 896 * 2


def test_the_names() -> None:
    plain = ["lora", "lora_fa", "adalora", "propulsion"]
    mixtures = [
        "moelora",
        "mixlora",
        "hydralora",
        "mola",
        "more",
        "moa",
        "moe_lora_fa",
        "moe_adalora",
        "moe_propulsion",
    ]
    monkey_jump = ["mjlora", "mjlorafa", "mjadalora", "mjpropulsion"]
    contract = plain + mixtures + monkey_jump
    controls = ["mjlora_uniform", "mjlora_random", "mjlora_shuffled", "mjlora_oracle"]
    controls += ["mjlora_prompt_uniform", "mjlora_prompt_random"]
    assert mj.methods.names() == [*contract, *mj.methods.PEERS, "mjlora_prompt", "mjlora_task", *controls]
    assert len(contract) == 17


@pytest.mark.parametrize("method", mj.methods.names())
def test_both_presets_and_a_description(method: str) -> None:
    matched = mj.methods.build(method, "mj_paper")
    assert mj.methods.build(method).adapter == matched.adapter
    assert matched.target_modules == PAPER
    assert matched.dropout == 0.05
    assert matched.scaling == 2.5
    assert len(mj.methods.describe(method)) > 80
