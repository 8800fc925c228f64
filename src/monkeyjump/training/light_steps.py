"""Clipping and AdamW with few calls of the host, for models whose hundreds of small adapters are trained.

Both compute what torch's own do, with the same kernels. Torch asks every parameter anew, in every step, for its state,
its device and its kind; a captured step of a small model does not leave the host the time for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

State = tuple[list[Tensor], list[Tensor], list[Tensor]]  # both moving averages, and the numbers of steps


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], most: float) -> Tensor:
    """Scale the gradients of parameters on one device to a norm of at most `most`; returns the norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp(max=1.0))
    return norm


class LightAdamW(torch.optim.AdamW):
    """Torch's fused AdamW, which remembers the states of parameters that have gradients in every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._states: list[State] | None = None

    def step(self, closure: Any = None) -> Any:
        gradients = [[parameter.grad for parameter in group["params"]] for group in self.param_groups]
        missing = any(gradient is None for group in gradients for gradient in group)
        plain = not any(group["amsgrad"] or not group["fused"] for group in self.param_groups)
        scaled = getattr(self, "grad_scale", None) is not None  # a scaler of fp16 has set it
        if closure is not None or missing or scaled or not plain:
            return super().step(closure)
        if self._states is None:
            found = super().step()
            self._states = [self._state(group["params"]) for group in self.param_groups]
            return found
        with torch.no_grad():
            for group, given, (means, squares, steps) in zip(self.param_groups, gradients, self._states, strict=True):
                same = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize", "capturable")}
                first, second = group["betas"]
                adamw(
                    group["params"], given, means, squares, [], steps,
                    beta1=first, beta2=second, amsgrad=False, fused=True, **same,
                )  # fmt: skip
        return None

    def _state(self, parameters: list[Tensor]) -> State:
        states = [self.state[parameter] for parameter in parameters]
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        return means, squares, steps

    def load_state_dict(self, state_dict: Any) -> None:
        self._states = None
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._states = None
        super().add_param_group(param_group)
