"""VeRA: gate * b * B (d * A dropout(x)) with frozen random A and B that all layers share (Kopiczko et al., 2024).

Only the vectors d [R] and b [O] are trained; b starts at zero. There is no alpha / r, as in the paper and in PEFT. A
rank costs only one trained number, so use a large r (the paper uses 256).

A and B are not saved: with r = 256 they would make the file of a LoRA of that rank, once for each projection. They are
derived from `projection_seed` by integer arithmetic on the position of each entry, so every machine, device and
version of torch gets the same bits (a torch generator promises none of that). Entry (i, j) does not depend on the
width of the layer, up to the Kaiming bound: layers share one matrix, of which each sees as much as it needs. Layers of
one width share one tensor in memory, through a table that forgets what no adapter uses.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monkeyjump.adapters.base import Adapter, BaseLinear, Gate, register
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_rules import is_int, is_number, setting
from monkeyjump.ops import reference as ops
from monkeyjump.ops.precision import fp32_parameter

Key = tuple[int, int, int, int, torch.device, torch.dtype]
_SHARED: weakref.WeakValueDictionary[Key, Tensor] = weakref.WeakValueDictionary()


@torch.compiler.disable
@torch.inference_mode(False)  # a tensor made in inference mode could never be used in training
def shared_projection(
    seed: int, rank: int, width: int, fan_in: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """[width, rank], Kaiming-uniform with gain sqrt 2 as in PEFT; one tensor for all who ask for the same."""
    key = (seed, rank, width, fan_in, device, dtype)
    found = _SHARED.get(key)
    if found is None:
        uniform = ops.hashed_uniform(torch.Size((width, rank)), torch.tensor(seed, device="cpu"))
        found = _SHARED[key] = (uniform * math.sqrt(6 / fan_in)).to(device, dtype)
    return found


@register
class VeraAdapter(Adapter):
    name = "vera"
    options: ClassVar[dict[str, Any]] = {
        "d_initial": setting(
            "Where d starts.", 0.1, lambda value: is_number(value) and value != 0, "a number other than 0",
            "with d = 0 and b = 0 nothing trains", type="number",
            anyOf=[{"exclusiveMaximum": 0}, {"exclusiveMinimum": 0}],
        ),
        "projection_seed": setting(
            "What A and B are derived from.", 0, lambda value: is_int(value) and 0 <= value < 2**31,
            "an integer in 0..2**31 - 1", "0 is the default", type="integer", minimum=0, maximum=2**31 - 1,
        ),
    }  # fmt: skip

    def __init__(self, in_features: int, out_features: int, config: MonkeyJumpConfig) -> None:
        super().__init__(in_features, out_features, config)
        self.dropout = config.dropout
        self.d_initial = float(self.option("d_initial", config))
        self.seed = int(self.option("projection_seed", config))
        self.lambda_d = fp32_parameter(config.r)
        self.lambda_b = fp32_parameter(out_features)
        self.held: tuple[Tensor, Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.lambda_d, self.d_initial)
        nn.init.zeros_(self.lambda_b)

    def projections(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A^T [D, R] and B [O, R]."""
        if self.held is None or self.held[0].device != device or self.held[0].dtype != dtype:
            rank = self.lambda_d.shape[-1]
            self.held = (
                shared_projection(2 * self.seed + 1, rank, self.in_features, self.in_features, device, dtype),
                shared_projection(2 * self.seed + 2, rank, self.out_features, rank, device, dtype),
            )
        return self.held

    def down(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A dropout(x), and B."""
        A_T, B = self.projections(x.device, x.dtype)
        return (F.dropout(x, self.dropout) if self.training and self.dropout > 0 else x) @ A_T, B

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        z, B = self.down(x)
        up = ops.project_up(z, B, self.lambda_d if gate is None else self.lambda_d * gate)
        return (up * self.lambda_b).to(base.dtype)

    def merged(self, weight: Tensor, bias: Tensor | None, sign: int) -> tuple[Tensor, Tensor | None]:
        A_T, B = self.projections(self.lambda_d.device, torch.float32)
        delta = (self.lambda_b[:, None] * B) @ (self.lambda_d * A_T).T
        return weight + sign * delta, bias


class VeraMixture(VeraAdapter):
    """N experts on one linear: sum_n g_n b_n * B (d_n * A x), with d as [N, R] and b as [N, O]; A x is formed once."""

    def __init__(self, linear: BaseLinear, config: MonkeyJumpConfig, experts: int) -> None:
        super().__init__(linear.in_features, linear.out_features, config)
        self.lambda_d = nn.Parameter(self.lambda_d.detach().repeat(experts, 1))
        self.lambda_b = nn.Parameter(self.lambda_b.detach().repeat(experts, 1))

    def delta(self, x: Tensor, base: Tensor, gate: Gate) -> Tensor:
        z, B = self.down(x)
        spread = z.unsqueeze(-2) * (self.lambda_d if gate is None else self.lambda_d * gate.unsqueeze(-1))
        up = self.lambda_b.T.unsqueeze(-1) * B.unsqueeze(1)  # [O, N, R]
        return F.linear(spread.flatten(-2).to(z.dtype), up.flatten(1).to(z.dtype)).to(base.dtype)

    def expert_outputs(self, x: Tensor, base: Tensor) -> Tensor:
        """What every expert alone would add for the tokens x [S, D], without its gate and dropout: [S, N, O]."""
        A_T, B = self.projections(x.device, x.dtype)
        return ((x @ A_T).unsqueeze(-2) * self.lambda_d).to(x.dtype) @ B.T * self.lambda_b


VeraAdapter.mixture = VeraMixture
