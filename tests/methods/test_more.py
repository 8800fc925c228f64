"""MoRE: nested ranks chosen by task. The fused form against a loop over rows, and the promises every method keeps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel, get_peft_model
from transformers import GenerationConfig

import monkeyjump as mj
from monkeyjump.routing.ranks import RankSelector, rank_weights
from tests.helpers import (
    PAD,
    assert_same,
    disturb,
    gradients,
    layers_of,
    lm_batch,
    padded,
    tiny_llama,
    token_ids,
    wrap,
)
from tests.tuner.test_count import ATTENTION, qwen2_half_billion

TASKS = 3


def more(**changes: Any) -> mj.MonkeyJumpConfig:
    settings = {"target_modules": list(ATTENTION), "r": 4, "alpha": 4.0, "dropout": 0.0, "tasks": TASKS, **changes}
    return mj.methods.build("more", **settings)


def selectors(model: torch.nn.Module) -> dict[str, RankSelector]:
    return {path: module for path, module in model.named_modules() if isinstance(module, RankSelector)}


@torch.no_grad()
def spread(model: torch.nn.Module, seed: int = 3) -> None:
    """Selectors with decided, different choices."""
    for path, selector in selectors(model).items():
        generator = torch.Generator().manual_seed(seed + sum(map(ord, path)))
        for parameter in selector.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def adapted_more(base: Any = None, **changes: Any) -> PeftModel:
    model = wrap(base if base is not None else tiny_llama(), more(**changes))
    disturb(model)
    spread(model)
    return model


def batch_of(tasks: list[int], **kwargs: Any) -> dict[str, torch.Tensor]:
    return {**lm_batch(len(tasks), **kwargs), "task_ids": torch.tensor(tasks)}


@pytest.mark.parametrize(("r", "expected"), [(2, 1_130_688), (4, 1_573_248), (8, 2_458_368)])
def test_golden_counts(r: int, expected: int) -> None:
    config = mj.methods.build("more", r=r, target_modules=ATTENTION, tasks=8)
    with torch.device("meta"):
        model = get_peft_model(qwen2_half_billion(), config)
    count = mj.count_parameters(model)
    assert count.trainable == expected
    assert count.router == 24 * sum(d * r + r + 8 * d for d in [896] * 4)


def test_identity_at_the_start() -> None:
    batch = batch_of([0, 1, 2])
    base = tiny_llama()
    expected = base(input_ids=batch["input_ids"]).logits
    model = wrap(tiny_llama(), more())
    assert torch.equal(model(**batch).logits, expected)


# --- the same thing as a loop over the rows of the batch -------------------------------------------------------------


def loop_delta(x: torch.Tensor, adapter: Any, selector: RankSelector, task: int, config: mj.MonkeyJumpConfig) -> Any:
    """One row: the first j ranks, j the argmax, with the straight-through factor of the published description."""
    logits = selector.weight @ selector.tasks[task] + selector.bias
    p = torch.softmax(logits, 0)
    j = int(p.argmax())
    scale = rank_weights(config.r, config.rank_scale)
    delta = torch.zeros(*x.shape[:-1], adapter.B.shape[0], dtype=x.dtype)
    for expert in range(config.r):
        one_hot = float(expert == j) + p[expert] - p[expert].detach()
        for i in range(expert + 1):
            rank = (x @ adapter.A[i]).unsqueeze(-1) * adapter.B[:, i]
            delta = delta + one_hot * scale[i] * rank
    return config.alpha / config.r * delta


def looped_copy(model: PeftModel, task_of: Any) -> PeftModel:
    """A deep copy whose projections go through the rows one by one; `task_of` is a list, or a function of the row."""
    other = copy.deepcopy(model)
    config = other.peft_config["default"]
    for layer in layers_of(other).values():
        adapter, selector = layer.monkeyjump_adapter["default"], layer.monkeyjump_router["default"]

        def forward(x: torch.Tensor, layer: Any = layer, adapter: Any = adapter, selector: Any = selector) -> Any:
            tasks = [task_of(row, selector) for row in x] if callable(task_of) else task_of
            rows = [loop_delta(row, adapter, selector, task, config) for row, task in zip(x, tasks, strict=True)]  # type: ignore[arg-type]
            return layer.base_layer(x) + torch.stack(rows)

        layer.forward = forward  # type: ignore[method-assign]
    return other


@pytest.mark.parametrize("rank_scale", ["code", "linear", "none"])
def test_fused_equals_a_loop(rank_scale: str) -> None:
    """Whole model: logits and every gradient, on a batch that mixes tasks."""
    tasks = [2, 0, 1, 2]
    batch = batch_of(tasks)
    fused = adapted_more(rank_scale=rank_scale, contrastive_weight=0.0).double().train()
    looped = looped_copy(fused, tasks)
    found, expected = fused(**batch), looped(**batch)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-9, atol=1e-9)
    found.loss.backward()
    expected.loss.backward()
    # the loop makes the graph of the rows of one task only; what no row uses has no gradient there, and a zero here
    zero = {name: torch.zeros_like(p) for name, p in looped.named_parameters() if p.requires_grad}
    looped_gradients = {**zero, **{n: p.grad for n, p in looped.named_parameters() if p.grad is not None}}
    assert_same(gradients(fused), looped_gradients, rtol=1e-8, atol=1e-10)
    chosen = {rank for s in selectors(fused).values() for rank in s.ranks().tolist()}
    assert len(chosen) > 1  # several ranks are in use, or this proves little


def test_rank_weights() -> None:
    assert rank_weights(8, "code").tolist() == [(i / 8) ** 2 for i in range(1, 9)]
    assert rank_weights(4, "linear").tolist() == [0.25, 0.5, 0.75, 1.0]
    assert rank_weights(4, "none").tolist() == [1.0] * 4


def test_mixed_batch_equals_single_tasks() -> None:
    model = adapted_more().eval()
    batch = batch_of([1, 0, 2])
    together = model(**batch).logits
    for row in range(3):
        alone = model(**{key: value[row : row + 1] for key, value in batch.items()}).logits
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-5)
    swapped = model(**{**batch, "task_ids": torch.tensor([0, 1, 2])}).logits
    assert not torch.allclose(together[0], swapped[0], atol=1e-3)
    assert torch.equal(together[2], swapped[2])


def test_packed_rows_take_one_task_per_sequence() -> None:
    model = adapted_more(tiny_llama(attn_implementation="eager"), contrastive_weight=0.0).eval()
    ids, tasks = token_ids(2, 5), torch.tensor([2, 0])
    packed = {"input_ids": ids.reshape(1, -1), "position_ids": torch.arange(5).repeat(1, 2)}
    seq_idx = torch.arange(2).repeat_interleave(5)[None].int()
    logits = model(**packed, seq_idx=seq_idx, task_ids=tasks, use_cache=False).logits.reshape(2, 5, -1)
    torch.testing.assert_close(logits, model(input_ids=ids, task_ids=tasks).logits, rtol=1e-4, atol=1e-4)
    with_loss = adapted_more(contrastive_weight=0.1).train()
    with pytest.raises(mj.ConfigError, match="do not pack"):
        with_loss(**packed, seq_idx=seq_idx, task_ids=tasks, labels=packed["input_ids"])


def test_task_loss_equals_its_definition() -> None:
    """Mean over projections of the cross-entropy of cos(h, e_k) / 0.05, h the mean over the real prompt tokens."""
    batch = batch_of([1, 0, 2])
    batch["attention_mask"][0, :3] = 0
    batch["labels"][0, :3] = -100
    plain = adapted_more(contrastive_weight=0.0).train()
    model = adapted_more(contrastive_weight=0.1).train()
    inputs: dict[str, torch.Tensor] = {}
    for path, layer in layers_of(model).items():
        layer.register_forward_pre_hook(lambda _, args, path=path: inputs.__setitem__(path, args[0]))
    loss, without = model(**batch).loss, plain(**batch).loss
    prompt = batch["attention_mask"].bool() & (batch["labels"] == -100)
    terms = []
    for path, layer in layers_of(model).items():
        rows = []
        for row in range(3):
            h = inputs[path][row][prompt[row]].mean(0)
            cosines = F.cosine_similarity(h[None], selectors(layer)["monkeyjump_router.default"].tasks)
            rows.append(F.cross_entropy(cosines / 0.05, batch["task_ids"][row]))
        terms.append(torch.stack(rows).mean())
    torch.testing.assert_close(loss - without, 0.1 * torch.stack(terms).mean(), rtol=1e-4, atol=1e-5)


def test_the_selector_trains() -> None:
    """Its gradient is not zero once B is not, and the chosen ranks can change; both need the straight-through step."""
    model = adapted_more(contrastive_weight=0.0).train()
    model(**batch_of([0, 1, 2])).loss.backward()
    for name, gradient in gradients(model).items():
        assert gradient.abs().sum() > 0, name
    before = {path: s.ranks().tolist() for path, s in selectors(model).items()}
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "monkeyjump_router" in n], lr=3.0)
    optimizer.zero_grad()
    for step in range(10):
        model(**batch_of([0, 1, 2], seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before != {path: s.ranks().tolist() for path, s in selectors(model).items()}


def test_padding_changes_nothing() -> None:
    model = adapted_more().eval()
    rows = [token_ids(1, n, seed=n)[0] for n in (4, 6)]
    for side in ("left", "right"):
        ids = padded(rows, side, 9)
        mask = (ids != PAD).long()
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        tasks = torch.tensor([2, 1])
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, task_ids=tasks).logits
        for i, row in enumerate(rows):
            alone = model(input_ids=row[None], task_ids=tasks[i : i + 1]).logits[0]
            torch.testing.assert_close(logits[i][mask[i].bool()], alone, rtol=1e-4, atol=1e-4)


def test_padding_does_not_enter_the_task_loss() -> None:
    losses = []
    for width in (8, 11):
        model = adapted_more(contrastive_weight=0.1).train()
        ids = padded([token_ids(1, 8, seed=4)[0]], "left", width)
        mask = (ids != PAD).long()
        labels = ids.clone()
        labels[:, : width - 4] = -100
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        out = model(
            input_ids=ids, attention_mask=mask, labels=labels, position_ids=positions, task_ids=torch.tensor([1])
        )
        losses.append(out.loss)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*use_cache=True.*")
def test_checkpointing_on_equals_off() -> None:
    found = []
    for checkpointing in (False, True):
        model = adapted_more(contrastive_weight=0.1).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = [model(**batch_of([0, 1, 2], seed=1)).loss, model(**batch_of([2, 2, 0], seed=2, prompt=2)).loss]
        (losses[0] - 0.5 * losses[1]).backward()  # the first is recomputed after the second forward
        found.append(gradients(model))
    assert_same(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_saved_equals_loaded(tmp_path: Path) -> None:
    model = adapted_more().eval()
    batch = batch_of([2, 1, 0])
    model.save_pretrained(str(tmp_path))
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, again(**batch).logits)
    assert_same(dict(model.state_dict()), dict(again.state_dict()))


@pytest.mark.parametrize("how", [{"num_beams": 1}, {"num_beams": 2}], ids=["greedy", "beam"])
@pytest.mark.parametrize("told", [True, False], ids=["task ids", "nearest task"])
@pytest.mark.filterwarnings("ignore:.*routes by task but got no.*")
@pytest.mark.parametrize("task_rep", ["mean", "prompt", "first"])
def test_cached_equals_uncached_generation(how: dict[str, int], told: bool, task_rep: str) -> None:
    model = adapted_more(task_rep=task_rep).eval()
    ids = padded([token_ids(1, n, seed=n)[0] for n in (4, 6)], "left", 7)
    extra = {"task_ids": torch.tensor([2, 0])} if told else {}
    results = []
    for cache in (True, False):
        config = GenerationConfig(max_new_tokens=5, min_new_tokens=5, pad_token_id=PAD, use_cache=cache, **how)
        results.append(
            model.generate(input_ids=ids, attention_mask=(ids != PAD).long(), generation_config=config, **extra)
        )
    assert torch.equal(*results)


def test_without_ids_the_nearest_task_decides_and_says_so_once() -> None:
    model = adapted_more().eval()
    ids = token_ids(2, 6)
    with pytest.warns(UserWarning, match="got no `task_ids`"):
        guessed = model(input_ids=ids).logits
    assert torch.equal(model(input_ids=ids).logits, guessed)  # a second warning would be an error here
    looped = looped_copy(
        model, lambda row, selector: int(F.cosine_similarity(row.mean(0)[None], selector.tasks).argmax())
    )
    torch.testing.assert_close(guessed, looped(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_deepcopy_and_unload_leave_nothing_behind() -> None:
    base = tiny_llama()
    batch = batch_of([0, 1, 2])
    before = base(input_ids=batch["input_ids"]).logits
    model = adapted_more(base).eval()
    expected = model(**batch).logits
    other = copy.deepcopy(model)
    spread(other, seed=50)
    assert not torch.equal(other(**batch).logits, expected)
    assert torch.equal(model(**batch).logits, expected)
    plain = model.unload()
    assert torch.equal(plain(input_ids=batch["input_ids"]).logits, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())


def test_bad_input() -> None:
    model = adapted_more().train()
    with pytest.raises(mj.ConfigError, match="needs `task_ids` in training"):
        model(**lm_batch())
    with pytest.raises(mj.ConfigError, match=r"must lie in 0..2"):
        model(**batch_of([0, 1, 3]))
    with pytest.raises(mj.ConfigError, match="2 entries for a batch of 3 rows"):
        model(**{**lm_batch(3), "task_ids": torch.tensor([0, 1])})
    with pytest.raises(mj.ConfigError, match="has no ranks"):
        more(adapter="propulsion")
    with pytest.raises(mj.ConfigError, match="task_width=8"):
        more(task_width=8, contrastive_weight=0.1)
    narrow = adapted_more(task_width=8, contrastive_weight=0.0).eval()
    with pytest.raises(mj.ConfigError, match="pass task_ids"):
        narrow(input_ids=token_ids())
    assert narrow(**batch_of([0, 1, 2])).loss.isfinite()


def test_half_precision_keeps_selectors_in_fp32() -> None:
    model = adapted_more(tiny_llama().bfloat16()).to(torch.bfloat16).eval()
    assert all(p.dtype == torch.float32 for s in selectors(model).values() for p in s.parameters())
    assert model(**batch_of([0, 1, 2])).logits.dtype == torch.bfloat16
