"""A forward owns its gates, masks, task ids and seeds. No thread, recomputation, failure or other forward has them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import monkeyjump as mj
from tests.equivalence.thread_runs import CASES, built, run
from tests.helpers import (
    REORDERED,
    adapted,
    assert_same,
    centers,
    gradients,
    layers_of,
    lm_batch,
    routing_state,
    tiny_llama,
    token_ids,
)

METHODS: dict[str, Any] = {
    "token": lambda: adapted(tiny_llama(3), ema_interval=1, ema_momentum=0.2),
    "sequence": lambda: adapted(tiny_llama(3), ema_interval=1, ema_momentum=0.2, granularity="sequence"),
    "jitter": lambda: adapted(tiny_llama(3), ema_interval=1, jitter=0.5, dropout=0.3),
    "more": lambda: built("more"),
    "moa": lambda: built("moa"),
    "mixlora": lambda: built("mixlora"),
}


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Lengths change from step to step, so that memory is used again at other places."""
    batch = lm_batch(batch=2 + step % 2, length=6 + 2 * (step % 4), seed=step, prompt=2 + step % 3)
    batch["attention_mask"][0, : step % 3] = 0
    batch["task_ids"] = torch.arange(len(batch["input_ids"])) % 2
    return batch


def offloaded() -> Any:
    """Activations go elsewhere and come back in other memory, as with `save_on_cpu` on a GPU."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.numpy().copy(), torch.from_numpy)


@pytest.mark.parametrize("method", METHODS)
def test_offloaded_activations(method: str) -> None:
    """Twenty steps with gradient checkpointing and activation offloading equal twenty steps without."""
    results = []
    for offloads in (False, True):
        model = METHODS[method]().train()
        if offloads:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(2)
        found = []
        for step in range(20):
            model.zero_grad()
            if offloads:
                with offloaded():
                    loss = model(**batch_of(step)).loss
            else:
                loss = model(**batch_of(step)).loss
            loss.backward()
            found.append(gradients(model))
        results.append(found)
    for plain, other in zip(*results, strict=True):
        assert_same(other, plain, **REORDERED)  # what comes back lies in memory in another way


@pytest.mark.parametrize(
    ("method", "kind"),
    [*itertools.product(["token", "sequence"], ["reentrant", "non-reentrant", "wrapper"]), ("more", "non-reentrant")],
)
def test_many_forwards_before_a_backward(method: str, kind: str) -> None:
    """Twelve forwards, each of which moves the centres; every block is computed again as in its own forward."""
    results = []
    for checkpoints in (False, True):
        model = METHODS[method]().train()
        if checkpoints and kind == "wrapper":
            blocks = model.get_base_model().model.layers
            for index, block in enumerate(blocks):
                blocks[index] = checkpoint_wrapper(block)
        elif checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        model.enable_input_require_grads()
        losses = [model(**batch_of(step), use_cache=False).loss for step in range(12)]
        torch.stack(losses).sum().backward()
        results.append(gradients(model))
    names = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in results[1].items()}
    assert_same(names, results[0], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_that_cannot_be_followed_is_refused() -> None:
    """Nothing tells which forward such a recomputation repeats."""
    model = adapted(tiny_llama(1)).train()
    loss = checkpoint(lambda ids: model(input_ids=ids, labels=ids).loss, lm_batch()["input_ids"], use_reentrant=False)
    with pytest.raises(mj.ConfigError, match="gradient_checkpointing_enable"):
        loss.backward()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:adapter 'default' routes by task")
def test_threads(case: str) -> None:
    assert run(case, forwards=40, generations=3) == []


def fail_in_block(model: Any, error: BaseException) -> Any:
    def hook(*_: Any) -> None:
        raise error

    return model.get_base_model().model.layers[1].mlp.register_forward_hook(hook)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["raises", "Ctrl-C"])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_forward_that_does_not_finish_leaves_nothing(error: BaseException, when: int) -> None:
    """Afterwards the model goes on as if it had not been tried: centres, schedule, copies, task ids."""
    model, twin = (adapted(tiny_llama(3), ema_interval=2, adapter="adalora") for _ in range(2))
    for step in range(5):
        if step == when:
            handle = fail_in_block(model, error)
            with pytest.raises(type(error)):
                model(**batch_of(9))
            handle.remove()
            copied = copy.deepcopy(model)
            assert_same(centers(copied), centers(model))
        for one in (model, twin):
            one.train()
            one(**batch_of(step)).loss.backward()
        assert_same(centers(model), centers(twin))
        assert_same(gradients(model), gradients(twin))
    assert_same(routing_state(model), routing_state(twin))


def test_a_model_is_copied_after_an_interrupted_forward_with_router_losses() -> None:
    model = built("moelora", aux_loss_weight=0.5, dropout=0.0).train()
    handle = fail_in_block(model, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(**batch_of(0))
    handle.remove()
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one(**batch_of(1)).loss.backward()
    assert_same(gradients(twin), gradients(model))


def test_task_ids_of_an_interrupted_forward_are_forgotten() -> None:
    model = adapted(tiny_llama(2), granularity="task").eval()
    handle = fail_in_block(model, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model(**batch_of(0))
    handle.remove()
    batch = batch_of(0)
    del batch["task_ids"]
    with pytest.raises(mj.ConfigError, match="task_ids"):
        model(**batch)


@pytest.mark.parametrize("interval", [1, 2])
def test_a_forward_that_is_not_finite_moves_no_centre(interval: int) -> None:
    """The overflow may come in any block: those before it are not moved either."""
    model: Any = adapted(tiny_llama(3), ema_interval=interval).train()
    for step in range(4):
        model(**batch_of(step))
    broken = model.get_base_model().model.layers[1].register_forward_hook(lambda *args: args[-1] * torch.nan)
    for step in range(interval):
        model(**batch_of(step))
    broken.remove()
    before = centers(model)  # moved by what was staged before
    model(**batch_of(5))
    assert_same(centers(model), before)
    for step in range(4):
        model(**batch_of(step))
    assert all(torch.isfinite(center).all() for center in centers(model).values())
    assert any(not torch.equal(center, before[path]) for path, center in centers(model).items())


@pytest.mark.parametrize(("interval", "stop"), [(1, 3), (2, 100), (3, 6)])
def test_statistics_are_taken_only_for_a_commit(interval: int, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the interval and after `ema_stop` nothing is summed and nothing is sent to other ranks."""
    from monkeyjump.tuner.centers import schedule
    from monkeyjump.tuner.routers import centroid

    model = adapted(tiny_llama(2), ema_interval=interval, ema_stop=stop).train()
    step, summed, sent = 0, set(), set()
    plain = centroid.Staged

    def staged(*args: Any) -> Any:
        summed.add(step)
        return plain(*args)

    monkeypatch.setattr(centroid, "Staged", staged)
    monkeypatch.setattr(schedule, "over_ranks", lambda *_: sent.add(step))
    for step in range(1, 10):
        model(**batch_of(step))
    assert summed == sent == {n for n in range(1, 10) if n % interval == 0 and n <= stop}


@pytest.mark.filterwarnings("ignore:adapter 'default' routes by task")
@pytest.mark.parametrize("method", ["token", "sequence", "more"])
def test_a_prompt_in_parts(method: str) -> None:
    """Chunked prefill: token routing gives what one prefill gives; a decision by the end of the prompt is refused."""
    model, prompt = METHODS[method]().eval(), token_ids(2, 9)
    greedy = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    whole = model.generate(prompt, **greedy)
    if method == "token":
        assert torch.equal(model.generate(prompt, prefill_chunk_size=4, **greedy), whole)
        return
    with pytest.raises(mj.ConfigError, match="comes in parts"):
        model.generate(prompt, prefill_chunk_size=4, **greedy)
    assert torch.equal(model.generate(prompt, **greedy), whole)


@pytest.mark.parametrize("method", ["token", "sequence"])
def test_a_cache_carried_into_a_second_turn(method: str) -> None:
    model, first = METHODS[method]().eval(), token_ids(2, 6)
    greedy: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    turn = model.generate(first, attention_mask=torch.ones_like(first), return_dict_in_generate=True, **greedy)
    second = torch.cat([turn.sequences, token_ids(2, 4, seed=5)], 1)
    greedy["attention_mask"] = torch.ones_like(second)
    whole = model.generate(second, **greedy)
    if method == "token":
        assert torch.equal(model.generate(second, past_key_values=turn.past_key_values, **greedy), whole)
        return
    with pytest.raises(mj.ConfigError, match="whole conversation"):
        model.generate(second, past_key_values=turn.past_key_values, **greedy)


def test_several_tokens_after_a_cache_are_refused_outside_generate() -> None:
    model, ids = METHODS["sequence"]().eval(), token_ids(2, 8)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :5], use_cache=True).past_key_values
        model(input_ids=ids[:, 5:6], past_key_values=cache, use_cache=True)  # one token: the answer goes on
        with pytest.raises(mj.ConfigError, match="may belong to the prompt"):
            model(input_ids=ids[:, 6:], past_key_values=cache, use_cache=True)


def test_a_users_own_generate_is_called_and_given_back() -> None:
    base = tiny_llama(1)
    seen: list[str] = []

    def own(*args: Any, **kwargs: Any) -> Any:
        seen.append("own")
        return type(base).generate(base, *args, **kwargs)

    base.generate = own
    model = adapted(base, granularity="sequence").eval()
    model.generate(token_ids(1, 4), attention_mask=torch.ones(1, 4), max_new_tokens=2, do_sample=False)
    assert seen == ["own"]
    assert model.unload().generate is own
    later = adapted(tiny_llama(1)).get_base_model()
    later.generate = own  # given after the adapters were
    later_context = next(iter(layers_of(later).values())).context
    later_context.remove()
    assert later.generate is own


def test_packed_padding_is_not_recorded() -> None:
    model = adapted(tiny_llama(1)).eval()
    ids = token_ids(1, 8)
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, -1, -1, -1]])
    with torch.no_grad(), mj.record_routing(model) as trace:
        model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]]), seq_idx=seq_idx, use_cache=False)
    mask = trace.mask("0")
    assert mask is not None
    assert torch.equal(mask, seq_idx >= 0)
    real = trace.gates("0")[:, :5]
    assert trace.load("0").mean_gate == pytest.approx(real.mean((0, 1)).tolist())
