"""What holds for every method: identity at the start, padding, checkpointing, saving, generation, accumulation.

Two more such promises have files of their own: `test_compile.py` and `test_trainers.py` (resumed = uninterrupted).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import GenerationConfig

import monkeyjump as mj
from tests.helpers import PAD, REORDERED, assert_same, gradients, lm_batch, padded, routing_state, token_ids
from tests.methods.common import (
    CASES,
    LOUD,
    METHODS,
    NEARLY_IDENTITY,
    base_of,
    batch_for,
    config_of,
    fresh,
    learned_routers,
    moved,
    spread,
)
from tests.processes import in_new_processes

WITH_LOSS = list(LOUD)


@pytest.mark.parametrize("case", [*CASES, "mjlora_shuffled", "mjlora_task"])
def test_identity_at_the_start(case: str) -> None:
    batch = batch_for(case)
    with torch.no_grad():
        base = base_of(case)(input_ids=batch["input_ids"]).logits
        model = fresh(case)
        if case not in NEARLY_IDENTITY:
            spread(model)
        if case in (*NEARLY_IDENTITY, "mixlora published"):  # whose rows are repeated, which is another product
            torch.testing.assert_close(model(**batch).logits, base, **REORDERED)
        else:
            assert torch.equal(model(**batch).logits, base)


def losses_and_gradients(method: str, batch: dict[str, torch.Tensor], **changes: Any) -> dict[str, torch.Tensor]:
    model = moved(method, **{**LOUD.get(method, {}), **changes}).double().train()
    loss = model(**batch).loss
    loss.backward()
    last = {f"loss {k}": v for k, v in model.base_model.routing.losses.last.items()}
    return {"loss": loss.detach(), **last, **gradients(model)}


def padded_batch(method: str, side: str | None) -> dict[str, torch.Tensor]:
    """Three sentences of one length, as they are or with three pads of arbitrary content; the EMA is not at issue."""
    plain = batch_for(method)
    if side is None:
        return plain
    width = plain["input_ids"].shape[1] + 3
    mask = padded(list(plain["attention_mask"]), side, width)
    noise = token_ids(3, width, seed=99)
    return {
        **plain,
        "input_ids": torch.where(mask.bool(), padded(list(plain["input_ids"]), side, width), noise),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
        "labels": padded(list(plain["labels"]), side, width, fill=-100),
    }


@pytest.mark.parametrize("method", CASES)
def test_padding_changes_nothing(method: str) -> None:
    """The loss, with balance and contrastive losses in it, and every gradient."""
    plain = losses_and_gradients(method, padded_batch(method, None))
    for side in ("left", "right"):
        assert_same(plain, losses_and_gradients(method, padded_batch(method, side)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", CASES)
def test_checkpointing_changes_nothing(method: str) -> None:
    """Two forwards, then two backwards: a recomputation must not see the mask of the later forward, nor stage again."""
    found = []
    for checkpointing in (False, True):
        model = moved(method, **{**LOUD.get(method, {}), "dropout": 0.2}).double().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        first, second = batch_for(method, seed=1), batch_for(method, seed=2)
        first["attention_mask"][0, :2] = 0
        second["attention_mask"][1, :3] = 0
        torch.manual_seed(3)
        losses = [model(**first).loss, model(**second).loss]
        for loss in losses:
            loss.backward()
        said = model.base_model.routing.losses.statements.values()
        assert not any(one.probability is not None or one.contrastive is not None for one in said)
        found.append({"first": losses[0].detach(), "second": losses[1].detach(), **gradients(model)})
    assert_same(found[0], found[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", CASES)
def test_reentrant_checkpointing(method: str) -> None:
    """Without a loss on the router it works; with one it cannot, and says what to do."""
    silent = {"aux_loss_weight": 0.0, "contrastive_weight": 0.0, "dropout": 0.2}
    found = []
    for checkpointing in (False, True):
        model = moved(method, **silent).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        torch.manual_seed(3)
        model(**batch_for(method)).loss.backward()
        found.append({**gradients(model), **routing_state(model)})
    assert_same(found[0], found[1], rtol=1e-5, atol=1e-7)
    if method in LOUD:
        model = moved(method, **LOUD[method]).train()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        with pytest.raises(mj.ConfigError, match="use_reentrant"):
            model(**batch_for(method))


def child(_: int, folder: str) -> None:
    """Runs in a process of its own."""
    for method in CASES:
        model = PeftModel.from_pretrained(base_of(method), Path(folder) / method).eval()
        with torch.no_grad():
            torch.save(model(**batch_for(method)).logits, Path(folder) / method / "child.pt")


def test_a_new_process_computes_the_same(tmp_path: Path) -> None:
    expected = {}
    for method in CASES:
        model = moved(method).eval()
        model.save_pretrained(str(tmp_path / method))
        with torch.no_grad():
            expected[method] = model(**batch_for(method)).logits
            again = PeftModel.from_pretrained(base_of(method), tmp_path / method).eval()
            assert torch.equal(again(**batch_for(method)).logits, expected[method]), method
    in_new_processes(child, str(tmp_path))
    for method, logits in expected.items():
        assert torch.equal(torch.load(tmp_path / method / "child.pt"), logits), method


@pytest.mark.parametrize("method", CASES)
def test_cached_generation_equals_uncached(method: str) -> None:
    model = moved(method).eval()
    rows = [token_ids(1, length, seed=20 + length)[0] for length in (4, 7, 6)]
    ids = padded(rows, "left", 8)
    extra = {"task_ids": torch.tensor([0, 1, 2])} if method == "more" else {}
    found = [
        model.generate(
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            generation_config=GenerationConfig(
                max_new_tokens=5, min_new_tokens=5, pad_token_id=PAD, use_cache=cached, do_sample=False
            ),
            **extra,
        )
        for cached in (True, False)
    ]
    assert torch.equal(found[0], found[1])
    assert len(found[0][:, 8:].unique()) > 1


@pytest.mark.parametrize("method", WITH_LOSS)
def test_losses_do_not_grow_with_accumulation(method: str) -> None:
    """The same rows as one batch, and as two micro-batches that each hold all of them."""
    batch = batch_for(method)
    items = (batch["labels"][:, 1:] != -100).sum()
    found = []
    for micro in (1, 2):
        model = moved(method, **LOUD[method]).double().train()
        for _ in range(micro):
            model(**batch, num_items_in_batch=items * micro).loss.backward()
        found.append(gradients(model))
    assert_same(found[0], found[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", WITH_LOSS)
def test_a_trainer_that_makes_its_own_loss_trains_the_routers_losses_too(method: str) -> None:
    batch = batch_for(method)
    found = []
    quiet = {"orth_reg_weight": 0.0} if "adalora" in method else {}
    for own in (False, True):
        model = moved(method, **{**LOUD[method], **quiet}).double().train()
        if own:
            known = {key: value for key, value in batch.items() if key != "labels"}
            prompts = (batch["labels"] == -100).sum(1)  # MoRE's loss is on the prompt, which labels would tell
            logits = model(**known, prompt_lengths=prompts).logits
            loss = model.get_base_model().loss_function(logits, batch["labels"], vocab_size=logits.shape[-1])
        else:
            loss = model(**batch).loss
        loss.backward()
        found.append(gradients(model))
    assert_same(found[0], found[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "more"])
def test_learned_routers_learn(method: str) -> None:
    """At the start B is zero and a router has nothing to gain; after one step every parameter of it has a gradient."""
    model = fresh(method, aux_loss_weight=0.0).train()
    if not learned_routers(model):
        assert mj.count_parameters(model).router == 0
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(**lm_batch()).loss.backward()
        optimizer.step()
    for path, router in learned_routers(model).items():
        for name, parameter in router.named_parameters():
            assert parameter.grad is not None, f"{path}.{name}"
            assert parameter.grad.abs().max() > 0, f"{path}.{name}"


def test_two_methods_side_by_side() -> None:
    """Each alone as if the other were not there; both at once, both train; one deleted, the other unchanged."""
    pairs = [("moelora", "mjlora"), ("moa", "hydralora"), ("mixlora", "moe_propulsion")]
    for one, other in pairs:
        batch = batch_for(one)
        with torch.no_grad():
            expected = {name: moved(name).eval()(**batch).logits for name in (one, other)}
        model = moved(one)
        model.add_adapter("second", config_of(other))
        twin = moved(other)
        second = {k.replace("default", "second"): v for k, v in twin.state_dict().items() if "monkeyjump_" in k}
        model.load_state_dict(second, strict=False)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, expected[one])
            model.set_adapter("second")
            assert torch.equal(model(**batch).logits, expected[other])
        model.base_model.set_adapter(["default", "second"])
        model.train()
        model(**batch).loss.backward()
        assert set(gradients(model)) == {n for n, p in model.named_parameters() if ".monkeyjump_" in n}
        model.delete_adapter("default")
        model.set_adapter("second")
        with torch.no_grad():
            assert torch.equal(model.eval()(**batch).logits, expected[other])
