"""Adapters that earlier versions wrote are read, and compute what they computed then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file

import monkeyjump as mj
from monkeyjump.config import FORMAT
from monkeyjump.errors import ConfigError
from tests.contract.write_adapter import WRITTEN, base_model, logits_of
from tests.helpers import REORDERED

FOLDERS = sorted(file.parent for file in WRITTEN.glob("*/*/adapter_config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name} {folder.name}")
def test_what_was_written_is_read(folder: Path) -> None:
    logits = logits_of(PeftModel.from_pretrained(base_model(), folder))
    assert torch.allclose(logits, load_file(folder / "expected.safetensors")["logits"], **REORDERED)
    assert not torch.allclose(logits, logits_of(base_model()), atol=0.1)


def test_each_version_of_the_format_has_adapters() -> None:
    written = {json.loads((folder / "adapter_config.json").read_text()).get("format_version", 1) for folder in FOLDERS}
    assert written == set(range(1, FORMAT + 1))


def test_a_file_names_its_format(tmp_path: Path) -> None:
    mj.MonkeyJumpConfig().save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["format_version"] == FORMAT
    loaded = PeftConfig.from_pretrained(str(tmp_path))
    assert loaded == mj.MonkeyJumpConfig()


@pytest.mark.parametrize("version", [FORMAT + 1, 0, -3, "1", None, 1.5, True])
def test_a_format_that_is_not_known_is_refused(version: object, tmp_path: Path) -> None:
    """A later version may have given the same names another meaning."""
    shutil.copytree(FOLDERS[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": version}))
    with pytest.raises(ConfigError, match=rf"format_version={version!r}.* reads 1"):
        PeftModel.from_pretrained(base_model(), tmp_path)
