"""LoRA-FA's projected gradient: the step of B whose change of the weight is nearest to the full gradient.

With A frozen, a step dB changes the weight by s dB A. Among all dB, ||s dB A - G||_F, with G the gradient of the weight
itself, is least for dB = G A^T (A A^T)^-1 / s; and the gradient of B is g = s G A^T. So dB = g (A A^T)^-1 / s^2, which
needs no G. PEFT does this inside an optimizer of its own (`create_lorafa_optimizer`); here any optimizer will do.

Shapes: D, O input and output width, N experts, R rank of one expert.
"""

from __future__ import annotations

import torch
from torch import nn

from monkeyjump.adapters import LoraFaAdapter
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.tuner.training.regularizer import active_adapters


@torch.no_grad()
def project_gradients(model: nn.Module) -> int:
    """Call once per optimiser step, after the last backward and before `optimizer.step()` (the callback does).

    Every expert of a mixture has an A of its own to project by, or shares one. Returns how many gradients were
    replaced: 0 where no active adapter has `project_gradient`.
    """
    replaced = 0
    for name, adapter in active_adapters(model):
        config: MonkeyJumpConfig = model.peft_config[name]  # type: ignore[assignment,index]
        if isinstance(adapter, LoraFaAdapter) and adapter.project_gradient and adapter.B.grad is not None:
            A = adapter.A.unflatten(0, (-1, config.r))  # [N or 1, R, D]
            g = adapter.B.grad.unflatten(1, (-1, config.r)).movedim(1, 0)  # [N, O, R]
            step = g @ torch.linalg.pinv(A @ A.mT, hermitian=True) / config.scaling**2
            adapter.B.grad.copy_(step.movedim(0, 1).flatten(1))
            replaced += 1
    return replaced
