"""Tiny random models and batches, and how tests look inside an adapted model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import monkeyjump as mj
from monkeyjump.adapters import ADAPTERS
from monkeyjump.routing.centroid import Staged, decide
from monkeyjump.tuner.layer import MonkeyJumpLayer

VOCAB = 101
HIDDEN = 32
PAD = 0
ADAPTER_NAMES = ("lora", "lora_fa", "adalora", "propulsion")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
SHARED = ["o_proj", "gate_proj"]
ROUTED = ["q_proj", "k_proj", "v_proj"]

COMPILING = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]  # for tests that compile

# of logits in fp32: the same numbers, added up in another order. What is loaded may lie where its file has it, and rows
# that are repeated make a taller product; both may change which instructions add up
REORDERED: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}

torch.set_num_threads(1)  # models this small only lose by more


def tiny_llama(layers: int = 2, seed: int = 0, **changes: Any) -> Any:
    """A Llama small enough for a CPU whose weights are large enough that every part of it matters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "pad_token_id": PAD,
            "bos_token_id": None,
            "eos_token_id": None,
            **changes,
        }
    )
    return LlamaForCausalLM(config).eval()


def mj_config(**changes: Any) -> mj.MonkeyJumpConfig:
    """The paper's configuration without dropout; centres that wait for no data unless asked."""
    settings: dict[str, Any] = {
        "target_modules": list(TARGETS),
        "shared_modules": list(SHARED),
        "dropout": 0.0,
        "center_init": "random_normalized",
        "task_type": "CAUSAL_LM",
        **changes,
    }
    return mj.MonkeyJumpConfig(**settings)


def wrap(base: PreTrainedModel, config: mj.MonkeyJumpConfig | None = None, **changes: Any) -> PeftModel:
    model = get_peft_model(base, config if config is not None else mj_config(**changes))
    assert isinstance(model, PeftModel)
    return model


def adapted(base: PreTrainedModel | None = None, *, seed: int = 1, **changes: Any) -> PeftModel:
    """An adapted model whose adapters are no longer the identity."""
    model = wrap(base if base is not None else tiny_llama(), **changes)
    disturb(model, seed)
    return model


@torch.no_grad()
def disturb(model: nn.Module, seed: int = 1, scale: float = 0.3) -> None:
    """Give every adapter tensor a random value, a function of its name and the seed alone."""
    for name, tensor in sorted(adapter_tensors(model).items()):
        generator = torch.Generator().manual_seed(seed * 7919 + sum(map(ord, name)))
        small = 0.02 if name.endswith("offset") else scale  # an offset is raised to the 15th power
        tensor.copy_(small * torch.randn(tensor.shape, generator=generator))


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Trained tensors and frozen factors of the adapters (not the centres, not AdaLoRA's statistics)."""
    found: dict[str, torch.Tensor] = {}
    classes = tuple(ADAPTERS.get(name) for name in ADAPTERS)
    for path, module in model.named_modules():
        if isinstance(module, classes):
            found |= {f"{path}.{name}": value for name, value in module.named_parameters()}
            if "A" in dict(module.named_buffers()):
                found[f"{path}.A"] = module.A  # type: ignore[assignment]
    return found


def layers_of(model: nn.Module) -> dict[str, MonkeyJumpLayer]:
    return {path: module for path, module in model.named_modules() if isinstance(module, MonkeyJumpLayer)}


def routed_layers(model: nn.Module, adapter: str = "default") -> dict[str, MonkeyJumpLayer]:
    return {path: layer for path, layer in layers_of(model).items() if adapter in layer.routers}


def routing_state(model: nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    """Every routing buffer by its path: centres, staged sums and counts, the schedule counter, mean directions."""
    state = {}
    for path, layer in layers_of(model).items():
        for name in layer.other_param_names:
            if adapter in getattr(layer, name):
                state[f"{path}.{name}"] = getattr(layer, name)[adapter].detach().clone()
    return state


def settled(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state without what is staged and may never be committed: off the interval an eager forward leaves it out."""
    return {name: tensor for name, tensor in model.state_dict().items() if "staged" not in name}


def centers(model: nn.Module, adapter: str = "default") -> dict[str, torch.Tensor]:
    return {path: layer.monkeyjump_center[adapter].clone() for path, layer in routed_layers(model, adapter).items()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of everything trained; a missing one is a failure of its own."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            found[name] = parameter.grad.detach().clone()
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **tolerance: Any) -> None:
    """Two dicts of tensors agree: exactly, or within rtol and atol where given."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        if tolerance:
            torch.testing.assert_close(value, b[name], msg=f"{{}} in {name}".format, **tolerance)
        else:
            assert torch.equal(value, b[name]), f"{name} differs by {(value - b[name]).abs().max()}"


def same_on_gpu(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Most values of two trained adapters are the same. The first batch of a shape is computed by other kernels than
    those after it, and AdamW makes a whole step of a last digit."""
    if a.keys() != b.keys():
        return False
    apart = torch.cat([(value - b[name]).abs().flatten() > 1e-3 for name, value in a.items()])
    return bool(apart.float().mean() < 0.05)


def token_ids(batch: int = 3, length: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def lm_batch(batch: int = 3, length: int = 8, seed: int = 0, prompt: int | None = None) -> dict[str, torch.Tensor]:
    """Token ids with labels; the first `prompt` tokens (default half of them) are not part of the loss."""
    ids = token_ids(batch, length, seed)
    labels = ids.clone()
    labels[:, : length // 2 if prompt is None else prompt] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def padded(rows: list[torch.Tensor], side: str, width: int, fill: int = PAD) -> torch.Tensor:
    out = torch.full((len(rows), width), fill)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        out[i, where] = row
    return out


def batches(count: int, **kwargs: Any) -> Iterator[dict[str, torch.Tensor]]:
    for step in range(count):
        yield lm_batch(seed=100 + step, **kwargs)


def train_steps(
    model: nn.Module, data: Iterator[dict[str, torch.Tensor]], optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """A plain training loop; without an optimizer the gradients pile up."""
    model.train()
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


class Decided(NamedTuple):
    """The gates of a centroid router, and the sums [E, D] and counts [E] that it staged, or zeros."""

    gates: torch.Tensor
    sums: torch.Tensor
    counts: torch.Tensor


def decided(h: torch.Tensor, centers: Any, *args: Any, staged: bool = True, **kwargs: Any) -> Decided:
    sums, counts = h.new_zeros(len(centers), h.shape[-1]).float(), h.new_zeros(len(centers)).float()
    into = Staged(list(sums), list(counts)) if staged else None
    return Decided(decide(h, list(centers), *args, **kwargs, into=into), sums, counts)
