"""An adapter whose gates are constants as a plain LoRA of PEFT, which loads without this package.

Shapes: D, O input and output width of a projection, R its ranks, N its experts.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.adapters.mixture import HydraMixture
from monkeyjump.errors import ConfigError
from monkeyjump.export.gates import Gates, layers_of, routed

PREFIX = "base_model.model."


def save_lora(model: Any, gates: Gates, folder: Path, about: str, name: str = "default") -> None:
    """Write the adapter with these gates as a PEFT LoRA; a projection whose gates are all zero is left out."""
    require_lora(model, name)
    layers = layers_of(model, name)
    pairs = {
        path: _factors(layer.monkeyjump_adapter[name], gate)  # type: ignore[arg-type]
        for path, layer in layers.items()
        if (gate := gates[path]) is None or bool(gate.any())
    }
    config = _configuration(model, {path: len(A) for path, (A, _) in pairs.items()}, name)
    saved = get_peft_model_state_dict(model, adapter_name=name)
    state = {key: value for key, value in saved.items() if "monkeyjump_" not in key}  # modules that are saved whole
    for path, (A, B) in pairs.items():
        state[f"{PREFIX}{path}.lora_A.weight"], state[f"{PREFIX}{path}.lora_B.weight"] = A, B
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    state = {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "README.md").write_text(card(config.base_model_name_or_path, "peft", about), encoding="utf-8")


def require_lora(model: Any, name: str = "default") -> None:
    """Refuse an adapter that is no low-rank update, whatever its gates are."""
    config, adapters = (
        model.peft_config[name],
        [layer.monkeyjump_adapter[name] for layer in layers_of(model, name).values()],
    )
    reason = None
    if config.placement == "ffn" and routed(model, name):
        reason = "placement='ffn' mixes whole feed-forwards after their activation"
    elif config.moa.extra_experts:
        reason = f"extra_experts={config.moa.extra_experts} are modules beside the projections"
    elif not all(isinstance(adapter, LoraAdapter) and adapter.fused for adapter in adapters):
        reason = f"adapter={config.adapter!r} adds something else than B A"
    if reason:
        raise ConfigError(f"{reason}, which no LoRA can do: it stays an adapter of ours.", title="cannot export")


def card(base: str | None, library: str, about: str) -> str:
    """A model card. A folder of this machine is not named in its metadata, which hubs read."""
    known = base is not None and not Path(base).expanduser().exists()
    metadata = [f"library_name: {library}", *([f"base_model: {base}"] if known else []), "tags: [monkeyjump]"]
    return "\n".join(["---", *metadata, "---", "", about.strip(), ""])


@torch.no_grad()
def _factors(adapter: LoraAdapter, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """A [R, D] and B [O, R] whose product is the update, with gates and every scale in B."""
    gate = None if gate is None else gate.to(adapter.B.device)
    if isinstance(adapter, HydraMixture):  # one A for all experts: their B's add up
        wide = adapter.B.unflatten(-1, (adapter.experts, -1))
        return adapter.A, (wide if gate is None else wide * gate[:, None]).sum(1) * adapter.scaling
    return adapter.A, adapter.B * adapter.strength(gate)


def _configuration(model: Any, ranks: dict[str, int], name: str) -> LoraConfig:
    """The configuration that finds these projections, by their last names where those find no others."""
    given, layers = model.peft_config[name], layers_of(model, name)
    usual = Counter(ranks.values()).most_common(1)[0][0]
    pattern = {path: rank for path, rank in ranks.items() if rank != usual}
    config = LoraConfig(
        r=usual,
        lora_alpha=usual,  # every scale is in B
        rank_pattern=dict(pattern),
        alpha_pattern=dict(pattern),
        target_modules=sorted({path.rpartition(".")[2] for path in ranks}),
        modules_to_save=given.modules_to_save,
        task_type=given.task_type,
        base_model_name_or_path=given.base_model_name_or_path,
        fan_in_fan_out=all(isinstance(layers[path].get_base_layer(), Conv1D) for path in ranks),
        inference_mode=True,
    )
    linears = [path for path, _ in model.get_base_model().named_modules()]
    inside = tuple(f"{path}." for path in layers)
    found = {path for path in linears if not path.startswith(inside) and check_target_module_exists(config, path)}
    if found != set(ranks):
        config.target_modules = sorted(ranks)
    return config
