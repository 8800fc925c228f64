"""Image tokens a second in training, against the frozen model and PEFT's LoRA, with the tower and with kept features.

    python benchmarks/picture_speed.py --output picture-speed.json             # on a GPU
    python benchmarks/picture_speed.py --tiny --steps 2 --output tiny.json     # to try it

Random weights of the shape of LLaVA-OneVision 0.5B in bf16, one picture of 384 x 384 a row (its tile and itself, 1,485
tokens) and 40 words, AdamW. The floor is the frozen model with the backward of its activations, the tower included.
"kept" takes features in the place of pixels, as `data.keep_features` does. Variants take turns.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, Qwen2Config, SiglipVisionConfig

import monkeyjump as mj
from monkeyjump.training.features import Features

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"]
PATTERN = r".*language_model.*\.(q|k|v|o|gate)_proj"  # for PEFT, to which names alone mean the tower as well
VARIANTS = ("floor", "peft", "peft+fast", "mjlora", "mjlora+fast", "mjlora+fast kept")
IMAGE, WORDS = 120, 40


def new_model(tiny: bool, device: str) -> Any:
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16}
    text = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    side = 384
    if tiny:
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        side = 56
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**vision, image_size=side, patch_size=14),
        text_config=Qwen2Config(**text, num_key_value_heads=2, vocab_size=1000 if tiny else 152_000),
        image_grid_pinpoints=[[side, side]],
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        return LlavaOnevisionForConditionalGeneration(config).to(dtype)


def batch_of(model: Any, rows: int) -> tuple[dict[str, torch.Tensor], int]:
    """Pictures and words; how many tokens are pictures."""
    vision = model.config.vision_config
    grid, side = vision.image_size // vision.patch_size, vision.image_size
    places = grid**2 + grid * (grid + 1)
    ids = torch.randint(200, 900, (rows, places + WORDS), device=model.device)
    ids[:, 4 : 4 + places] = IMAGE
    labels = ids.clone()
    labels[:, : -WORDS // 2] = -100
    pixels = torch.randn(rows, 2, 3, side, side, device=model.device, dtype=model.dtype)
    sizes = torch.full((rows, 2), side, device=model.device)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels, "image_sizes": sizes}, rows * places


def adapted(variant: str, model: Any) -> Any:
    if variant == "floor":
        return model.requires_grad_(False)
    if variant.startswith("peft"):
        config: Any = LoraConfig(r=2, lora_alpha=5, lora_dropout=0.05, target_modules=PATTERN)
    else:
        config = mj.methods.build("mjlora", "mj_paper", target_modules=TARGETS, center_init="random_normalized")
    return get_peft_model(model, config)


def kept(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with what the tower and the projector make of its pictures."""
    with torch.no_grad():
        given = {name: batch[name] for name in ("pixel_values", "image_sizes")}
        found = model.model.get_image_features(**given, return_dict=True).pooler_output
    return {**batch, "pixel_values": torch.cat(list(found))}


def step_ms(variant: str, options: argparse.Namespace) -> tuple[float, int, int]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = new_model(options.tiny, device)
    batch, places = batch_of(base, options.rows)
    features = SimpleNamespace(
        takes_them=False, listed={"image": True}, inner=base.model
    )  # all that reading features needs
    if "kept" in variant:
        batch = kept(base, batch)
    model = adapted(variant, base).train()
    if variant == "floor":
        base.get_input_embeddings().register_forward_hook(lambda *args: args[-1].requires_grad_())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4) if trained else None
    times = []
    inside = mj.fast(model) if "fast" in variant else nullcontext()
    with Features.read(features) if "kept" in variant else nullcontext(), inside:  # type: ignore[arg-type]
        for _ in range(options.warm_up + options.steps):
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            model(**batch).loss.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return median(times[options.warm_up :]), places, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--output", default="picture-speed.json")
    options = parser.parse_args()
    times: dict[str, list[float]] = {variant: [] for variant in options.variants}
    peaks: dict[str, int] = {}
    for _ in range(options.turns):
        for variant in options.variants:
            found, places, peaks[variant] = step_ms(variant, options)
            times[variant].append(found)
            print(f"{variant:18}{found:9.1f} ms", flush=True)
    floor = median(times.get("floor", [float("nan")]))
    rows = {
        variant: {
            "ms": median(found),
            "times_ms": found,
            "image_tokens_per_second": 1e3 * places / median(found),
            "over_floor": median(found) / floor,
            "peak_bytes": peaks[variant],
        }
        for variant, found in times.items()
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    with open(options.output, "w") as file:
        json.dump(
            {"settings": vars(options), "device": device, "torch": torch.__version__, "rows": rows}, file, indent=1
        )
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
