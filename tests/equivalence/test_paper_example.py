"""The paper's example: two rank-1 adapters whose sum cancels to rank 1 act with rank 2 when tokens are routed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn

import monkeyjump as mj
from tests.helpers import layers_of


class Block(nn.Module):
    """Two frozen projections that add nothing, so that the outputs are those of the adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.two = nn.Linear(2, 2, bias=False)

    def forward(self, hidden_states: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.one(h) + self.two(h)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs_embeds: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.layers[0](inputs_embeds, h)


@pytest.mark.parametrize("routed", [True, False], ids=["routed", "shared"])
def test_routing_doubles_the_rank_of_the_update(routed: bool) -> None:
    config = mj.MonkeyJumpConfig(
        target_modules=["one", "two"], r=1, alpha=1.0, dropout=0.0, top_k=1, renormalize=True,
        center_init="random_normalized", layers_to_route=None if routed else [],
    )  # fmt: skip
    model = get_peft_model(Model(), config).eval()
    one, two = (layer for layer in layers_of(model).values())
    with torch.no_grad():
        # dW1 = [[1, 0], [0, 0]], dW2 = [[0, 0], [-1, 0]]
        for layer, output in ((one, [1.0, 0.0]), (two, [0.0, -1.0])):
            adapter: Any = layer.monkeyjump_adapter["default"]
            adapter.A.copy_(torch.tensor([[1.0, 0.0]]))
            adapter.B.copy_(torch.tensor(output)[:, None])
        if routed:
            one.monkeyjump_center["default"].copy_(torch.tensor([1.0, 0.0]))
            two.monkeyjump_center["default"].copy_(torch.tensor([0.0, 1.0]))
        h = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])  # H = [e1 e1]: both projections read the same input
        entering = torch.tensor([[[3.0, 0.1], [0.1, 3.0]]])  # what enters the block tells the tokens apart
        update = model(inputs_embeds=entering, h=h)[0].T  # tokens are columns, as in the paper
    expected = [[1.0, 0.0], [0.0, -1.0]] if routed else [[1.0, 1.0], [-1.0, -1.0]]
    assert torch.equal(update, torch.tensor(expected))
    assert int(torch.linalg.matrix_rank(update)) == (2 if routed else 1)
