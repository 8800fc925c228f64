"""What the tests of single adapters share: PEFT's own version beside ours, and a routed layer computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from torch import nn

import monkeyjump as mj
from tests.helpers import gradients, layers_of, lm_batch, tiny_llama

# Attention biases, so that a method which scales or leaves out the bias shows it.
BASE: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


def biased_llama(dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_llama(**BASE)
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def outputs_and_gradients(model: nn.Module, train: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = lm_batch()
    batch["attention_mask"][1, :3] = 0
    model.train(train)
    model.zero_grad()
    torch.manual_seed(3)  # both sides draw the same dropout masks
    output = model(**batch)
    output.loss.backward()
    return output.logits.detach(), gradients(model)


def assert_equals_peft(ours: PeftModel, theirs: nn.Module, rename: Callable[[str], str], train: bool = True) -> None:
    """Outputs and every gradient agree; `rename` takes the name of one of our parameters to PEFT's."""
    our_logits, our_gradients = outputs_and_gradients(ours, train)
    their_logits, their_gradients = outputs_and_gradients(theirs, train)
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-4, atol=2e-5)
    renamed = {rename(name): value for name, value in our_gradients.items()}
    assert renamed.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(renamed[name].reshape(gradient.shape), gradient, rtol=1e-3, atol=1e-5)


Hand = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def assert_routed_by_hand(model: PeftModel, by_hand: Hand) -> None:
    """Every routed layer gives `by_hand(adapter, linear, x, gate)`, with the gate [B, T, 1] that was recorded."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = [
        layer.register_forward_hook(lambda _, args, out, path=path: seen.update({path: (args[0], out)}))
        for path, layer in layers_of(model).items()
    ]
    with mj.record_routing(model) as trace:
        model.eval()(**lm_batch())
        gates = {key: (trace.gates(key), trace.experts(key)) for key in trace.blocks()}
    for handle in handles:
        handle.remove()
    shares = []  # of closed gates, by routed layer
    for path, layer in layers_of(model).items():
        x, out = seen[path]
        gate = torch.ones(*x.shape[:2], 1)
        if "default" in layer.routers:
            values, experts = gates[path.split(".layers.")[1].split(".")[0]]
            gate = values[..., experts.index(path.rpartition(".")[2])].unsqueeze(-1)
            shares.append(float((gate == 0).float().mean()))
        expected = by_hand(layer.monkeyjump_adapter["default"], layer.get_base_layer(), x, gate)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        closed = (gate == 0).squeeze(-1)
        assert torch.equal(out[closed], layer.base_layer(x)[closed])  # gate 0 is the frozen output, to the last bit
    assert len(shares) == 6
    assert any(0 < share < 1 for share in shares)
