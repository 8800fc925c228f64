"""Models that read pictures: adapters on the language blocks, kinds of tokens, and what all models must do."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor

import monkeyjump as mj
from monkeyjump.analysis.collect import collect
from monkeyjump.analysis.plots import plot_usage
from monkeyjump.evaluation.decode import Decoder
from monkeyjump.evaluation.forward import AnswerReader, evaluating
from monkeyjump.evaluation.jobs import Batch, Job
from monkeyjump.routing.granularity import balanced
from monkeyjump.tasks.media import Media
from monkeyjump.tasks.task import Example
from monkeyjump.training.features import Features
from monkeyjump.tuner.layer import MonkeyJumpLayer
from tests.helpers import REORDERED, assert_same, gradients
from tests.visual import IMAGE, MODELS, PLACES, VIDEO, batch, llava_onevision, pictures

OV = "llava_onevision"


def adapted(model: str = OV, **changes: Any) -> Any:
    """A model whose adapters do something, with centres from its own tokens."""
    settings: dict[str, Any] = {"init_tokens": 60, "dropout": 0.0, **changes}
    found = get_peft_model(MODELS[model](), mj.MonkeyJumpConfig(**settings))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if name.endswith(".B"):
                parameter.normal_(std=0.3)
    if settings.get("granularity") != "task":
        mj.initialize_centers(found, [batch(model, rows=4, seed=seed) for seed in range(4)], progress=False)
    return found


def answers(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with labels on its last four real tokens."""
    labels = torch.full_like(given["input_ids"], -100)
    for row, mask in enumerate(given["attention_mask"]):
        places = mask.nonzero().squeeze(1)[-4:]
        labels[row, places] = given["input_ids"][row, places]
    return {**given, "labels": labels}


@pytest.mark.parametrize("model", MODELS)
def test_a_step_saving_loading_and_generating(model: str, tmp_path: Path) -> None:
    trained = adapted(model)
    layers = {path for path, module in trained.named_modules() if isinstance(module, MonkeyJumpLayer)}
    assert len(layers) == 10
    assert all(".language_model." in path or ".text_model." in path for path in layers)  # names alone: language only
    given = batch(model)
    optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
    trained.train()
    first = trained(**answers(given)).loss
    first.backward()
    assert all(gradient.abs().sum() > 0 for name, gradient in gradients(trained).items() if "o_proj" in name)
    optimizer.step()
    assert trained(**answers(given)).loss < first
    trained.eval()
    trained.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(MODELS[model](), tmp_path)
    torch.testing.assert_close(loaded(**given).logits, trained(**given).logits, **REORDERED)
    prompt = batch(model, left=True)
    found = [m.generate(**prompt, max_new_tokens=4, do_sample=False, eos_token_id=None) for m in (trained, loaded)]
    assert torch.equal(*found)
    assert found[0].shape[1] == prompt["input_ids"].shape[1] + 4


def test_the_tower_is_adapted_where_it_is_named() -> None:
    """It has experts, centres and statistics of its own, of patches without a mask."""
    pattern = r".*(language_model|vision_tower).*layers\.\d+\.self_attn\.(q|k|v)_proj"
    model = adapted(target_modules=pattern, shared_modules=[], granularity="token")
    context = model.base_model.routing
    assert {blocks.tower for blocks in context.lists.values()} == {True, False}
    given = answers(batch(OV))
    with mj.record_routing(model) as trace:
        model.train()
        model(**given).loss.backward()
    tower = next(block for block in trace.blocks() if "vision_tower" in block)
    language = next(block for block in trace.blocks() if "language_model" in block)
    assert trace.gates(tower).shape == (4, 4, 3)  # two pictures, each whole and as one tile
    assert trace.mask(tower) is None
    assert trace.gates(language).shape == (*given["input_ids"].shape, 3)
    for path, layer in model.named_modules():
        if isinstance(layer, MonkeyJumpLayer):
            assert layer.monkeyjump_center["default"].shape == (32 if "vision_tower" in path else 64,)
    prompt = batch(OV, left=True)
    assert model.eval().generate(**prompt, max_new_tokens=3, do_sample=False).shape[0] == 2


def test_a_path_names_a_module_of_the_tower() -> None:
    name = "vision_tower.encoder.layers.1.self_attn.q_proj"
    model = get_peft_model(llava_onevision(), mj.MonkeyJumpConfig(target_modules=["q_proj", name], layers_to_route=[]))
    towers = [path for path, m in model.named_modules() if isinstance(m, MonkeyJumpLayer) and "vision_tower" in path]
    assert towers == [f"base_model.model.model.{name}"]


def test_as_many_tokens_of_each_kind() -> None:
    generator = torch.Generator().manual_seed(0)
    for kinds, share in itertools.product((2, 3), (0.5, 0.9, 1.0)):
        given = torch.where(torch.rand(4, 37, generator=generator) < share, 1, 0)
        given[:, 30:] = kinds - 1
        real = torch.rand(4, 37, generator=generator) < 0.8
        chosen = balanced(real, given)
        counts = [int((real & (given == kind)).sum()) for kind in range(3)]
        fewest = min(count for count in counts if count)
        assert not (chosen & ~real).any()
        for kind, count in enumerate(counts):
            assert int((chosen & (given == kind)).sum()) == (fewest if count else 0)
    assert torch.equal(balanced(real, torch.zeros_like(given)), real)  # one kind: all


def test_centres_start_from_and_follow_all_kinds_alike() -> None:
    """Rows of four words and twelve patches: as many patches as words are counted."""
    ids = torch.where(torch.arange(16) % 5 == 0, 50, IMAGE).expand(3, 16).contiguous()
    words, patches = int((ids != IMAGE).sum()), int((ids == IMAGE).sum())
    found, known = {}, dict[Any, Any]()  # what runs of one process share must not hide the setting
    for balance in (True, False):
        model: Any = get_peft_model(
            llava_onevision(), mj.MonkeyJumpConfig(init_tokens=40, balance_kinds=balance, top_k=1, ema_interval=1)
        )
        kept = mj.initialize_centers(model, [{"input_ids": ids}], progress=False, known=known).tokens_kept
        model.train()(input_ids=ids, labels=ids)
        layers = next(iter(model.base_model.routing.routers())).layers["default"]
        found[balance] = kept, sum(int(layer.monkeyjump_staged_count["default"]) for layer in layers)
    assert found == {True: (words + 40 // 2, 2 * words), False: (40, words + patches)}


def test_loads_by_kind() -> None:
    model, given = adapted(top_k=1), batch(OV)
    with mj.record_routing(model) as trace, torch.no_grad():
        model(**given)
    whole, text, image = (trace.load("0", kind=kind) for kind in ("", "text", "image"))
    real = given["attention_mask"].bool()
    tokens = [
        int(real.sum()),
        int((real & (given["input_ids"] != IMAGE)).sum()),
        int((given["input_ids"] == IMAGE).sum()),
    ]
    together = [(a * tokens[1] + b * tokens[2]) / tokens[0] for a, b in zip(text.share, image.share, strict=True)]
    assert whole.share == pytest.approx(together)
    assert trace.load("0", kind="video").share == [0, 0, 0]
    with pytest.raises(mj.ConfigError, match="kind='sound'"):
        trace.load("0", kind="sound")


def test_usage_by_kind_is_drawn_beside_the_tasks(tmp_path: Path) -> None:
    model = adapted(top_k=1)
    batches = {"one": [batch(OV)], "two": [batch(OV, seed=1), {"input_ids": torch.ones(1, 4).long()}]}
    found = collect(model, batches, sample=40)
    usage = found.usage
    patches = found.sample.kinds == 1
    assert torch.equal(patches, found.sample.token_ids == IMAGE)
    assert 0 < int(patches.sum()) < len(patches)
    assert usage.kinds is not None
    assert usage.kinds.tasks == ["text", "image"]
    with mj.record_routing(model) as trace, torch.no_grad():
        model(**batch(OV))
    image = [usage.kinds.loads["image"]["0"].share, trace.load("0", kind="image").share]
    with mj.record_routing(model) as trace, torch.no_grad():
        model(**batch(OV, seed=1))
    other = trace.load("0", kind="image").share
    assert image[0] == pytest.approx([(a + b) / 2 for a, b in zip(image[1], other, strict=True)])
    assert set(usage.to_dict()["kinds"]) == {"text", "image"}
    assert plot_usage(usage, tmp_path / "usage.png").stat().st_size > 10_000


class Shown:
    """Stands for `Pictures`: a medium is a number, and its pixels follow from it."""

    accepts: frozenset[str] = frozenset()
    frames, processor = 1, SimpleNamespace(image_processor="")

    def __init__(self, model: str) -> None:
        self.model = model

    def tensors(self, rows: list[list[Media]]) -> dict[str, Tensor]:
        found = [pictures(self.model, 1, int(media.content)) for row in rows for media in row]
        return {name: torch.cat([each[name] for each in found]) for name in found[0]}

    def kinds(self, ids: Tensor) -> dict[str, Tensor]:
        names = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}
        return {names[self.model]: (ids == IMAGE).int()} if self.model in names else {}


def jobs_of(model: str, mode: Any) -> list[Job]:
    """Prompts of several lengths with a picture, and answers of several tokens."""
    places, found = [IMAGE] * PLACES.get(model, 4), []
    for number, (before, after) in enumerate(((2, 3), (4, 9), (1, 6))):
        prompt = [*range(10, 10 + before), *places, *range(30, 30 + after)]
        answers = [[50 + number, 60, 2], [70, 2], [80, 81, 82, 2]]
        example = Example("", ("a", "b"), media=(Media("image", str(number).encode()),))
        found.append(Job(number, example, mode, prompt, answers[: 2 + number % 2], 0))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_scored_as_by_whole_forwards(model: str) -> None:
    """On the caches of their prompts, in one batch."""
    scored, shown, expected = adapted(model), Shown(model), []
    with evaluating(scored):
        found = AnswerReader(scored, 0, shown).answer_logprobs(Batch(jobs_of(model, "text"), 0))  # type: ignore[arg-type]
        for job in jobs_of(model, "text"):
            pixels = shown.tensors([list(job.example.media)])
            for answer in job.answers:
                ids = torch.tensor([job.prompt + answer])
                logits = scored(input_ids=ids, **pixels, **shown.kinds(ids)).logits[0, len(job.prompt) - 1 : -1]
                expected.append(float(logits.log_softmax(-1)[range(len(answer)), answer].sum()))
    assert found.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_generated_as_by_generate(model: str) -> None:
    answering, shown, jobs = adapted(model), Shown(model), jobs_of(model, "generate")
    with evaluating(answering):
        reader = AnswerReader(answering, 0, shown)  # type: ignore[arg-type]
        found = Decoder(reader, {999}).answers(Batch(jobs, 0))
        for job, row in zip(jobs, found, strict=True):
            ids = torch.tensor([job.prompt])
            given = {"input_ids": ids, **shown.tensors([list(job.example.media)]), **shown.kinds(ids)}
            alone = answering.generate(**given, max_new_tokens=len(row), do_sample=False, eos_token_id=None)
            assert row.tolist() == alone[0, len(job.prompt) :].tolist()


@pytest.mark.parametrize("model", MODELS)
def test_kept_features_give_the_same_logits(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONKEYJUMP_CACHE", str(tmp_path))
    adapted_model, rows = adapted(model), [[Media("image", b"3")], [Media("image", b"5")]]
    features = Features(adapted_model, Shown(model), model)  # type: ignore[arg-type]
    given = {**batch(model), **features.pictures.tensors(rows)}
    if model == "qwen3_vl":
        with pytest.raises(mj.ConfigError, match="puts features of its tower into several blocks"):
            features.remember(rows)
        return
    features.remember(rows)
    with torch.no_grad():
        expected = adapted_model(**given).logits
        with features.read():
            kept = {**given, **features.tensors(rows)}
            assert kept["pixel_values"].shape[-1] == 64
            found, again = adapted_model(**kept).logits, adapted_model(**given).logits
    torch.testing.assert_close(found, expected, **REORDERED)
    assert torch.equal(again, expected)
    assert torch.equal(adapted_model(**given).logits, expected)


@pytest.mark.parametrize("changes", [{}, {"granularity": "sequence"}, {"route_space": "centered"}])
def test_padding_may_be_on_either_side(changes: dict[str, Any]) -> None:
    model = adapted(**changes)
    right, left = batch(OV), batch(OV, left=True)
    with torch.no_grad():
        found = [model(**given).logits for given in (right, left)]
    for row in range(2):
        ends = [found[n][row][given["attention_mask"][row].bool()] for n, given in enumerate((right, left))]
        torch.testing.assert_close(*ends, **REORDERED)


def test_checkpointing_gives_the_same_gradients() -> None:
    found = []
    for checkpoint in (False, True):
        model = adapted().train()
        if checkpoint:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(**answers(batch(OV))).loss.backward()
        found.append(gradients(model))
    assert_same(*found, atol=1e-6, rtol=1e-5)


def test_cached_generation_is_generation_without_a_cache() -> None:
    model, prompt = adapted(), batch(OV, left=True)
    found = [model.generate(**prompt, max_new_tokens=5, do_sample=False, use_cache=use) for use in (True, False)]
    assert torch.equal(*found)


def test_an_answer_does_not_decide_its_own_routing() -> None:
    """Other answers, the same prompt and pictures: the same gates on all that comes before them."""
    model = adapted(granularity="sequence").train()
    given, gates = answers(batch(OV, words=12)), []
    for change in (0, 1):
        ids = torch.where(given["labels"] != -100, given["input_ids"] + change, given["input_ids"])
        with mj.record_routing(model) as trace, torch.no_grad():
            model(**{**given, "input_ids": ids})
        gates.append(trace.gates("1"))
    assert torch.equal(*gates)


def test_clips_are_a_kind_of_their_own() -> None:
    """Four frames of 2 x 2 patches, of which pooling leaves one each, and the end of the clip."""
    model = adapted()
    ids = torch.tensor([[5, 6, *[VIDEO] * 5, 7, 8, 9]])
    clip = torch.randn(1, 4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with mj.record_routing(model) as trace, torch.no_grad():
        logits = model(input_ids=ids, pixel_values_videos=clip).logits
        other = model(input_ids=ids, pixel_values_videos=clip + 1).logits
    assert not torch.equal(logits, other)
    loads = [trace.load("0", kind=kind) for kind in ("video", "image")]
    assert sum(loads[0].share) == pytest.approx(1)
    assert sum(loads[1].share) == 0
