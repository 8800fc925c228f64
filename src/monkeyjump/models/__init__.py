"""Resolve a model name: the bundled default, a local folder, a GGUF file, or a hub id."""

from monkeyjump.models.resolve import (
    DEFAULT_MODEL,
    ModelState,
    ResolvedModel,
    list_models,
    load_model,
    load_tokenizer,
    published_name,
    resolve,
)

__all__ = ["DEFAULT_MODEL", "ModelState", "ResolvedModel", "list_models", "load_model", "load_tokenizer"]
__all__ += ["published_name", "resolve"]
