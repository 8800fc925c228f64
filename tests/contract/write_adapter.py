"""Write the adapters that later versions must be able to read: `python -m tests.contract.write_adapter NAME`.

A version that changes what is saved leaves one folder for each form under `tests/contract/written/NAME`. The script
needs no more of the library than its first version had, so that it also runs on an old checkout.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import monkeyjump as mj

WRITTEN = Path(__file__).parent / "written"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
# what is saved, by the name of its folder; a version leaves those whose settings it knows
FORMS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": "lora"},
    "lora_fa": {"adapter": "lora_fa"},
    "adalora": {"adapter": "adalora", "r": 4},
    "propulsion": {"adapter": "propulsion"},
    "sequence": {"adapter": "lora", "granularity": "sequence"},
    "mixture": {"adapter": "lora", "router": "linear", "placement": "projection", "experts": 3, "shared_modules": []},
    "rank experts": {"adapter": "lora", "expert_unit": "rank", "ema_space": "raw"},
}


def base_model() -> Any:
    """A Llama of which every weight is in a file: drawn numbers may differ between versions of torch."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    file = WRITTEN / "base.safetensors"
    if not file.exists():
        WRITTEN.mkdir(exist_ok=True)
        save_file({name: value.half().contiguous() for name, value in model.state_dict().items()}, file)
    model.load_state_dict({name: value.float() for name, value in load_file(file).items()})
    return model


def logits_of(model: Any) -> torch.Tensor:
    """What the adapter makes of some tokens, padding among them."""
    ids = torch.arange(24).reshape(2, 12) % 31 + 1
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        return model.eval()(input_ids=ids * mask, attention_mask=mask).logits[mask.bool()]


def write(folder: Path, form: dict[str, Any]) -> None:
    settings = {"r": 2, "target_modules": TARGETS, "shared_modules": ["o_proj", "gate_proj"], "dropout": 0.0, **form}
    config = mj.MonkeyJumpConfig(center_init="random_normalized", task_type="CAUSAL_LM", **settings)
    model = get_peft_model(base_model(), config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            with torch.no_grad():
                parameter.copy_(parameter + 0.3 * torch.randn(parameter.shape, generator=generator))
    model.train()
    for seed in range(3):  # the centres move, and are between two updates
        ids = torch.randint(1, 32, (2, 9), generator=torch.Generator().manual_seed(seed))
        model(input_ids=ids, labels=ids)
    assert isinstance(model, PeftModel)
    model.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    save_file({"logits": logits_of(model).contiguous()}, folder / "expected.safetensors")


def main(name: str) -> None:
    known = inspect.signature(mj.MonkeyJumpConfig).parameters
    for form, settings in FORMS.items():
        if settings.keys() <= known.keys():
            try:
                write(WRITTEN / name / form.replace(" ", "-"), settings)
            except (ValueError, NotImplementedError) as error:
                print(f"{form}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
