"""Projections that read one tensor share one pass over it; whoever reads another is never given the wrong one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from monkeyjump.ops.dispatch import implementation
from tests.helpers import adapted, assert_same, disturb, gradients, layers_of, mj_config, tiny_llama, wrap
from tests.tuner.sharing_models import (
    ATTENTION,
    CLOSE,
    DEVICE,
    always_on,
    assert_torch_agrees,
    batch,
    logits,
    spied_passes,
)

pytest.importorskip("triton")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return spied_passes(monkeypatch)


@pytest.fixture
def triton() -> Iterator[None]:
    with implementation("triton"):
        yield


@pytest.mark.usefixtures("triton")
def test_q_k_and_v_share_and_o_does_not(passes: list[int]) -> None:
    """q, k, v are one pass over their input and o is another, from the first forward on."""
    model = always_on(layers=2).eval()
    logits(model)
    assert passes == [3, 1, 3, 1]


@pytest.mark.usefixtures("triton")
def test_routed_projections_share(passes: list[int]) -> None:
    """q, k, v are routed, o and gate are always on: three of one kind, two by themselves."""
    model = adapted(tiny_llama(1)).to(DEVICE).eval()
    logits(model)
    assert passes == [3, 1, 1]


@pytest.mark.usefixtures("triton")
def test_projections_of_the_feed_forward_share(passes: list[int]) -> None:
    model = always_on(["gate_proj", "up_proj", "down_proj"]).eval()
    logits(model)
    assert passes == [2, 1]


@pytest.mark.parametrize("changes", [{}, {"adapter": "lora_fa"}, {"adapter": "adalora"}], ids=["lora", "fa", "ada"])
def test_results_are_those_without_sharing(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two training steps with kernels and dropout, together and one by one: the same masks, logits and gradients."""
    results = []
    for sharing in (True, False):
        torch.manual_seed(0)
        model = always_on(**changes, dropout=0.5).train()
        if not sharing:
            for layer in layers_of(model).values():
                monkeypatch.setattr(layer, "shared", {})
        history = []
        with implementation("triton"):
            for seed in range(2):
                out = model(**batch(seed))
                out.loss.backward()
                history.append({"logits": out.logits.detach(), **gradients(model)})
        results.append(history)
    for shared, alone in zip(*results, strict=True):
        assert_same(shared, alone, **CLOSE)


class CrossAttention(nn.Module):
    """q reads one tensor, k and v another, o a third; the names and widths do not tell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ATTENTION:
            setattr(self, name, nn.Linear(width, width))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        scores = self.q_proj(x) @ self.k_proj(memory).mT  # type: ignore[operator]
        return self.o_proj(torch.softmax(scores / 4, -1) @ self.v_proj(memory))  # type: ignore[operator]


class TwoStreams(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(CrossAttention(16) for _ in range(2))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, memory)
        return x


def two_streams() -> tuple[Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    base = TwoStreams(LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=8))
    config = mj_config(target_modules=ATTENTION, shared_modules=[], layers_to_route=[], task_type=None)
    model = wrap(base, config)
    disturb(model)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 5, 16)  # of one shape: a mix-up would not raise
    return model.to(DEVICE), x.to(DEVICE), memory.to(DEVICE)


def test_cross_attention() -> None:
    """Every time, the first included, and with gradients."""
    model, x, memory = two_streams()
    results: list[list[dict[str, torch.Tensor]]] = []
    for choice in ("torch", "triton"):
        history = []
        for _ in range(2):
            model.zero_grad()
            leaves = x.clone().requires_grad_(), memory.clone().requires_grad_()
            with implementation(choice):
                y = model(x=leaves[0], memory=leaves[1])
            y.square().sum().backward()
            history.append({"y": y.detach(), "x": leaves[0].grad, "memory": leaves[1].grad, **gradients(model)})
        results.append(history)
    for expected, found in zip(*results, strict=True):
        assert_same(found, expected, rtol=1e-3, atol=1e-4)  # gradients of up to 100


@pytest.mark.usefixtures("triton")
def test_projections_that_only_look_alike_are_computed_one_by_one(passes: list[int]) -> None:
    model, x, memory = two_streams()
    with torch.no_grad():
        model(x=x, memory=memory)
        passes.clear()
        model(x=x, memory=memory)
        assert passes == [1, 1, 1, 1] * 2
        # now everything reads one tensor: what was taken apart stays so, and all is right
        together = model(x=x, memory=x)
    with implementation("torch"), torch.no_grad():
        torch.testing.assert_close(together, model(x=x, memory=x), **CLOSE)


@pytest.mark.usefixtures("triton")
def test_any_order_and_any_part_of_the_projections() -> None:
    """Code that calls v first, or k twice, or leaves q out gets what each projection computes by itself."""
    model = always_on().eval()
    attention = model.get_base_model().model.layers[0].self_attn
    logits(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for names in ("vkq", "kk", "qqkk", "kvo", "qov", "okvq", "qkv"):
            x = torch.randn(2, 5, 32, generator=generator).to(DEVICE)
            for name in names:
                projection = getattr(attention, f"{name}_proj")
                found = projection(x)
                with implementation("torch"):
                    torch.testing.assert_close(found, projection(x), **CLOSE)


def test_an_adapter_that_is_deleted_and_added_again(passes: list[int]) -> None:
    model = always_on().eval()
    assert_torch_agrees(model)
    model.add_adapter("other", mj_config(target_modules=ATTENTION, shared_modules=[], layers_to_route=[]))
    model.set_adapter("other")
    model.delete_adapter("default")
    disturb(model, seed=2)
    assert_torch_agrees(model)
    assert not any("default" in layer.shared for layer in layers_of(model).values())
    model.add_adapter("default", mj_config(target_modules=ATTENTION, shared_modules=[], layers_to_route=[], r=3))
    model.set_adapter("default")
    disturb(model, seed=3)
    assert_torch_agrees(model)
    passes.clear()
    assert_torch_agrees(model)
    assert passes == [3, 1]


def test_an_adapter_on_fewer_projections(passes: list[int]) -> None:
    """The second adapter is on q and v alone: its groups are its own."""
    model = always_on().eval()
    few = mj_config(target_modules=["q_proj", "v_proj"], shared_modules=[], layers_to_route=[])
    model.add_adapter("few", few)
    disturb(model, seed=2)
    for name, expected in (("few", [2]), ("default", [3, 1])):
        model.set_adapter(name)
        assert_torch_agrees(model)
        passes.clear()
        assert_torch_agrees(model)
        assert passes == expected


def test_two_adapters_at_once() -> None:
    """They add up: neither takes the other's place."""
    model = always_on().eval()
    first_alone = logits(model)
    model.add_adapter("second", mj_config(target_modules=ATTENTION, shared_modules=[], layers_to_route=[], r=3))
    disturb(model, seed=2)
    model.base_model.set_adapter(["default", "second"])
    assert_torch_agrees(model)
    with implementation("triton"):
        assert not torch.allclose(logits(model), first_alone, atol=1e-2)
    model.set_adapter("default")
    assert_torch_agrees(model)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_a_model_of_its_own(how: str, passes: list[int]) -> None:
    """A copy shares among its own projections and leaves the original alone."""
    model = always_on().eval()
    with implementation("triton"):
        before = logits(model)
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        disturb(twin, seed=5)
        passes.clear()
        assert not torch.allclose(logits(twin), before, atol=1e-2)
        assert passes == [3, 1]
        torch.testing.assert_close(logits(model), before, **CLOSE)
    assert_torch_agrees(twin)
    own, originals = set(map(id, layers_of(twin).values())), set(map(id, layers_of(model).values()))
    for layer in layers_of(twin).values():
        members = {id(member) for group in layer.shared.values() for member in group.members}
        assert members <= own
        assert not members & originals
        assert all(
            any(group is other for other in layer.context.shared_inputs.groups) for group in layer.shared.values()
        )


def test_a_saved_and_loaded_model_shares(tmp_path: Any, passes: list[int]) -> None:
    model = always_on().eval()
    assert_torch_agrees(model)
    model.save_pretrained(tmp_path)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(tiny_llama(1), tmp_path).to(DEVICE).eval()
    with implementation("triton"):
        torch.testing.assert_close(logits(loaded), logits(model), **CLOSE)
        passes.clear()
        logits(loaded)
    assert passes == [3, 1]
