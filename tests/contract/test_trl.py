# PEFT and Transformers type their models as unions of tensors and modules, and folders as str; tests look inside.
# mypy: disable-error-code="arg-type, attr-defined, call-overload, index, misc, operator, union-attr"
"""TRL's SFTTrainer with its defaults: gradient checkpointing on, a fused loss, packing and padding-free batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import monkeyjump as mj
from monkeyjump.adapters import AdaLoraAdapter
from monkeyjump.routing.learned import LearnedRouter
from tests.contract.common import centers_of, state_of
from tests.helpers import ADAPTER_NAMES, assert_same, mj_config, tiny_llama, wrap

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

WORDS = [f"w{i}" for i in range(90)]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def words(count: int, generator: torch.Generator) -> str:
    return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (count,), generator=generator))


def pairs(count: int = 16, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        lengths = torch.randint(2, 6, (2,), generator=generator)
        rows.append(
            {"prompt": words(int(lengths[0]), generator), "completion": " " + words(int(lengths[1]), generator)}
        )
    return datasets.Dataset.from_list(rows)


def texts(count: int = 16):
    generator = torch.Generator().manual_seed(1)
    return datasets.Dataset.from_list([{"text": words(6, generator)} for _ in range(count)])


def settings(folder: Path, **changes: Any):
    return trl.SFTConfig(
        **{
            "output_dir": str(folder),
            "max_steps": 5,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "max_length": 32,
            "dataloader_pin_memory": False,
            **changes,
        }
    )


def trainer(folder: Path, tokenizer, model, data, **changes: Any):
    return trl.SFTTrainer(
        model=model,
        args=settings(folder, **changes),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[mj.MonkeyJumpCallback(num_tokens=60, progress=False)],
    )


@pytest.mark.parametrize("adapter", ADAPTER_NAMES)
def test_defaults_train(adapter: str, tmp_path: Path, tokenizer) -> None:
    model = wrap(tiny_llama(), mj_config(adapter=adapter, center_init="kmeans", dropout=0.1))
    base = {k: v.clone() for k, v in model.state_dict().items() if "monkeyjump_" not in k}
    before = state_of(model)
    run = trainer(tmp_path, tokenizer, model, texts())
    assert run.args.gradient_checkpointing is True
    run.train()
    after = state_of(model)
    assert {int(v) for k, v in after.items() if "monkeyjump_step" in k} == {5}
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == {key for key in after if not (adapter == "lora_fa" and key.endswith(".A"))}
    assert_same({k: v for k, v in model.state_dict().items() if "monkeyjump_" not in k}, base)
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert len(losses) == 5
    assert all("router/load_entropy" in entry for entry in run.state.log_history if "loss" in entry)


def test_config_given_to_the_trainer(tmp_path: Path, tokenizer) -> None:
    """`peft_config=` lets TRL wrap the model itself."""
    run = trl.SFTTrainer(
        model=tiny_llama(),
        args=settings(tmp_path, max_steps=2),
        train_dataset=texts(),
        processing_class=tokenizer,
        peft_config=mj_config(center_init="kmeans"),
        callbacks=[mj.MonkeyJumpCallback(num_tokens=60, progress=False)],
    )
    run.train()
    assert {int(v) for k, v in state_of(run.model).items() if "monkeyjump_step" in k} == {2}


def test_checkpointing_on_is_off(tmp_path: Path, tokenizer) -> None:
    states = []
    for on in (False, True):
        torch.manual_seed(0)
        model = wrap(tiny_llama(), mj_config(center_init="kmeans"))
        trainer(tmp_path, tokenizer, model, texts(), gradient_checkpointing=on).train()
        states.append(state_of(model))
    assert_same(*states)


@pytest.mark.parametrize("padding_free", [False, True])
def test_prompt_end_reaches_the_router(padding_free: bool, tmp_path: Path, tokenizer) -> None:
    """Prompt and completion data: all tokens of a sequence follow its last prompt token, as if it stood alone."""
    model = wrap(tiny_llama(), mj_config(granularity="sequence", top_k=1, ema_stop=0))
    changes: dict[str, Any] = {"max_steps": 1, "gradient_checkpointing": False}
    if padding_free:
        changes |= {"padding_free": True, "max_length": None}
    run = trainer(tmp_path, tokenizer, model, pairs(count=4), **changes)
    loader = run.get_train_dataloader()
    batch = next(iter(loader))
    model.train()
    with mj.record_routing(model) as trace:
        run.compute_loss(model, dict(batch))
    gates = trace.gates("1")
    labels, ids = batch["labels"], batch["input_ids"]
    if padding_free:
        assert ids.shape[0] == 1
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        spans = [(0, a, b) for a, b in zip(starts, [*starts[1:], ids.shape[1]], strict=True)]
    else:
        spans = [(row, 0, int(batch["attention_mask"][row].sum())) for row in range(ids.shape[0])]
    assert len(spans) == 4
    for row, start, end in spans:
        prompt = int((labels[row, start:end] == -100).sum())
        assert 0 < prompt < end - start
        alone = {"input_ids": ids[row : row + 1, start : start + prompt]}
        model.eval()
        with mj.record_routing(model) as reference, torch.no_grad():
            model(**alone)  # the prompt by itself decides with its last token
        expected = reference.gates("1")[0, -1]
        torch.testing.assert_close(gates[row, start:end], expected.expand(end - start, -1), rtol=1e-4, atol=1e-5)
    assert len({tuple(gates[row, start].argmax(-1, keepdim=True).tolist()) for row, start, _ in spans}) > 1


@pytest.mark.parametrize("granularity", ["token", "sequence"])
@pytest.mark.parametrize("packed", ["padding_free", "packing"])
def test_packed_training(granularity: str, packed: str, tmp_path: Path, tokenizer) -> None:
    changes: dict[str, Any] = {"padding_free": True, "max_length": None}
    if packed == "packing":
        changes = {"packing": True, "max_length": 32}
    model = wrap(tiny_llama(), mj_config(granularity=granularity, center_init="kmeans"))
    before = state_of(model)
    run = trainer(tmp_path, tokenizer, model, pairs(count=64), max_steps=4, **changes)
    run.train()
    after = state_of(model)
    assert {int(v) for k, v in after.items() if "monkeyjump_step" in k} == {4}
    assert all(not torch.equal(after[key], before[key]) for key in centers_of(after))


def test_padding_free_is_padded(tmp_path: Path, tokenizer) -> None:
    """The same four sequences side by side or in one row: the same staged statistics."""
    staged = []
    for changes in ({}, {"padding_free": True, "max_length": None}):
        model = wrap(tiny_llama(), mj_config(granularity="sequence", ema_interval=1))
        run = trainer(tmp_path, tokenizer, model, pairs(count=4), max_steps=1, gradient_checkpointing=False, **changes)
        batch = next(iter(run.get_train_dataloader()))
        model.train()
        run.compute_loss(model, dict(batch))
        staged.append({k: v for k, v in state_of(model).items() if "staged" in k})
    for key, value in staged[0].items():
        torch.testing.assert_close(staged[1][key], value, rtol=1e-4, atol=1e-4)
    assert any(value.any() for value in staged[0].values())


def test_orthogonality_loss_reaches_the_optimiser(tmp_path: Path, tokenizer) -> None:
    """TRL makes its loss from log-probabilities and leaves the model's own loss aside, AdaLoRA's regulariser with it.

    At the first step the diagonal is zero, so nothing but the regulariser can move the factors, and one step of plain
    SGD moves them by exactly its gradient.
    """
    model = wrap(tiny_llama(), mj_config(adapter="adalora", r=3, orth_reg_weight=0.7))
    adapters = [module for module in model.modules() if isinstance(module, AdaLoraAdapter)]
    before = [(a.A.detach().clone(), a.B.detach().clone()) for a in adapters]
    loss = 0.7 * torch.stack([a.auxiliary_loss() for a in adapters]).mean()
    expected = torch.autograd.grad(loss, [tensor for a in adapters for tensor in (a.A, a.B)])
    run = trainer(
        tmp_path,
        tokenizer,
        model,
        texts(),
        max_steps=1,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    run.train()
    moved = [
        (old - new) / 0.1
        for a, olds in zip(adapters, before, strict=True)
        for old, new in zip(olds, (a.A, a.B), strict=True)
    ]
    for gradient, step in zip(expected, moved, strict=True):
        torch.testing.assert_close(step.detach(), gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_balance_loss_reaches_the_optimiser(accumulation: int, tmp_path: Path, tokenizer) -> None:
    """At the first step every B is zero, so nothing but the balance loss can move a learned router."""
    model = wrap(tiny_llama(), mj.methods.build("moelora", "mj_paper", dropout=0.0, aux_loss_weight=0.7))
    routers = [m for m in model.modules() if isinstance(m, LearnedRouter)]
    before = [router.weight.detach().clone() for router in routers]
    data = datasets.Dataset.from_list([{"text": "a b c d e f"}] * 8)  # every micro-batch is the same
    sgd = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    run = trainer(tmp_path, tokenizer, model, data, max_steps=1, gradient_accumulation_steps=accumulation, **sgd)
    batch = next(iter(run.get_train_dataloader()))
    loss = model.train()(**batch).loss
    expected = torch.autograd.grad(loss, [router.weight for router in routers])
    run.train()
    for router, old, gradient in zip(routers, before, expected, strict=True):
        assert gradient.any()
        torch.testing.assert_close((old - router.weight.detach()) / 0.1, gradient, rtol=1e-3, atol=1e-6)
    entry = next(entry for entry in run.state.log_history if "loss" in entry)
    assert entry["router/balance_loss"] > 0.9


@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_preference_training_with_the_base_as_reference(granularity: str, tmp_path: Path, tokenizer) -> None:
    """DPO switches the adapters off for its reference pass: one step is one count, checkpointing or not."""
    states = []
    generator = torch.Generator().manual_seed(2)
    data = datasets.Dataset.from_list(
        [{"prompt": words(4, generator), "chosen": words(3, generator), "rejected": words(3, generator)}] * 8
    )
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = wrap(tiny_llama(), mj_config(granularity=granularity))
        arguments = trl.DPOConfig(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            max_length=32,
            dataloader_pin_memory=False,
            gradient_checkpointing=checkpointing,
        )
        trl.DPOTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer).train()
        states.append(state_of(model))
    assert {int(v) for k, v in states[0].items() if "monkeyjump_step" in k} == {3}
    assert_same(*states)
