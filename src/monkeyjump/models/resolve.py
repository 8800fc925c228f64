"""From a name to a model and its tokenizer: the bundled default, a local folder, a GGUF file, or a hub id."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from monkeyjump.errors import ConfigError
from monkeyjump.models.bundled import (
    BUNDLED,
    SMOLLM2,
    cached_folder,
    end_as_model,
    ensure,
    is_cached,
    load_gguf,
    require_gguf,
)
from monkeyjump.models.hub import cached_snapshot, hub_reachable, why_unreachable
from monkeyjump.models.visual import PLAIN_TEMPLATE, is_visual, load_processor
from monkeyjump.registry import did_you_mean

DEFAULT_MODEL = SMOLLM2.name
Kind = Literal["bundled", "folder", "gguf", "hub"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model is. `source` and `options` are what `from_pretrained` of model and tokenizer take."""

    name: str
    kind: Kind
    source: str
    gguf_file: str | None = None
    local_files_only: bool = False
    revision: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        more = {"gguf_file": self.gguf_file, "revision": self.revision}
        return {"local_files_only": self.local_files_only, **{name: value for name, value in more.items() if value}}


@dataclass(frozen=True)
class ModelState:
    """One line of `monkeyjump models`."""

    name: str
    kind: Kind
    state: Literal["cached", "missing"]
    size: int | None  # bytes on disk
    path: str


def resolve(name: str = DEFAULT_MODEL, revision: str | None = None) -> ResolvedModel:
    """Find a model. The bundled default is fetched if it is not there yet; a hub id is only checked."""
    path = Path(name).expanduser()
    # `.../models/smollm2-135m` is what an adapter made on another machine remembers as its base model
    moved = path.name in BUNDLED and path.parent.name == "models" and not os.path.exists(path)
    if name in BUNDLED or moved:
        return ResolvedModel(path.name, "bundled", str(ensure(BUNDLED[path.name])), local_files_only=True)
    if os.path.isfile(path):  # unlike the methods of a path, these say no to a name that is too long for a file
        return _from_file(name, path)
    if os.path.isdir(path):
        return _from_folder(name, path)
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise _problem(f"model {name!r} looks like a path, and there is no such file or folder. Check the path.")
    return _from_hub(name, revision)


def published_name(name: str) -> str:
    """The name by which a model is found on any machine: of a bundled one its id on the hub, else the given name."""
    return (BUNDLED[name].hub_id or name) if name in BUNDLED else name


def _from_file(name: str, path: Path) -> ResolvedModel:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise _problem(
            f"model {name!r} is a file but not GGUF (it starts with {magic!r}). Pass a GGUF file or a folder."
        )
    return ResolvedModel(name, "gguf", str(path.parent), gguf_file=path.name, local_files_only=True)


def _from_folder(name: str, path: Path) -> ResolvedModel:
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise _problem(
            f"model {name!r} holds an adapter, not a model. Pass its base model here and the adapter as the adapter."
        )
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _from_file(name, ggufs[0])
        there = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise _problem(
            f"model {name!r}: the folder has no config.json (it holds {there}). Pass a folder saved by save_pretrained."
        )
    return ResolvedModel(name, "folder", str(path), local_files_only=True)


def _from_hub(name: str, revision: str | None) -> ResolvedModel:
    if hub_reachable():
        return ResolvedModel(name, "hub", name, revision=revision)
    if cached_snapshot(name, revision) is not None:
        return ResolvedModel(name, "hub", name, local_files_only=True, revision=revision)
    for bundled in BUNDLED.values():
        if name == bundled.hub_id and revision is None:  # the package index has it too
            return resolve(bundled.name)
    raise _problem(
        f"model {name!r} is not a local path and not in the Hugging Face cache, and the hub cannot be used "
        f"({why_unreachable()}).{did_you_mean(name, list(BUNDLED))} "
        f"Go online once (`hf download {name}`), pass a folder or a GGUF file, or use {DEFAULT_MODEL!r}, or for "
        "pictures 'vlm-tiny', which need only a package index."
    )


def _problem(message: str) -> ConfigError:
    return ConfigError(message, title="model not available")


def load_model(name: str = DEFAULT_MODEL, dtype: Any = None, device: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """Model in eval mode and tokenizer with a chat template, a pad and an eos token.

    `dtype` None: float32 on a CPU, as stored elsewhere. `kwargs` go to `from_pretrained` of the model. One that reads
    pictures comes with a `VisualProcessor` in the place of the tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    import monkeyjump.models.vlm_tiny  # noqa: F401 - makes its classes known to Transformers

    revision = kwargs.pop("revision", None)
    resolved = resolve(name, revision)
    if dtype is None:
        dtype = torch.float32 if device is None or torch.device(device).type == "cpu" else "auto"
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype)
    try:
        tokenizer = load_tokenizer(resolved)
        if resolved.gguf_file:
            model = load_gguf(resolved.source, resolved.gguf_file, dtype, **kwargs)
            end_as_model(tokenizer, model)
        elif is_visual(AutoConfig.from_pretrained(resolved.source, **resolved.options)):
            auto: Any = AutoModelForImageTextToText
            model = auto.from_pretrained(resolved.source, dtype=dtype, **resolved.options, **kwargs)
            tokenizer = load_processor(resolved.source, resolved.options, tokenizer, model)
        else:
            model = AutoModelForCausalLM.from_pretrained(resolved.source, dtype=dtype, **resolved.options, **kwargs)
    except (OSError, ImportError) as error:  # ConfigError, a ValueError, passes
        reason = str(error).strip().splitlines()[0]
        raise _problem(
            f"model {name!r} ({resolved.kind}, {resolved.source}) does not load: {reason}. Check name and files."
        ) from error
    if device is not None:
        model = model.to(device)
    return model.eval(), tokenizer


def load_tokenizer(model: str | ResolvedModel) -> Any:
    """The tokenizer of a model; where it lacks a pad token or a chat template (base models), a plain one is added."""
    from transformers import AutoTokenizer

    resolved = resolve(model) if isinstance(model, str) else model
    if resolved.gguf_file:
        require_gguf(resolved.gguf_file)
    tokenizer = AutoTokenizer.from_pretrained(resolved.source, **resolved.options)
    if tokenizer.eos_token is None:
        raise _problem(
            f"model {resolved.name!r}: its tokenizer has no eos token, so answers cannot end. Set one and save it."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def list_models() -> list[ModelState]:
    """The bundled models, and every model in the Hugging Face cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    states = []
    for name in BUNDLED:
        folder = cached_folder(name)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if is_cached(name) else None
        states.append(ModelState(name, "bundled", "missing" if size is None else "cached", size, str(folder)))
    with suppress(CacheNotFound):
        repos = sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
        known = (repo for repo in repos if repo.repo_type == "model")
        states += [ModelState(one.repo_id, "hub", "cached", one.size_on_disk, str(one.repo_path)) for one in known]
    return states
