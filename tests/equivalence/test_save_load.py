"""Saved = loaded, in a new process, bit for bit; and training goes on from there as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import monkeyjump as mj
from tests.helpers import (
    adapted,
    adapter_tensors,
    assert_same,
    batches,
    lm_batch,
    routing_state,
    tiny_llama,
    train_steps,
)
from tests.processes import in_new_processes

CASES: dict[str, dict[str, Any]] = {
    "lora": {"ema_interval": 2},
    "lora_fa": {"adapter": "lora_fa", "ema_interval": 1},
    "adalora": {"adapter": "adalora", "r": 4, "target_r": 2, "total_step": 20, "ema_interval": 3},
    "propulsion": {"adapter": "propulsion", "ema_interval": 1, "ema_stop": 4},
    "sequence, centered": {
        "granularity": "sequence",
        "route_space": "centered",
        "center_init": "kmeans",
        "ema_interval": 1,
        "ema_space": "raw",
    },
}
FIRST, SECOND = 3, 3


def snapshot(model: PeftModel) -> dict[str, torch.Tensor]:
    return {**adapter_tensors(model), **routing_state(model)}


def go_on(model: PeftModel, case: str, skip: int, count: int) -> list[float]:
    """Training steps number skip .. skip + count - 1; plain SGD has no state of its own."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for number, batch in enumerate(batches(skip + count)):
        if number >= skip:
            model.train()
            loss = model(**batch).loss
            loss.backward()
            mj.allocate_ranks(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def child(_: int, folder: str) -> None:
    """Runs in a process of its own."""
    for case in CASES:
        here = Path(folder) / case
        model = PeftModel.from_pretrained(tiny_llama(), here, is_trainable=True)
        loaded = {k: v.clone() for k, v in snapshot(model).items()}
        losses = go_on(model, case, FIRST, SECOND)
        torch.save({"loaded": loaded, "losses": losses, "trained": snapshot(model)}, here / "child.pt")


def test_a_new_process_continues_bit_for_bit(tmp_path: Path) -> None:
    expected = {}
    for case, settings in CASES.items():
        model = adapted(**settings)
        if settings.get("center_init") == "kmeans":
            mj.initialize_centers(model, [lm_batch(seed=s) for s in range(4)], progress=False, restarts=2)
        go_on(model, case, 0, FIRST)
        model.save_pretrained(str(tmp_path / case))
        saved = {k: v.clone() for k, v in snapshot(model).items()}
        assert any(v.abs().sum() > 0 for k, v in saved.items() if "staged_sum" in k)
        assert {int(v) for k, v in saved.items() if k.endswith("step")} == {FIRST}
        losses = go_on(model, case, FIRST, SECOND)
        expected[case] = saved, losses, snapshot(model)
    in_new_processes(child, str(tmp_path))
    for case, (saved, losses, trained) in expected.items():
        found = torch.load(tmp_path / case / "child.pt")
        assert_same(saved, found["loaded"])
        assert losses == found["losses"]
        assert_same(trained, found["trained"])


def test_what_a_saved_adapter_holds(tmp_path: Path) -> None:
    """Centres under documented keys, in fp32, also from a bf16 model; nothing of the base model."""
    model = adapted(tiny_llama().bfloat16())
    model.save_pretrained(str(tmp_path))
    state = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.self_attn.q_proj.monkeyjump_center" in state
    assert all(".monkeyjump_" in key for key in state)
    assert {v.dtype for k, v in state.items() if not k.endswith("step")} == {torch.float32}
    assert len([k for k in state if k.endswith("monkeyjump_center")]) == 2 * 3


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_loading_into_a_half_precision_model_rounds_nothing(
    tmp_path: Path, dtype: torch.dtype, low_cpu_mem_usage: bool
) -> None:
    model = adapted(tiny_llama().to(dtype), ema_interval=1)
    train_steps(model, batches(2))
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(tiny_llama().to(dtype), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert_same(snapshot(model), snapshot(again))
    with torch.no_grad():
        assert torch.equal(model.eval()(**lm_batch()).logits, again.eval()(**lm_batch()).logits)
