"""Whole models with their adapter: merged into the weights, or beside them in a folder that Transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from monkeyjump.errors import ConfigError
from monkeyjump.export.lora import card
from monkeyjump.models.visual import is_visual

MODELING = '''"""{parent} with a Monkey Jump adapter, which needs `pip install monkeyjump`."""

from pathlib import Path

import monkeyjump  # noqa: F401 - makes the adapter known to PEFT
from transformers import {parent}


class Routed{parent}({parent}):
    @classmethod
    def from_pretrained(cls, name, *args, **kwargs):
        known = {{key: kwargs[key] for key in ("revision", "token", "cache_dir") if key in kwargs}}
        model = super().from_pretrained(name, *args, **kwargs)
        folder = Path(name, "adapter")
        if folder.is_dir():
            model.load_adapter(str(folder))
        else:
            model.load_adapter(str(name), adapter_kwargs={{"subfolder": "adapter", **known}})
        return model.eval()
'''


def save_merged(model: Any, tokenizer: Any, folder: Path) -> None:
    """Fold an adapter that is always on into the base model, which is then saved as any model is."""
    base = _base_name(model)
    try:
        merged = model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ConfigError(f"{error}", title="cannot merge") from error
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    about = f"# {folder.name}\n\nThe model `{_short(base)}` with a monkeyjump adapter merged into its weights."
    (folder / "README.md").write_text(card(base, "transformers", about), encoding="utf-8")


def save_for_transformers(model: Any, tokenizer: Any, adapter: Path, folder: Path) -> None:
    """A folder with base model, adapter and code: AutoModelForCausalLM loads it where monkeyjump is installed."""
    import transformers

    base_name, base = _base_name(model), model.unload()
    parent = type(base).__name__
    if not hasattr(transformers, parent):
        raise ConfigError(f"its base model is a {parent}, which Transformers does not have.", title="cannot export")
    auto = "AutoModelForImageTextToText" if is_visual(base.config) else "AutoModelForCausalLM"
    base.save_pretrained(folder)
    (folder / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, folder / "adapter" / name)
    tokenizer.save_pretrained(folder)
    (folder / "modeling_monkeyjump.py").write_text(MODELING.format(parent=parent), encoding="utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_map"] = {auto: f"modeling_monkeyjump.Routed{parent}"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    about = (
        f"# {folder.name}\n\nThe model `{_short(base_name)}` with a routed adapter. Where monkeyjump is installed:\n\n"
        f'```python\n{auto}.from_pretrained("path/to/this/folder", trust_remote_code=True)\n```'
    )
    (folder / "README.md").write_text(card(base_name, "transformers", about), encoding="utf-8")


def push(folder: Path, repo_id: str) -> str:
    """Upload a folder to a repository of the Hugging Face hub, made if it is not there; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    api = HfApi()
    try:
        api.create_repo(repo_id, exist_ok=True)
        commit = api.upload_folder(folder_path=folder, repo_id=repo_id, commit_message="Upload with monkeyjump export")
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"--push {repo_id}: {reason} The export itself is complete in {str(folder)!r}: log in (`hf auth login`) "
            f"and upload it with `hf upload {repo_id} {folder}`.",
            title="not uploaded",
        ) from error
    return str(commit)


def _base_name(model: Any) -> str | None:
    return next(iter(model.peft_config.values())).base_model_name_or_path


def _short(base: str | None) -> str:
    return Path(base).name if base and Path(base).expanduser().exists() else str(base)
