"""Faults of the authors' published code in speed and numerics (B19 to B25)."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import monkeyjump as mj
from monkeyjump.training.callbacks import sampling_loader
from tests.helpers import (
    ADAPTER_NAMES,
    adapted,
    centers,
    layers_of,
    lm_batch,
    routing_state,
    tiny_llama,
    token_ids,
    wrap,
)
from tests.processes import in_new_processes


class Synchronisations(TorchDispatchMode):
    """Counts the calls that would wait for a device."""

    WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero", "aten.equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(self.WAITING) or (name == "aten._to_copy.default" and (kwargs or {}).get("device")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"granularity": "sequence"}, {"adapter": "lora_fa", "dropout": 0.1}])
@pytest.mark.parametrize("training", [True, False])
def test_b19_the_routed_forward_never_waits_for_the_device(settings: dict, training: bool) -> None:
    def count(model: nn.Module) -> list[str]:
        batch = lm_batch()
        batch["attention_mask"][0, :2] = 0
        model.train(training)
        model(**batch)  # the first forward may look at the counter once
        with Synchronisations() as mode:
            model(**batch)
        return mode.found

    assert count(adapted(**settings)) == count(tiny_llama())


def test_b20_a_scaling_below_the_resolution_of_bf16_is_not_lost() -> None:
    """p ** 15 = 1.003: rounded to bf16 first, the output would not change at all."""
    base = tiny_llama().bfloat16()
    model = wrap(base, adapter="propulsion", target_modules=["q_proj"], shared_modules=None, top_k=1)
    layer = layers_of(model)["base_model.model.model.layers.0.self_attn.q_proj"]
    adapter: Any = layer.monkeyjump_adapter["default"]
    with torch.no_grad():
        adapter.offset.fill_(1.003 ** (1 / 15) - 1)
        y = torch.randn(4000, 32).bfloat16()
        delta = adapter.delta(y, y, None)
        torch.testing.assert_close(delta.float(), 0.003 * y.float(), rtol=0.01, atol=0)
        out = adapter(y, y, y, None)
    relative = ((out.double() - y.double()) * y.double().sign()).sum() / y.double().abs().sum()
    assert out.dtype == torch.bfloat16
    assert float(relative) == pytest.approx(0.003, rel=0.15)  # right on average, one rounding at a time


@pytest.mark.parametrize("adapter", ADAPTER_NAMES)
def test_b21_the_output_keeps_the_dtype_of_the_base_output(adapter: str) -> None:
    model = adapted(adapter=adapter)
    reference = tiny_llama()
    for layer_path, layer in layers_of(model).items():
        layer.register_forward_hook(lambda module, args, output, path=layer_path: seen.__setitem__(path, output.dtype))
    seen: dict[str, torch.dtype] = {}
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logits = model.eval()(**lm_batch()).logits
        assert logits.dtype == reference(**lm_batch()).logits.dtype
    assert set(seen.values()) == {torch.bfloat16}


def test_b22_adalora_starts_as_the_identity() -> None:
    base = tiny_llama()
    with torch.no_grad():
        expected = base(**lm_batch()).logits
        model = wrap(base, adapter="adalora", r=4)
        assert torch.equal(model(**lm_batch()).logits, expected)
    for layer in layers_of(model).values():
        adapter: Any = layer.monkeyjump_adapter["default"]
        assert torch.count_nonzero(adapter.diagonal) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_b23_centres_stay_fp32_when_the_model_is_cast(dtype: torch.dtype) -> None:
    model = adapted(ema_interval=1).to(dtype)
    assert {p.dtype for n, p in model.named_parameters() if "monkeyjump_" not in n} == {dtype}
    kinds = {k.rpartition(".")[2]: v.dtype for k, v in routing_state(model).items()}
    assert kinds.pop("monkeyjump_step") == torch.int64
    assert set(kinds.values()) == {torch.float32}
    assert model.train()(**lm_batch()).logits.dtype == dtype


def test_b24_states_are_collected_in_the_models_own_dtype() -> None:
    """Their fp16 autocast overflowed on models trained in bf16."""
    base = tiny_llama().bfloat16()
    with torch.no_grad():
        base.get_input_embeddings().weight.mul_(2.0**20)  # far beyond fp16
    model = wrap(base, center_init="kmeans")
    mj.initialize_centers(model, [lm_batch(4, 12, seed=s) for s in range(2)], progress=False, restarts=2)
    assert all(torch.isfinite(c).all() for c in centers(model).values())


def test_b24_an_error_in_the_forward_is_not_swallowed() -> None:
    model = wrap(tiny_llama(), center_init="kmeans")
    with pytest.raises(IndexError):
        mj.initialize_centers(model, [{"input_ids": torch.tensor([[10_000]])}], progress=False)
    assert model.training is wrap(tiny_llama()).training  # modes are as before
    assert not any(layer.disable_adapters for layer in layers_of(model).values())


def test_b24_a_mask_of_the_wrong_size_is_an_error_not_all_ones() -> None:
    model = wrap(tiny_llama(), center_init="kmeans")
    batch = {"input_ids": token_ids(2, 8), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    with pytest.raises(mj.ConfigError, match="does not cover 8 tokens"):
        mj.initialize_centers(model, [batch], progress=False)


def test_b24_a_callback_samples_the_whole_training_set() -> None:
    """Theirs took the first batches of a loader; ours draws sequences from everywhere, the same ones for one seed."""
    rows = [{"number": number} for number in range(1000)]
    loader = DataLoader(rows, batch_size=4, collate_fn=list)  # type: ignore[arg-type, var-annotated]
    drawn = [
        [row["number"] for batch in islice(sampling_loader(loader, seed), 50) for row in batch] for seed in (7, 7, 8)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    by_tenth = torch.tensor(drawn[0]).div(100, rounding_mode="floor").bincount(minlength=10)
    assert len(set(drawn[0])) == 200
    assert 8 <= int(by_tenth.min()) <= int(by_tenth.max()) <= 36  # 20 of each, and four deviations


def order_of_modules() -> str:
    """Names, initial values and routing order of an adapted model, as one string."""
    torch.manual_seed(0)
    model = wrap(tiny_llama(), target_modules={"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"},
                 shared_modules={"o_proj", "gate_proj"})  # fmt: skip
    first = [float(p.detach().double().sum()) for n, p in model.named_parameters() if p.requires_grad]
    with mj.record_routing(model) as trace, torch.no_grad():
        model(input_ids=token_ids())
    return repr((list(layers_of(model)), first, trace.experts("0")))


def write_order_of_modules(_: int, path: Path) -> None:
    torch.save((hash("a name"), order_of_modules()), path)


def test_b25_initialisation_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    """The other process comes from an interpreter which, as this one, drew a hash seed of its own at its start."""
    in_new_processes(write_order_of_modules, tmp_path / "other")
    other, order = torch.load(tmp_path / "other")
    assert other != hash("a name") or "PYTHONHASHSEED" in os.environ
    assert order == order_of_modules()


class TwoOfAName(nn.Module):
    """A block with two modules of the same leaf name, one of which is handed flattened tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleDict({"proj": nn.Linear(8, 8)})
        self.b = nn.ModuleDict({"proj": nn.Linear(8, 8)})

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states + self.a["proj"](hidden_states)
        return x + self.b["proj"](x.reshape(-1, 8)).view_as(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TwoOfAName(), TwoOfAName()])

    def forward(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        return inputs_embeds


def test_b25_all_modules_of_a_name_are_adapted_and_flattened_tokens_keep_their_gates() -> None:
    torch.manual_seed(0)
    stack: Any = Stack()
    x = torch.randn(2, 5, 8)
    model = adapted(
        stack, target_modules=["proj"], shared_modules=None, top_k=1, task_type=None
    ).eval()  # fmt: skip
    paths = [path.removeprefix("base_model.model.") for path in layers_of(model)]
    assert paths == [f"layers.{i}.{part}.proj" for i in (0, 1) for part in "ab"]
    with torch.no_grad(), mj.record_routing(model) as trace:
        output = model(inputs_embeds=x)
    assert trace.experts("0") == ["a.proj", "b.proj"]
    expected = x
    for i in (0, 1):
        for position, part in enumerate("ab"):
            layer = layers_of(model)[f"base_model.model.layers.{i}.{part}.proj"]
            adapter: Any = layer.monkeyjump_adapter["default"]
            delta = expected @ adapter.A.T @ adapter.B.T * adapter.scaling
            gate = trace.gates(str(i))[..., position : position + 1]
            expected = expected + layer.base_layer(expected) + gate * delta
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
