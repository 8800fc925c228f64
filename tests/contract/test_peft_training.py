# PEFT and Transformers type their models as unions of tensors and modules, and folders as str; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, call-overload, index, misc, operator, union-attr"
"""PEFT's promises about training and inference: checkpointing, copies, dtypes, generation."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from peft import get_peft_model

import monkeyjump as mj
from tests.contract.common import centers_of, logits, state_of, train
from tests.helpers import (
    ADAPTER_NAMES,
    adapted,
    assert_same,
    gradients,
    layers_of,
    lm_batch,
    mj_config,
    tiny_llama,
    token_ids,
)

pytestmark = pytest.mark.parametrize("adapter", ADAPTER_NAMES)


def test_training_lowers_the_loss_of_one_batch(adapter: str) -> None:
    model = get_peft_model(tiny_llama(), mj_config(adapter=adapter))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    losses = []
    for _ in range(12):
        output = model(**lm_batch())
        logged = torch.nn.functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), lm_batch()["labels"][:, 1:].flatten()
        )
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(logged.item())
    assert losses[-1] < 0.9 * losses[0]


def test_training_with_dropout_is_a_function_of_the_seed(adapter: str) -> None:
    runs = []
    for _ in range(2):
        model = adapted(adapter=adapter, dropout=0.3)
        torch.manual_seed(5)
        runs.append((train(model), state_of(model)))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("prepare", ["enable_input_require_grads", "prepare_model_for_gradient_checkpointing"])
def test_inputs_can_require_gradients(adapter: str, prepare: str) -> None:
    model = adapted(adapter=adapter)
    if prepare == "enable_input_require_grads":
        model.enable_input_require_grads()
    else:
        model.prepare_model_for_gradient_checkpointing(model.get_base_model())
    seen = []
    handle = model.get_input_embeddings().register_forward_hook(lambda m, i, o: seen.append(o.requires_grad))
    model(**lm_batch())
    handle.remove()
    assert seen[-1] is True


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_checkpointing_changes_nothing(adapter: str, reentrant: bool, granularity: str) -> None:
    results = []
    for checkpointing in (False, True):
        model = adapted(adapter=adapter, granularity=granularity, dropout=0.2)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        losses = []
        for step in range(5):  # centres move after the second and the fourth forward
            torch.manual_seed(step)
            model.zero_grad()
            loss = model(**lm_batch(seed=step), use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
        results.append((losses, gradients(model), state_of(model)))
    (plain_losses, plain_gradients, plain_state), (losses, grads, state) = results
    assert losses == plain_losses
    assert_same(grads, plain_gradients)
    assert_same(state, plain_state)


def test_a_base_forward_between_forward_and_backward(adapter: str) -> None:
    """A reference pass (adapters off) before the backward must not disturb the recomputation."""
    results = []
    for interrupt in (False, True):
        model = adapted(adapter=adapter, granularity="sequence")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        loss = model(**lm_batch(seed=1), use_cache=False).loss
        if interrupt:
            with torch.no_grad(), model.disable_adapter():
                model(**lm_batch(seed=2, length=5), use_cache=False)
        loss.backward()
        results.append(gradients(model))
    assert_same(*results)


@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_an_evaluation_between_forward_and_backward(adapter: str, granularity: str) -> None:
    """Nor may an evaluation of another batch with the adapters on."""
    results = []
    for interrupt in (False, True):
        model = adapted(adapter=adapter, granularity=granularity)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        loss = model(**lm_batch(seed=1), use_cache=False).loss
        if interrupt:
            model.eval()
            logits(model, use_cache=False)
            model.train()
        loss.backward()
        results.append(gradients(model))
    assert_same(*results)


def test_evaluation_moves_nothing(adapter: str) -> None:
    model = adapted(adapter=adapter)
    train(model, steps=3)
    before = state_of(model)
    logits(model)
    model(**lm_batch()).loss.backward()  # eval mode, with gradients
    model.train()
    with torch.no_grad():
        model(**lm_batch())
    model.eval()
    model.generate(token_ids(), max_new_tokens=3, do_sample=False)
    assert_same(state_of(model), before)


def test_deepcopy_is_independent(adapter: str) -> None:
    model = adapted(adapter=adapter)
    train(model, steps=3)
    before, expected = state_of(model), logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), expected)
    train(twin, steps=5)
    assert_same(state_of(model), before)
    assert torch.equal(logits(model), expected)
    moved = state_of(twin)
    assert all(not torch.equal(moved[key], before[key]) for key in centers_of(before))

    reference = adapted(adapter=adapter)  # the copy trained as the original would have
    train(reference, steps=3)
    train(reference, steps=5)
    assert_same(moved, state_of(reference))

    own = {id(module) for module in twin.modules()}
    for layer in layers_of(twin).values():
        assert layer.context is twin.base_model.routing
        assert layer.context is not model.base_model.routing
        for router, _ in layer.routers.values():
            assert all(id(other) in own for layers in router.layers.values() for other in layers)
    ids = token_ids()
    assert torch.equal(
        twin.generate(ids, max_new_tokens=4, do_sample=False),
        reference.generate(ids, max_new_tokens=4, do_sample=False),
    )
    assert twin.get_base_model().generate.__self__ is twin.base_model.routing


def test_deepcopy_hooks_see_the_copy(adapter: str) -> None:
    """Other centres in the copy give other gates there, and only there."""
    model = adapted(adapter=adapter).eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for layer in layers_of(twin).values():
            if "default" in layer.monkeyjump_center:
                layer.monkeyjump_center["default"].neg_()
    with mj.record_routing(model) as here, mj.record_routing(twin) as there:
        logits(model)
        logits(twin)
    assert not torch.equal(here.gates("0"), there.gates("0"))
    fresh = adapted(adapter=adapter).eval()
    with mj.record_routing(fresh) as reference:
        logits(fresh)
    assert torch.equal(here.gates("0"), reference.gates("0"))


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_pickle_round_trip(adapter: str, how: str, tmp_path: Path) -> None:
    model = adapted(adapter=adapter)
    train(model, steps=3)
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(logits(twin), logits(model))
    assert_same(state_of(twin), state_of(model))
    assert train(twin, steps=5) == train(model, steps=5)
    assert_same(state_of(twin), state_of(model))
    ids = token_ids()
    assert torch.equal(
        twin.generate(ids, max_new_tokens=4, do_sample=False), model.generate(ids, max_new_tokens=4, do_sample=False)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_keeps_adapters_and_centres(adapter: str, dtype: torch.dtype) -> None:
    model = adapted(adapter=adapter)
    train(model, steps=3)
    before = state_of(model)
    for cast in (lambda m: m.to(dtype), lambda m: m.to("cpu", dtype), lambda m: m.half()):
        cast(model)
        assert_same(state_of(model), before)
    model.to(dtype)
    assert model.get_base_model().lm_head.weight.dtype == dtype
    assert logits(model).dtype == dtype
    train(model, steps=2)
    for key, value in state_of(model).items():
        assert value.dtype == before[key].dtype, key
        assert torch.isfinite(value).all(), key


def test_adapter_on_a_half_precision_base(adapter: str, tmp_path: Path) -> None:
    model = adapted(tiny_llama().to(torch.bfloat16), adapter=adapter)
    train(model, steps=3)
    assert {value.dtype for key, value in state_of(model).items() if "step" not in key} == {torch.float32}
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tiny_llama().to(torch.bfloat16), tmp_path)
    assert_same(state_of(loaded), state_of(model))
    assert torch.equal(logits(loaded), logits(model))


def test_generate(adapter: str) -> None:
    model = adapted(adapter=adapter).eval()
    ids = token_ids()
    expected = ids
    for _ in range(4):
        expected = torch.cat([expected, model(input_ids=expected).logits[:, -1:].argmax(-1)], 1)
    settings = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(input_ids=ids, **settings), expected)
    assert torch.equal(model.generate(ids, **settings), expected)
    assert torch.equal(model.generate(inputs=ids, **settings), expected)
    assert torch.equal(model.base_model.generate(ids, **settings), expected)
    assert torch.equal(model.get_base_model().generate(ids, **settings), expected)
    with model.disable_adapter():
        assert torch.equal(model.generate(ids, **settings), tiny_llama().generate(ids, **settings))


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])
@pytest.mark.parametrize("cached", [True, False])
def test_generate_decides_once_through_every_wrapper(adapter: str, task_type: str | None, cached: bool) -> None:
    """granularity='sequence': the routing of the prompt stays, whoever calls generate."""
    model = adapted(adapter=adapter, granularity="sequence", top_k=1, task_type=task_type).eval()
    ids = token_ids(batch=4)
    expected = ids
    for _ in range(5):
        lengths = torch.full((4,), ids.shape[1])
        expected = torch.cat([expected, model(input_ids=expected, prompt_lengths=lengths).logits[:, -1:].argmax(-1)], 1)
    settings = {"max_new_tokens": 5, "do_sample": False, "use_cache": cached}
    for caller in (model, model.get_base_model()):
        assert torch.equal(caller.generate(ids, **settings), expected)


def test_inputs_embeds(adapter: str) -> None:
    model = adapted(adapter=adapter).eval()
    ids = token_ids()
    with torch.no_grad():
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(embedded, logits(model))


def test_layers_to_transform(adapter: str) -> None:
    model = adapted(adapter=adapter, layers_to_transform=[1])
    assert {path.split(".layers.")[1][0] for path in layers_of(model)} == {"1"}
    train(model)
    routed = adapted(adapter=adapter, layers_to_route=[0])
    blocks = {path.split(".layers.")[1][0] for path, layer in layers_of(routed).items() if layer.routers}
    assert blocks == {"0"}
    assert len(layers_of(routed)) == 10
    train(routed)
