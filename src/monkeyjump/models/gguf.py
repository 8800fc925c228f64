"""GGUF files as ordinary, trainable models."""

from __future__ import annotations

from typing import Any

from monkeyjump.errors import ConfigError


def load_gguf(folder: str, gguf_file: str, dtype: Any, **kwargs: Any) -> Any:
    """The model with every weight unpacked: the packed form Transformers prefers where it has a kernel cannot train."""
    import transformers

    require_gguf(gguf_file)
    kwargs.setdefault("quantization_config", transformers.GgufConfig(dequantize=True))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf_file, dtype=dtype, **kwargs)
    # the weights are ordinary floats now, and must save and train as such
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    model.is_quantized = False
    return model


def require_gguf(gguf_file: str) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"model file {gguf_file!r}: reading GGUF needs the package `gguf`, which is not installed. "
            "Run `pip install 'monkeyjump[cli]'`, or pass a folder with safetensors.",
            title="model not available",
        ) from error
