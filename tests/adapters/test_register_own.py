"""The worked example of docs/adapters.md runs as it stands, and what it registers behaves like any adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn

import monkeyjump as mj
from monkeyjump.adapters import ADAPTERS, Adapter, register
from tests.helpers import adapted, assert_same, gradients, lm_batch, mj_config, tiny_llama, wrap

DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def registered() -> Iterator[dict[str, Any]]:
    namespace: dict[str, Any] = {"__name__": "my_adapters"}
    exec(compile(BLOCKS[0], str(DOCS), "exec"), namespace)
    yield namespace
    ADAPTERS.remove("spectral")


def test_the_example_routes_trains_saves_and_loads(
    registered: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batches = [lm_batch(seed=i) for i in range(4)]
    namespace = {"base_model": tiny_llama(), "fresh_base_model": tiny_llama(), "batches": batches}
    code = BLOCKS[1].replace("# ... train ...", "train(model)")
    assert code != BLOCKS[1]

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for batch in batches:
            model.train()(**batch).loss.backward()
            assert all(gradient.abs().max() > 0 for gradient in gradients(model).values())
            optimizer.step()
            optimizer.zero_grad()
        model.eval()

    exec(compile(code, str(DOCS), "exec"), {**namespace, "train": train}, namespace)
    model: Any = namespace["model"]
    loaded: Any = namespace["loaded"]
    assert mj.count_parameters(model).trainable == 2 * 4 * 4  # blocks, projections, waves
    with torch.no_grad():
        logits = model(**lm_batch()).logits
        assert torch.equal(loaded(**lm_batch()).logits, logits)
        with model.disable_adapter():
            assert not torch.allclose(model(**lm_batch()).logits, logits)


def test_it_is_the_identity_at_first_and_can_be_merged(registered: dict[str, Any]) -> None:
    base = tiny_llama()
    with torch.no_grad():
        expected = base(**lm_batch()).logits
        assert torch.equal(wrap(base, adapter="spectral")(**lm_batch()).logits, expected)
    model = adapted(adapter="spectral", layers_to_route=[])
    with torch.no_grad():
        before = model(**lm_batch()).logits
        model.merge_adapter()
        torch.testing.assert_close(model(**lm_batch()).logits, before, rtol=1e-4, atol=1e-4)
        model.unmerge_adapter()
        torch.testing.assert_close(model(**lm_batch()).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("router", ["linear", "sigmoid"])
def test_it_works_with_learned_routers(registered: dict[str, Any], router: str) -> None:
    model = adapted(adapter="spectral", router=router).train()
    model(**lm_batch()).loss.backward()
    assert all(gradient.abs().max() > 0 for gradient in gradients(model).values())
    with pytest.raises(mj.ConfigError, match="'spectral' has no form with several experts"):
        wrap(tiny_llama(), adapter="spectral", router=router, placement="projection", shared_modules=None)


def test_its_options_are_checked(registered: dict[str, Any]) -> None:
    with pytest.raises(mj.ConfigError, match="waves=0 must be"):
        mj_config(adapter="spectral", adapter_options={"waves": 0})
    with pytest.raises(mj.ConfigError, match="Did you mean 'waves'"):
        mj_config(adapter="spectral", adapter_options={"wave": 3})


def test_an_adapter_nobody_registered() -> None:
    with pytest.raises(mj.ConfigError, match=r"adapter='spectral' is not known.*registers an adapter of your own"):
        mj_config(adapter="spectral")


def test_names_are_taken_once(registered: dict[str, Any]) -> None:
    class Mine(Adapter):
        name = "lora"

    for name in ("lora", "ia3", "spectral"):
        Mine.name = name
        with pytest.raises(ValueError, match=f"adapter '{name}' is registered already"):
            register(Mine)
    with pytest.raises(ValueError, match="comes with the library"):
        ADAPTERS.remove("lora")


def test_names_of_its_tensors_are_taken_and_a_broken_one_harms_nobody_else(registered: dict[str, Any]) -> None:
    with pytest.raises(mj.ConfigError, match="adapter name 'spectrum' is also the name of a tensor"):
        get_peft_model(tiny_llama(1), mj_config(adapter="spectral"), adapter_name="spectrum")

    @register
    class Broken(Adapter):
        name = "broken"

        def __init__(self, in_features: int, out_features: int, config: mj.MonkeyJumpConfig) -> None:
            raise RuntimeError("on purpose")

    try:
        wrap(tiny_llama(1))
        base = tiny_llama(1)
        with pytest.raises(RuntimeError, match="on purpose"):
            wrap(base, adapter="broken")
        assert not any("monkeyjump" in name for name, _ in base.named_modules())
    finally:
        ADAPTERS.remove("broken")


def test_bf16_and_checkpointing(registered: dict[str, Any]) -> None:
    model = adapted(tiny_llama().bfloat16(), adapter="spectral")
    with torch.no_grad():
        assert model(**lm_batch()).logits.dtype == torch.bfloat16
    found = []
    for checkpointing in (False, True):
        model = adapted(adapter="spectral").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**lm_batch(), use_cache=False).loss.backward()
        found.append(gradients(model))
    assert_same(found[0], found[1], rtol=1e-5, atol=1e-6)
