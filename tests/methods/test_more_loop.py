"""MoRE against a loop over the rows of a batch, written here: the chosen ranks, the task loss, the selector."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel

import monkeyjump as mj
from monkeyjump.routing.more_ranks import RankSelector, rank_weights
from tests.helpers import assert_same, gradients, layers_of, token_ids
from tests.methods.structures import adapted_more, batch_of, selectors


def loop_delta(x: torch.Tensor, adapter: Any, selector: RankSelector, task: int, config: mj.MonkeyJumpConfig) -> Any:
    """One row: the first j ranks, j the argmax, with the straight-through factor of the published description."""
    logits = selector.weight @ selector.tasks[task] + selector.bias
    p = torch.softmax(logits, 0)
    j = int(p.argmax())
    scale = rank_weights(config.r, config.more.rank_scale)
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
