"""Rows of one batch with adapters of their own (`adapter_names`): each row is what its adapter gives it alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

import monkeyjump as mj
from tests.contract.common import anatomy
from tests.helpers import PAD, REORDERED, adapted, disturb, mj_config, padded, tiny_llama, token_ids
from tests.methods.common import config_of, spread
from tests.visual import batch as visual_batch
from tests.visual import qwen2_5_vl

BASE = "__base__"
ROWS = ["a", BASE, "b", "a"]
TASKS = torch.tensor([0, 1, 2, 1])
LENGTHS = (5, 8, 6, 7)
# what the two adapters of a model are; mixed kinds too
PAIRS: dict[str, tuple[mj.MonkeyJumpConfig, mj.MonkeyJumpConfig]] = {
    "token": (mj_config(), mj_config(top_k=1)),
    "sequence": (mj_config(granularity="sequence"), mj_config(granularity="sequence", sequence_token="mean")),
    "task": (mj_config(granularity="task"), mj_config(granularity="task", task_experts=[2, 0, 1])),
    "token and sequence": (mj_config(), mj_config(granularity="sequence")),
    "always on": (mj_config(layers_to_route=[]), mj_config(adapter="propulsion")),
    "different blocks": (mj_config(layers_to_transform=[0]), mj_config(layers_to_transform=[1], adapter="adalora")),
    **{method: (config_of(method), config_of("mjlora")) for method in ("hydralora", "moelora", "more")},
    "moa": (config_of("moa published"), config_of("moa published, after the norm")),
    "lime": (config_of("lime"), config_of("flylora")),
}


def pair(*configs: mj.MonkeyJumpConfig) -> PeftModel:
    model = get_peft_model(tiny_llama(2), configs[0], "a")
    assert isinstance(model, PeftModel)
    model.add_adapter("b", configs[1])
    model.set_adapter("b")
    disturb(model)
    spread(model)
    return model.eval()


def batch(side: str = "left") -> dict[str, torch.Tensor]:
    rows = [token_ids(1, length, seed=30 + i)[0] for i, length in enumerate(LENGTHS)]
    ids = padded(rows, side, max(LENGTHS))
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def alone(model: PeftModel, name: str, run: Any) -> Any:
    """What a run gives while this adapter, or none, is active for all rows."""
    if name == BASE:
        with model.disable_adapter():
            return run()
    before = model.active_adapter
    model.set_adapter(name)
    try:
        return run()
    finally:
        model.set_adapter(before)


@pytest.mark.filterwarnings("ignore:adapter .* routes by task")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", PAIRS)
@torch.no_grad()
def test_every_row_has_its_own_adapter(case: str, side: str) -> None:
    model, inputs = pair(*PAIRS[case]), batch(side)
    tasks = {"task_ids": TASKS} if case in ("task", "more") else {}
    mixed = model(**inputs, **tasks, adapter_names=ROWS).logits
    outputs = {name: alone(model, name, lambda: model(**inputs, **tasks).logits) for name in ("a", "b", BASE)}
    for row, name in enumerate(ROWS):
        real = inputs["attention_mask"][row].bool()
        torch.testing.assert_close(mixed[row][real], outputs[name][row][real], **REORDERED)
    assert not torch.allclose(outputs["a"], outputs["b"], atol=1e-2)
    assert not torch.allclose(outputs["a"], outputs[BASE], atol=1e-2)


@pytest.mark.filterwarnings("ignore:adapter .* routes by task")
@pytest.mark.parametrize("how", [{}, {"use_cache": False}, {"num_beams": 3}], ids=["cached", "uncached", "beams"])
@pytest.mark.parametrize("case", ["token", "sequence", "task", "token and sequence", "more", "moa"])
def test_generation(case: str, how: dict[str, Any]) -> None:
    model, inputs = pair(*PAIRS[case]), batch()
    tasks = {"task_ids": TASKS} if case == "task" else {}
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, **how}
    mixed = model.generate(**inputs, **tasks, **settings, adapter_names=ROWS)
    for row, name in enumerate(ROWS):
        own = {key: value[row : row + 1] for key, value in {**inputs, **tasks}.items()}
        expected = alone(model, name, lambda own=own: model.generate(**own, **settings))
        assert torch.equal(mixed[row], expected[0]), name


@torch.no_grad()
def test_one_adapter_for_all_rows() -> None:
    """Also of a kind that cannot share a batch with others; and of an adapter that is not the active one."""
    model, inputs = pair(config_of("mixlora published"), mj_config()), batch()
    for name in ("a", "b", BASE):
        expected = alone(model, name, lambda: model(**inputs).logits)
        assert torch.equal(model(**inputs, adapter_names=[name] * 4).logits, expected)
    assert model.active_adapter == "b"


@torch.no_grad()
def test_modules_trained_as_a_whole() -> None:
    model = pair(mj_config(modules_to_save=["lm_head"]), mj_config())
    head: Any = model.get_submodule("base_model.model.lm_head")
    head.modules_to_save["a"].weight.mul_(-1)
    inputs = batch()
    for active in ("a", "b"):
        model.set_adapter(active)
        mixed = model(**inputs, adapter_names=ROWS).logits
        for row, name in enumerate(ROWS):
            expected = alone(model, name, lambda: model(**inputs).logits)[row]
            torch.testing.assert_close(mixed[row], expected, **REORDERED)


@torch.no_grad()
def test_an_adapter_that_gives_no_numbers_stays_in_its_rows() -> None:
    model, inputs = pair(*PAIRS["moa"]), batch()
    expected = model(**inputs, adapter_names=ROWS).logits
    for path, tensor in model.named_parameters():
        if ".b." in path or path.endswith(".b"):
            tensor.fill_(torch.nan)
    found = model(**inputs, adapter_names=ROWS).logits
    others = [row for row, name in enumerate(ROWS) if name != "b"]
    assert torch.equal(found[others], expected[others])
    assert found[2].isnan().any()


def test_threads_with_different_mixtures() -> None:
    model, inputs = pair(*PAIRS["token and sequence"]), batch()
    mixtures = [ROWS, ["b", "a", BASE, BASE], None]

    def run(names: list[str] | None) -> torch.Tensor:
        return model.generate(**inputs, adapter_names=names, max_new_tokens=6, do_sample=False)

    expected = [run(names) for names in mixtures]
    wrong: list[Any] = []

    def repeat(turn: int) -> None:
        try:
            wrong.extend(turn for _ in range(8) if not torch.equal(run(mixtures[turn]), expected[turn]))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=repeat, args=(turn,)) for turn in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@torch.no_grad()
def test_nothing_is_left_behind() -> None:
    model, inputs = pair(mj_config(modules_to_save=["lm_head"]), mj_config()), batch()
    model.set_adapter("a")
    model.generate(**inputs, max_new_tokens=2)  # PEFT itself leaves something on the model
    before, expected = anatomy(model), model(**inputs).logits
    model(**inputs, adapter_names=ROWS)
    model.generate(**inputs, adapter_names=ROWS, max_new_tokens=2)
    with pytest.raises(mj.ConfigError):
        model(input_ids=inputs["input_ids"][:3], adapter_names=ROWS)
    assert anatomy(model) == before
    assert torch.equal(model(**inputs).logits, expected)


def test_what_is_refused() -> None:
    model, inputs = pair(*PAIRS["token"]), batch()
    with pytest.raises(mj.ConfigError, match=r"(?s)training mode.*: c\..*a, b"):
        model.train()(**inputs, adapter_names=["a", "c", "b", BASE])
    model.eval()
    for names in ("a", [0, 1, 2, 3]):
        with pytest.raises(mj.ConfigError, match="must be a list of adapter names"):
            model(**inputs, adapter_names=names)
    with pytest.raises(mj.ConfigError, match="got 3 and 4 respectively"):
        model(**inputs, adapter_names=["a", "b", "a"])
    for count in (2, 8, 12):  # names of beams are not asked for
        with pytest.raises(mj.ConfigError, match=f"got {count} and 4 respectively"):
            model.generate(**inputs, adapter_names=["a"] * count, num_beams=2, max_new_tokens=2)
    merged = pair(mj_config(layers_to_route=[]), mj_config(layers_to_route=[]))
    merged.merge_adapter()
    with pytest.raises(mj.ConfigError, match="unmerge_adapter"):
        merged(**inputs, adapter_names=ROWS)
    with pytest.raises(mj.ConfigError, match="whole feed-forwards"):
        pair(config_of("mixlora published"), mj_config())(**inputs, adapter_names=ROWS)


def test_adapters_disabled_is_the_base() -> None:
    model, inputs = pair(*PAIRS["token"]), batch()
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(**inputs, adapter_names=ROWS).logits, model(**inputs).logits)


def test_tasks_of_other_rows_are_not_read() -> None:
    """A task id that the other adapter does not know is no error in a row that is not its own."""
    model, inputs = pair(config_of("more", tasks=2), mj_config(granularity="task")), batch()
    with torch.no_grad():
        mixed = model(**inputs, task_ids=torch.tensor([1, 7, 7, 0]), adapter_names=ROWS).logits
        expected = alone(model, "a", lambda: model(**inputs, task_ids=torch.tensor([1, 0, 0, 0])).logits)
    torch.testing.assert_close(mixed[[0, 3]], expected[[0, 3]], **REORDERED)


def test_several_returned_sequences() -> None:
    model, inputs = pair(*PAIRS["sequence"]), batch()
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "num_beams": 2, "num_return_sequences": 2}
    mixed = model.generate(**inputs, adapter_names=ROWS, **how)
    expected = alone(model, "a", lambda: model.generate(**inputs, **how))
    assert torch.equal(mixed[[0, 1, 6, 7]], expected[[0, 1, 6, 7]])


def test_a_single_adapter_of_peft_is_of_one_kind() -> None:
    """PEFT holds one kind of adapter in a model: LoRA rows and routed rows cannot meet in a batch."""
    from peft import LoraConfig

    with pytest.raises(ValueError, match="different"):
        adapted().add_adapter("other", LoraConfig(target_modules=["q_proj"]))


@pytest.mark.slow
@torch.no_grad()
def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one adapter share passes over their input, though another adapter is active; mixed rows do not."""
    pytest.importorskip("triton")
    from monkeyjump.ops.dispatch import implementation
    from tests.tuner.sharing_models import DEVICE, spied_passes

    model = pair(*PAIRS["token"]).to(DEVICE)
    inputs = {name: tensor.to(DEVICE) for name, tensor in batch().items()}
    for names in (["a"] * 4, ROWS):
        expected = model(**inputs, adapter_names=names).logits
        with monkeypatch.context() as patch, implementation("triton"):
            passes = spied_passes(patch)
            found = model(**inputs, adapter_names=names).logits
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(found[real], expected[real], **REORDERED)
        assert passes == ([3, 1, 1] * 2 if names != ROWS else [1] * 20)  # two adapters on ten projections


@pytest.mark.parametrize("beams", [1, 3])
def test_an_encoder_has_a_row_where_its_decoder_has_beams(beams: int) -> None:
    sizes = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    settings: dict[str, Any] = {**sizes, "decoder_start_token_id": PAD, "initializer_factor": 3.0}
    torch.manual_seed(0)
    base = T5ForConditionalGeneration(T5Config(**settings))
    routed = {"target_modules": ["q", "k", "v"], "shared_modules": [], "task_type": "SEQ_2_SEQ_LM"}
    model = get_peft_model(base, mj_config(**routed, exclude_modules=".*EncDecAttention.*"), "a")
    assert isinstance(model, PeftModel)
    model.add_adapter("b", mj_config(**routed, granularity="sequence"))
    disturb(model)
    model.eval()
    ids, how = token_ids(4, 7), {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": beams}
    mixed = model.generate(input_ids=ids, adapter_names=ROWS, **how)
    for row, name in enumerate(ROWS):
        expected = alone(model, name, lambda row=row: model.generate(input_ids=ids[row : row + 1], **how))
        assert torch.equal(mixed[row], expected[0]), name


@torch.no_grad()
def test_rows_with_pictures() -> None:
    model = get_peft_model(qwen2_5_vl(), mj_config(), "a")
    assert isinstance(model, PeftModel)
    model.add_adapter("b", mj_config(granularity="sequence"))
    disturb(model)
    model.eval()
    inputs = visual_batch("qwen2_5_vl")
    for names in (["a", "b"], ["b", BASE]):
        mixed = model(**inputs, adapter_names=names).logits
        for row, name in enumerate(names):
            torch.testing.assert_close(mixed[row], alone(model, name, lambda: model(**inputs).logits)[row], **REORDERED)
    tower = mj_config(target_modules=r".*visual.*\.qkv", shared_modules=[], layers_to_route=[])
    model.add_adapter("tower", tower)
    with pytest.raises(mj.ConfigError, match="tower whose tokens belong to no row"):
        model(**inputs, adapter_names=["tower", "a"])
