"""Replayed training forwards against the model as it is; a graph is here one that runs its work again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import monkeyjump as mj
from monkeyjump.training import attention, captured
from monkeyjump.training import compile as compiling
from monkeyjump.training.attention import MASKED, PADS_LAST, attending
from monkeyjump.training.captured import CaptureReport
from monkeyjump.training.fast import FastSettings, fast, known_modules
from monkeyjump.training.recipe import Recipe, overridden
from tests import replay
from tests.helpers import ADAPTER_NAMES, adapted, assert_same, lm_batch, settled, tiny_llama, wrap
from tests.methods.common import config_of
from tests.replay import RunAgain


def replaying(model: Any, direct: bool = False) -> AbstractContextManager[CaptureReport]:
    return replay.replaying(model, compiling.compiled_parts(model.get_base_model(), "model"), direct)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model: Any, batches: list[list[dict[str, Any]]]) -> list[Tensor]:
    """Optimiser steps of several micro-batches; a look at the model in evaluation between them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    torch.manual_seed(3)
    for step in batches:
        for batch in step:
            loss = model(**batch).loss / len(step)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        losses.append(model(**step[0]).loss.detach())
        model.train()
    return losses


def twenty_steps() -> list[list[dict[str, Any]]]:
    shapes = [(2, 8), (3, 6), (2, 8), (1, 10)]
    return [[lm_batch(*shapes[(n + m) % 4], seed=7 * n + m) for m in range(2)] for n in range(20)]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("adapter", ADAPTER_NAMES)
def test_twenty_replayed_steps_are_twenty_ordinary_ones(adapter: str, direct: bool) -> None:
    models = [adapted(adapter=adapter, ema_interval=2, dropout=0.1).train() for _ in range(2)]
    expected = train(models[0], twenty_steps())
    with replaying(models[1], direct) as report:
        found = train(models[1], twenty_steps())
    # AdaLoRA's regulariser is not in the graph: autograd adds its gradient to the other before both are accumulated
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if direct and adapter == "adalora" else {}
    assert_same(*[{str(n): loss for n, loss in enumerate(losses)} for losses in (found, expected)], **tolerance)
    assert_same(*[settled(model) for model in models], **tolerance)
    assert report.graphs == 3
    assert report.replayed == 40 - 3 * captured.WARM_UP


@pytest.mark.parametrize(
    "method", ["hydralora", "moelora", "mixlora", "more", "moa", "lime", "mjlora_task", "mjlora_prompt"]
)
def test_other_routers_are_replayed_with_what_they_read_and_say(method: str) -> None:
    models = [wrap(tiny_llama(), config_of(method)).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    batches = [[lm_batch(2, 8, seed=n) | {"task_ids": torch.tensor([n % 2, 1])}] for n in range(6)]
    expected = train(models[0], batches)
    with replaying(models[1]) as report:
        found = train(models[1], batches)
    assert report.replayed == 6 - captured.WARM_UP
    assert_same(*[{str(n): loss for n, loss in enumerate(losses)} for losses in (found, expected)])
    assert_same(*[settled(model) for model in models])


def test_a_forward_before_the_last_backward_is_not_replayed_and_right() -> None:
    model = adapted(ema_stop=0).train()
    batches = [lm_batch(2, 8, seed=n) for n in range(2)]
    (2 * model(**batches[0]).loss + model(**batches[1]).loss).backward()
    expected = gradients(model)
    model.zero_grad()
    with replaying(model) as report:
        for _ in range(captured.WARM_UP):
            model(**batches[0])
        (2 * model(**batches[0]).loss + model(**batches[1]).loss).backward()
        assert_same(gradients(model), expected)
        model(**batches[0])  # dropped without a backward: nothing waits
        model(**batches[0]).loss.backward()
    assert report.replayed == 3
    assert report.others["another forward waits for its backward"] == 1


def test_who_listens_to_a_gradient_hears_it_also_where_gradients_are_delivered_directly() -> None:
    models, heard = [adapted().train() for _ in range(2)], [list[Tensor](), list[Tensor]()]
    handles = [
        next(p for p in model.parameters() if p.requires_grad).register_hook(own.append)
        for model, own in zip(models, heard, strict=True)
    ]
    with replaying(models[1], direct=True) as report:
        for model in models:
            for seed in range(3):
                model(**lm_batch(2, 8, seed=seed)).loss.backward()
        assert_same(*[gradients(model) for model in models])
        assert_same(*[{str(n): gradient for n, gradient in enumerate(own)} for own in heard])
        for model, handle in zip(models, handles, strict=True):
            handle.remove()
            model(**lm_batch(2, 8, seed=3)).loss.backward()
        assert_same(*[gradients(model) for model in models])
    assert report.replayed == 3
    assert [len(own) for own in heard] == [3, 3]


def test_a_second_backward_is_refused() -> None:
    model = adapted(ema_stop=0).train()
    with replaying(model):
        for _ in range(captured.WARM_UP):
            model(**lm_batch(2, 8))
        loss = model(**lm_batch(2, 8)).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="one backward"):
            loss.backward()


def test_any_loss_of_the_outputs_can_be_made_outside() -> None:
    """A trainer that makes its own loss, from logits, of a model that is given no labels."""
    models = [adapted(ema_interval=2).train() for _ in range(2)]
    for model, replays in zip(models, (False, True), strict=True):
        inside: AbstractContextManager[Any] = replaying(model) if replays else nullcontext()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with inside as report:
            for n in range(6):
                batch = lm_batch(2, 8, seed=n)
                labels = batch.pop("labels")
                logits = model(**batch).logits
                torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert report.replayed == 6 - captured.WARM_UP
    assert_same(*[settled(model) for model in models])


def test_the_number_of_tokens_is_no_shape_and_others_parameters_are_another_graph() -> None:
    model = adapted(ema_stop=0).train()
    with replaying(model) as report:
        for count in range(5, 10):
            model(**lm_batch(2, 8), num_items_in_batch=count).loss.backward()
        assert (report.graphs, report.replayed) == (1, 5 - captured.WARM_UP)
        parameter = next(p for p in model.parameters() if p.requires_grad)
        parameter.data = parameter.data.clone()
        for _ in range(3):
            model(**lm_batch(2, 8)).loss.backward()
        assert (report.graphs, report.replayed) == (2, 8 - 2 * captured.WARM_UP)


def test_a_recording_that_fails_is_tried_with_leaves_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does on a GPU while the graph of an earlier loss is alive."""
    models = [adapted(dropout=0.1).train() for _ in range(2)]
    expected, record, tried = train(models[0], twenty_steps()[:6]), RunAgain.record, []

    def fails_first(graph: RunAgain, work: Any) -> Any:
        tried.append(graph)
        if len(tried) % 4 == 2:  # the backward of every first try
            raise RuntimeError("operation failed")
        return record(graph, work)

    monkeypatch.setattr(RunAgain, "record", fails_first)
    with replaying(models[1]) as report:
        found = train(models[1], twenty_steps()[:6])
    assert (report.graphs, report.replayed) == (3, 12 - 3 * captured.WARM_UP)
    assert_same(*[{str(n): loss for n, loss in enumerate(losses)} for losses in (found, expected)])
    assert_same(*[settled(model) for model in models])


def test_without_memory_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = adapted().train()

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(RunAgain, "record", full)
    with replaying(model) as report:
        for _ in range(4):
            model(**lm_batch(2, 8)).loss.backward()
    assert report.replayed == 0
    assert report.others["cannot be captured"] == 4 - captured.WARM_UP
    assert capsys.readouterr().out.count("no memory to capture batches of shape (2, 8)") == 1


@pytest.mark.parametrize("kind", ["ours", "peft"])
def test_fast_trains_the_same_and_leaves_no_trace(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around our adapters and around PEFT's own LoRA."""

    def new() -> Any:
        torch.manual_seed(0)
        lora = LoraConfig(r=2, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")
        model = adapted(ema_interval=2) if kind == "ours" else get_peft_model(tiny_llama(), lora)
        return model.train()

    batches = [[lm_batch(2, 8, seed=n)] for n in range(5)]
    models = [new() for _ in range(2)]
    traces = [{name: set(vars(module)) for name, module in models[1].named_modules()}]
    expected = train(models[0], batches)
    monkeypatch.setattr("monkeyjump.training.fast.captured", replay.replaying)
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    with fast(models[1], compile=True, capture=True, fused_loss="torch", pads_last=True) as report:
        found = train(models[1], batches)
    assert report.captured is not None
    assert report.captured.replayed == 5 - captured.WARM_UP
    assert report.fused_loss == "torch"
    traces.append({name: set(vars(module)) for name, module in models[1].named_modules()})
    assert traces[0] == traces[1]
    assert models[1].config._attn_implementation == models[0].config._attn_implementation
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert_same(*[settled(model) for model in models], atol=1e-4, rtol=1e-4)


def test_a_mode_that_others_have_changed_is_set_again() -> None:
    model = adapted().train()
    base: Any = model.get_base_model()
    layer = base.model.layers[0]
    with known_modules(model):
        layer.eval()
        model.train()  # the first to set a mode here
        assert layer.training
        model.eval()
        for module in model.modules():  # as evaluation gives everybody the mode back that it had
            module.training = True
        layer.training = False
        model.train()
        assert layer.training


def test_other_adapters_and_a_look_at_the_routing_are_not_replayed() -> None:
    model = adapted(ema_stop=0).train()
    batch = lm_batch(2, 8)
    expected = model(**batch).loss.detach()
    with model.disable_adapter():
        plain = model(**batch).loss.detach()
    assert plain != expected
    with replaying(model) as report:
        for _ in range(3):
            model(**batch).loss.backward()
        with model.disable_adapter():
            assert torch.equal(model(**batch).loss, plain)
        with mj.record_routing(model) as trace:
            assert torch.equal(model(**batch).loss, expected)
        with mj.knock_out(model, {"0": ["q_proj"]}):
            assert not torch.equal(model(**batch).loss, expected)
        assert torch.equal(model(**batch).loss, expected)
    assert report.others["somebody looks at the routing"] == 1
    assert report.others["experts are knocked out"] == 1
    assert report.replayed == 2  # what is trained changed in between, so that graphs are made again
    assert trace is not None


@pytest.mark.parametrize("pads_last", [True, False])
def test_attention_without_gradients_sees_the_mask_and_with_them_pads_at_the_end(pads_last: bool) -> None:
    model = adapted(ema_stop=0).eval()
    left, right = lm_batch(2, 8), lm_batch(2, 8)
    left["attention_mask"][0, :3] = 0
    right["attention_mask"][0, -3:] = 0
    real = right["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**left).logits
    trained = model(**right).logits[real]
    with attending(model, pads_last) as used:
        assert used == (PADS_LAST if pads_last else MASKED)
        with torch.no_grad():
            assert torch.equal(model(**left).logits, expected)
        torch.testing.assert_close(model(**right).logits[real], trained, atol=1e-5, rtol=1e-5)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("pads_last", [True, False])
def test_short_rows_in_bf16_are_multiplied_out_with_the_gradients_of_torch(
    pads_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have pads, heads share keys, and weights have bf16 values throughout: in fp32 all but rounding is equal."""
    base = tiny_llama().train().to(torch.bfloat16)
    batch = lm_batch(3, 8)
    batch["attention_mask"][0, -3:] = 0
    real = batch["attention_mask"].bool()

    def measured(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        model = base.to(dtype)
        model.zero_grad()
        logits = model(**batch).logits[real].float()
        logits.square().sum().backward()
        return logits.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])

    expected = measured(torch.float32)
    counted: list[int] = []
    plain = attention._products

    def counting(*args: Any) -> torch.Tensor:
        counted.append(1)
        return plain(*args)

    monkeypatch.setattr(attention, "_products", counting)
    with attending(base, pads_last):
        measured(torch.float32)  # keeps torch's kernel, as all does without gradients
        with torch.no_grad():
            base.to(torch.bfloat16)(**batch)
        assert not counted
        rounded = measured(torch.bfloat16)
        assert len(counted) == base.config.num_hidden_layers
        monkeypatch.setattr(attention, "gains_from_products", lambda tensor: True)
        for found, wanted in zip(measured(torch.float32), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=1e-4)
    for found, wanted in zip(rounded, expected, strict=True):
        assert (found - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("mask", ["none", "causal", "truths", "numbers"])
def test_short_rows_read_what_torch_reads(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of a mask are added to the scores, and what reads both ways does so without one."""
    monkeypatch.setattr(attention, "gains_from_products", lambda tensor: True)
    query, key, value = (torch.randn(2, heads, 5, 4, requires_grad=True) for heads in (4, 2, 2))
    module: Any = nn.Module()
    module.is_causal, module.num_key_value_groups = mask == "causal", 2
    seen = torch.ones(5, 5, dtype=torch.bool).tril(1)[None, None]
    biases = torch.randn(1, 4, 5, 5).masked_fill(~seen, torch.finfo(torch.float32).min)
    given = {"none": None, "causal": None, "truths": seen, "numbers": biases}[mask]
    wanted, _ = sdpa_attention_forward(module, query, key, value, given)
    torch.testing.assert_close(attention.attend(module, query, key, value, given)[0], wanted)


def test_models_with_windows_keep_their_masks() -> None:
    base = tiny_llama()
    base.config.layer_types = ["full_attention", "sliding_attention"]
    with attending(base, pads_last=True) as used:
        assert used == MASKED
    base.config._attn_implementation = "eager"
    with attending(base, pads_last=True) as used:
        assert used == "eager"


def test_packed_sequences_keep_apart_with_and_without_boundaries() -> None:
    model = adapted(ema_stop=0).train()
    ids = lm_batch(1, 9)["input_ids"]
    row = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), "use_cache": False}
    expected = model(**row).logits
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    with attending(model, pads_last=True):
        for more in ({}, told):
            torch.testing.assert_close(model(**row, **more).logits, expected, atol=1e-5, rtol=1e-5)
    alone = model(input_ids=ids, use_cache=False).logits
    assert not torch.allclose(alone[0, 4:], expected[0, 4:], atol=1e-3)
    for block in model.get_base_model().model.layers:  # type: ignore[union-attr]
        block.self_attn.forward = lambda hidden_states: hidden_states  # takes nothing that it does not know
    with attending(model, pads_last=True) as used:
        assert used == MASKED


@pytest.mark.parametrize(
    ("asked", "ranks", "captured"), [("null", 1, True), ("null", 2, False), ("true", 2, True), ("false", 1, False)]
)
def test_steps_of_several_ranks_are_captured_where_that_is_asked_for(asked: str, ranks: int, captured: bool) -> None:
    recipe = overridden(Recipe(), [f"train.capture={asked}"])
    assert FastSettings.of_recipe(recipe, gpu=True, ranks=ranks).capture is captured
    assert not FastSettings.of_recipe(recipe, gpu=False, ranks=ranks).capture
