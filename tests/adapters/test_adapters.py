"""What is particular to each adapter: what it keeps for backward, how it is stored, what it adds to the loss."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import monkeyjump as mj
from monkeyjump.adapters import ADAPTERS, AdaLoraAdapter, Adapter, LoraFaAdapter, PropulsionAdapter
from monkeyjump.ops import reference as ops
from monkeyjump.tuner.training.optimizer_steps import rank_budget
from tests.helpers import ADAPTER_NAMES, adapted, gradients, lm_batch, mj_config

IN, OUT, TOKENS = 64, 24, 50


def adapter_of(name: str, **settings: Any) -> Adapter:
    torch.manual_seed(0)
    adapter = ADAPTERS.get(name)(IN, OUT, mj_config(adapter=name, r=2, **settings))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.02 * torch.randn_like(parameter))
    return adapter


def kept_for_backward(
    adapter: Adapter, x: torch.Tensor, base: torch.Tensor, gate: torch.Tensor | None
) -> list[torch.Size]:
    kept: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        adapter(x, base, base, gate)
    return kept


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("routed", [True, False])
def test_lora_fa_keeps_no_tensor_of_the_size_of_its_input(dropout: float, routed: bool) -> None:
    """Neither the input nor its dropout mask: only rank-r activations and the weights."""
    x, base = torch.randn(2, TOKENS, IN, requires_grad=True), torch.randn(2, TOKENS, OUT)
    gate = torch.rand(2, TOKENS, 1) if routed else None
    tokens = 2 * TOKENS
    sizes = [
        shape.numel() for shape in kept_for_backward(adapter_of("lora_fa", dropout=dropout).train(), x, base, gate)
    ]
    assert sizes
    assert max(sizes) <= max(2 * tokens, 2 * IN)  # r values per token, or a factor
    # LoRA has to keep the input: its A is trained
    lora = [shape.numel() for shape in kept_for_backward(adapter_of("lora", dropout=dropout).train(), x, base, gate)]
    assert max(lora) >= tokens * IN


@pytest.mark.parametrize("routed", [True, False])
def test_lora_fa_gradients_are_those_of_autograd_with_the_same_mask(routed: bool) -> None:
    adapter = adapter_of("lora_fa", dropout=0.4).train()
    assert isinstance(adapter, LoraFaAdapter)
    x, base = torch.randn(2, TOKENS, IN), torch.randn(2, TOKENS, OUT)
    gate = torch.rand(2, TOKENS, 1) if routed else None
    ours, plain = (x.clone().requires_grad_() for _ in range(2))
    torch.manual_seed(7)
    out = adapter(ours, base, base, gate)
    out.square().sum().backward()
    grad_B = adapter.B.grad
    adapter.B.grad = None
    torch.manual_seed(7)
    seed = torch.randint(2**31, (), device=x.device)
    mask = ops.keep_mask(x.shape, seed, 0.4)
    z = torch.nn.functional.linear(plain * mask / 0.6, adapter.A)
    expected = base + (z * adapter.scaling * (1.0 if gate is None else gate)) @ adapter.B.T
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_B, adapter.B.grad, rtol=1e-4, atol=1e-4)


def test_the_dropout_mask_is_fair_and_differs_between_calls() -> None:
    seeds = torch.tensor([1, 2, 3])
    masks = [ops.keep_mask(torch.Size((200, 500)), seed, 0.3) for seed in seeds]
    for mask in masks:
        assert float(mask.float().mean()) == pytest.approx(0.7, abs=0.005)
        for dim in (0, 1):  # no row or column is favoured
            assert float(mask.float().mean(dim).std()) < 0.045
    assert 0.5 < float((masks[0] == masks[1]).float().mean()) < 0.65  # 0.7 ** 2 + 0.3 ** 2 = 0.58 if independent
    assert torch.equal(masks[0], ops.keep_mask(torch.Size((200, 500)), seeds[0], 0.3))


def test_lora_fa_saves_its_frozen_factor() -> None:
    adapter = adapter_of("lora_fa")
    assert set(adapter.state_dict()) == {"A", "B"}
    assert {name for name, _ in adapter.named_parameters()} == {"B"}


@pytest.mark.parametrize("name", ADAPTER_NAMES)
@pytest.mark.parametrize("routed", [True, False])
def test_gradients_by_finite_differences(name: str, routed: bool) -> None:
    adapter = adapter_of(name).double().train()
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.mul_(10 if name != "propulsion" else 1)
    x = torch.randn(3, IN, dtype=torch.float64, requires_grad=True)
    base = torch.randn(3, OUT, dtype=torch.float64, requires_grad=True)
    gate = torch.rand(3, 1, dtype=torch.float64) if routed else None
    parameters = list(adapter.parameters())

    def call(x: torch.Tensor, base: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return adapter(x, base, base, gate)

    assert torch.autograd.gradcheck(call, (x, base, *parameters), atol=1e-6)


def test_propulsion_is_stored_as_an_offset_that_weight_decay_pulls_to_the_identity() -> None:
    adapter = adapter_of("propulsion")
    assert isinstance(adapter, PropulsionAdapter)
    y = torch.randn(5, OUT)
    nn.init.zeros_(adapter.offset)
    assert torch.equal(adapter(y, y, y, None), y)
    nn.init.constant_(adapter.offset, 0.1)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=4e-4, weight_decay=0.1)
    adapter.offset.grad = torch.zeros_like(adapter.offset)
    for _ in range(5_000):
        optimizer.step()
    assert float(adapter.offset.detach().max()) == pytest.approx(0.1 * (1 - 4e-5) ** 5_000, rel=1e-3)
    assert torch.all((adapter(y, y, y, None) / y).detach() > 1)  # nearer to 1 than before, never towards 0


def test_propulsion_resolves_what_bf16_cannot_around_one() -> None:
    y = torch.ones(1, 3).bfloat16()
    offset = torch.tensor([1e-5, -1e-5, 2e-4])
    delta = ops.scale_output(y, offset, 15, 1.0).float()
    exact = ((1 + offset.double()) ** 15 - 1).float()
    torch.testing.assert_close(delta[0], exact, rtol=1e-2, atol=0)
    fp32 = ops.scale_output(torch.ones(1, 3), offset * 1e-4, 15, 1.0)[0].double()
    torch.testing.assert_close(fp32, 15 * offset.double() * 1e-4, rtol=1e-4, atol=0)


@pytest.mark.parametrize("degree", [1, 2, 15])
def test_propulsion_with_a_negative_or_zero_base(degree: int) -> None:
    """p = 1 + offset <= 0: the plain power, a finite gradient, a sign flip for odd degrees."""
    offset = torch.tensor([-1.0, -1.5, -2.2, -0.5, 0.3], requires_grad=True)
    y = torch.full((2, 5), 2.0)
    out = y + ops.scale_output(y, offset, degree, 1.0)
    torch.testing.assert_close(out, y * (1 + offset) ** degree, rtol=1e-4, atol=1e-6)
    out.sum().backward()
    expected = 4.0 * degree * (1 + offset.detach()) ** (degree - 1)
    torch.testing.assert_close(offset.grad, expected, rtol=1e-4, atol=1e-6)


def test_propulsion_scales_the_bias_too() -> None:
    linear = nn.Linear(IN, OUT)
    adapter = adapter_of("propulsion")
    assert isinstance(adapter, PropulsionAdapter)
    x = torch.randn(4, IN)
    base = linear(x)
    torch.testing.assert_close(adapter(x, base, base, None), base * (1 + adapter.offset) ** 15, rtol=1e-4, atol=1e-5)


def orthogonality(model: nn.Module) -> torch.Tensor:
    terms = []
    for module in model.modules():
        if isinstance(module, AdaLoraAdapter):
            eye = torch.eye(module.A.shape[0])
            terms += [(module.A @ module.A.T - eye).norm(), (module.B.T @ module.B - eye).norm()]
    return torch.stack(terms).mean()


def test_adalora_adds_its_orthogonality_to_the_returned_loss() -> None:
    settings: dict[str, Any] = {"adapter": "adalora", "r": 3}
    weighted, without = adapted(**settings, orth_reg_weight=0.7), adapted(**settings, orth_reg_weight=0.0)
    batch = lm_batch()
    losses = [model.train()(**batch).loss for model in (weighted, without)]
    torch.testing.assert_close(losses[0] - losses[1], 0.7 * orthogonality(weighted), rtol=1e-3, atol=1e-4)
    as_tuple = weighted(**batch, return_dict=False)[0]
    torch.testing.assert_close(as_tuple, losses[0])
    with torch.no_grad():  # what is evaluated is the language loss alone
        torch.testing.assert_close(weighted.eval()(**batch).loss, without.eval()(**batch).loss)


def test_adalora_regularisation_does_not_grow_with_accumulation() -> None:
    found = []
    batch = lm_batch(4, 8)
    batch["labels"][0, :6] = -100  # rows of different weight
    items = (batch["labels"][:, 1:] != -100).sum()
    for micro in (4, 1):
        model = adapted(adapter="adalora", orth_reg_weight=5.0, ema_stop=0).train()
        for start in range(0, 4, micro):
            part = {k: v[start : start + micro] for k, v in batch.items()}
            model(**part, num_items_in_batch=items).loss.backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5)


def test_adalora_budget_falls_with_the_cube_between_warm_up_and_end() -> None:
    config = mj_config(adapter="adalora", r=8, target_r=2, tinit=10, tfinal=20, total_step=110)
    budgets = [rank_budget(step, adapters=5, config=config) for step in range(1, 111)]
    assert budgets[:10] == [40] * 10
    assert budgets[-20:] == [10] * 20
    assert all(a >= b for a, b in itertools.pairwise(budgets))
    assert budgets[49] == int(10 + 30 * (1 - 40 / 80) ** 3)


def test_adalora_keeps_the_most_important_ranks_of_the_whole_model() -> None:
    model = adapted(adapter="adalora", r=4, target_r=1, total_step=6, tfinal=2, orth_reg_weight=0.0).train()
    adapters = [m for m in model.modules() if isinstance(m, AdaLoraAdapter)]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(1, 7):
        optimizer.zero_grad()
        model(**lm_batch(seed=step)).loss.backward()
        budget = mj.allocate_ranks(model)
        config = model.peft_config["default"]
        assert isinstance(config, mj.MonkeyJumpConfig)
        assert budget == rank_budget(step, len(adapters), config)
        alive = sum(int(torch.count_nonzero(adapter.diagonal)) for adapter in adapters)
        assert alive == budget
        scores = torch.cat([adapter.importance() for adapter in adapters])
        kept = torch.cat([adapter.diagonal for adapter in adapters]) != 0
        assert scores[kept].min() >= scores[~kept].max()
        if step < 6:
            optimizer.step()  # entries that were zeroed may grow back
    assert budget == len(adapters)
    per_adapter = {int(torch.count_nonzero(adapter.diagonal)) for adapter in adapters}
    assert len(per_adapter) > 1  # ranks went where they matter, not one to each


@pytest.mark.parametrize("name", ADAPTER_NAMES)
def test_a_reset_adapter_is_a_new_one(name: str) -> None:
    """`reset_parameters` gives the identity back, and a gradient to everything that a new adapter gives one to."""
    torch.manual_seed(0)
    adapter = ADAPTERS.get(name)(6, 5, mj_config(adapter=name))
    x, base = torch.randn(4, 6), torch.randn(4, 5)

    def moved() -> dict[str, bool]:
        adapter.zero_grad()
        out = adapter(x, base, base, None)
        assert torch.equal(out, base)
        out.square().sum().backward()
        return {key: bool(value.grad.any()) for key, value in adapter.named_parameters() if value.grad is not None}

    new = moved()
    assert any(new.values())
    for parameter in adapter.parameters():
        parameter.data.normal_()
    adapter.reset_parameters()
    assert moved() == new
