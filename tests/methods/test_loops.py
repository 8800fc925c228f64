"""Every method against a plain loop over experts, written here from the equations: the loss and every gradient."""

from __future__ import annotations

import copy
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import nn

import monkeyjump as mj
from monkeyjump.adapters import AdaLoraAdapter
from tests.helpers import assert_same, gradients, layers_of, lm_batch
from tests.methods.common import LOUD, moved

MIXTURES = ["moelora", "hydralora", "mola", "moe_lora_fa", "moe_adalora", "moe_propulsion"]
PLAIN = ["lora", "lora_fa", "adalora", "propulsion"]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in [*PLAIN, *MIXTURES, "moa", "mjlora", "mjlorafa", "mjadalora", "mjpropulsion"]),
    ("moelora", {"router_scope": "block", "renormalize": True}),
    ("moelora", {"temperature": 0.5, "lb_reduce": "sum"}),
    ("hydralora", {"top_k": None}),
    ("hydralora", {"adapter": "lora_fa"}),
    ("mjlora", {"router": "linear", "aux_loss_weight": 0.5}),
    ("mjlora", {"router": "uniform", "uniform_gate": 0.4}),
    ("moa", {"router_hidden": "swiglu"}),
    ("moa", {"threshold": 0.9, "threshold_grad": "ste"}),
    ("moa", {"threshold": 0.9, "threshold_grad": "subtract"}),
    ("mixlora", {}),
]


class Loop:
    """The same model, its adapters evaluated expert by expert."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self.config: mj.MonkeyJumpConfig = copy.copy(model.peft_config["default"])  # type: ignore[assignment]
        quiet: Any = model.peft_config["default"]
        quiet.learned = replace(quiet.learned, aux_loss_weight=0.0)
        quiet.projection = replace(quiet.projection, contrastive_weight=0.0)
        if quiet.adapter == "adalora":
            quiet.adapter_options = {**(quiet.adapter_options or {}), "orth_reg_weight": 0.0}
        self.balance: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.gates: dict[str, torch.Tensor] = {}
        for path, layer in layers_of(model).items():
            layer.forward = types.MethodType(self.forward_of(path), layer)  # type: ignore[method-assign]
        for path, module in model.named_modules():
            if path.rpartition(".")[0].endswith("layers"):
                module.register_forward_pre_hook(self.enter_of(path), with_kwargs=True)

    def layers_in(self, block: str) -> dict[str, Any]:
        found = {path: layer for path, layer in layers_of(self.model).items() if path.startswith(f"{block}.")}
        return {path: layer for path, layer in found.items() if "default" in layer.routers}

    def enter_of(self, block: str) -> Any:
        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            h = args[0] if args else kwargs["hidden_states"]
            layers = self.layers_in(block)
            if not layers or (
                self.config.placement == "projection" and self.config.projection.router_scope == "projection"
            ):
                return
            if self.config.router == "uniform":
                gates = torch.full((*h.shape[:2], len(layers)), self.config.uniform.uniform_gate)
            elif self.config.router == "centroid":
                centers = [layer.monkeyjump_center["default"] for layer in layers.values()]
                cosines = [F.cosine_similarity(h.detach(), center, dim=-1) for center in centers]
                gates = self.top(torch.stack(cosines, -1).softmax(-1))
            else:
                gates = self.learned(next(iter(layers.values())).monkeyjump_router["default"], h)
            for position, path in enumerate(layers):
                whole = self.config.placement == "projection"
                self.gates[path] = gates if whole else gates[..., position : position + 1]

        return enter

    def learned(self, router: Any, x: torch.Tensor) -> torch.Tensor:
        if router.config.sigmoid.router_hidden == "swiglu":
            hidden = F.silu(x @ router.hidden_gate.T + router.hidden_gate_bias)
            logits = (hidden * (x @ router.hidden_up.T + router.hidden_up_bias)) @ router.weight.T
        else:
            logits = x @ router.weight.T
        if self.config.router == "linear":
            p = (logits / self.config.temperature).softmax(-1)
            gates = self.top(p)
            used = (gates.detach() > 0).float().flatten(0, 1)
            self.balance.append((used.mean(0) / used.mean(0).sum(), p.flatten(0, 1).mean(0)))
            return gates
        p = torch.sigmoid(logits + router.bias)
        if self.config.sigmoid.threshold is None:
            return p
        bar = self.config.sigmoid.threshold * torch.sigmoid(x @ router.threshold.T + router.threshold_bias)
        assert 0 < (p >= bar).float().mean() < 1
        if self.config.sigmoid.threshold_grad == "subtract":
            return torch.where(p >= bar, p - bar, 0.0)
        step = (p >= bar).float()
        return p * (step.detach() + (p - bar) - (p - bar).detach())

    def top(self, p: torch.Tensor) -> torch.Tensor:
        k = self.config.top_k or p.shape[-1]
        kept = torch.zeros_like(p)
        for token in range(p[..., 0].numel()):
            row, index = divmod(token, p.shape[1])
            for n in p[row, index].topk(k).indices:
                kept[row, index, n] = 1
        kept = p * kept
        return kept / kept.sum(-1, keepdim=True) if self.config.renormalize else kept

    def forward_of(self, path: str) -> Any:
        def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
            y = layer.base_layer(x)
            adapter = layer.monkeyjump_adapter["default"]
            if "default" not in layer.routers:
                gates = torch.ones(*x.shape[:-1], 1)
            elif (
                "default" in layer.monkeyjump_router
                and self.config.projection.router_scope == "projection"
                and self.many
            ):
                gates = self.learned(layer.monkeyjump_router["default"], x)
            else:
                gates = self.gates[path]
            out = y
            for n in range(gates.shape[-1]):
                out = out + gates[..., n : n + 1] * self.expert(adapter, n, x, y)
            return out

        return forward

    @property
    def many(self) -> bool:
        return self.config.placement == "projection"

    def expert(self, adapter: Any, n: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        config, r = self.config, self.config.r
        if config.adapter == "propulsion":
            offset = adapter.offset[n] if adapter.offset.dim() == 2 else adapter.offset
            return y * ((1 + offset) ** adapter.degree - 1)
        ranks = slice(n * r, (n + 1) * r)
        z = x @ (adapter.A if config.projection.share_A else adapter.A[ranks]).T
        if config.adapter == "adalora":
            z = z * adapter.diagonal[ranks]
        return config.alpha / r * (z @ adapter.B[:, ranks].T)

    def extra_loss(self) -> torch.Tensor:
        config, extra = self.config, torch.zeros(())
        if config.learned.aux_loss_weight:
            pairs = self.balance
            if config.learned.lb_reduce == "global":
                loads, probabilities = zip(*pairs, strict=True)
                pairs = [(torch.stack(loads).mean(0), torch.stack(probabilities).mean(0))]
            factor = config.top_k or 1 if config.learned.lb_norm == "mixtral" else 1
            losses = [len(f) * (f * p).sum() * factor for f, p in pairs]
            total = sum(losses)
            extra = extra + config.learned.aux_loss_weight * (
                total if config.learned.lb_reduce == "sum" else total / len(losses)
            )
        if config.adapter == "adalora":
            adapters = [layer.monkeyjump_adapter["default"] for layer in layers_of(self.model).values()]
            weight = AdaLoraAdapter.option("orth_reg_weight", config)
            extra = extra + weight * sum(self.orthogonality(a) for a in adapters) / len(adapters)
        return extra

    def orthogonality(self, adapter: Any) -> Any:
        terms = []
        for start in range(0, adapter.A.shape[0], self.config.r):
            A, B = adapter.A[start : start + self.config.r], adapter.B[:, start : start + self.config.r]
            eye = torch.eye(self.config.r)
            terms += [(A @ A.T - eye).square().sum().sqrt(), (B.T @ B - eye).square().sum().sqrt()]
        return sum(terms) / len(terms)


@pytest.mark.parametrize(("method", "changes"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)])
def test_fused_equals_the_loop(method: str, changes: dict[str, Any]) -> None:
    changes = {**LOUD.get(method, {}), "contrastive_weight": 0.0, **changes}
    model = moved(method, **changes).double().train()
    twin = copy.deepcopy(model)
    batch = lm_batch()
    loss = model(**batch).loss
    loss.backward()
    loop = Loop(twin)
    naive = twin(**batch).loss + loop.extra_loss()
    naive.backward()
    torch.testing.assert_close(loss, naive, rtol=1e-6, atol=1e-7)
    found = gradients(model)
    assert_same(found, gradients(twin), rtol=1e-5, atol=1e-6)  # centres are fp32
    assert all(value.abs().sum() > 0 for value in found.values())
    if loop.config.learns_router:
        assert model.base_model.routing.losses.last or not loop.config.learned.aux_loss_weight
