"""Every method with the Triton kernels is the method with torch: loss, logits, gradients, statistics, generation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from monkeyjump.ops.dispatch import implementation
from monkeyjump.tuner.trace import record_routing
from tests.helpers import PAD, adapted, assert_same, gradients, lm_batch, padded, routing_state, tiny_llama, token_ids
from tests.methods.common import LOUD, METHODS, batch_for, moved

lora_kernels = pytest.importorskip("monkeyjump.ops.kernels.lora")
from monkeyjump.ops.kernels import lora_few_tokens as few_kernels  # noqa: E402
from monkeyjump.ops.kernels import propulsion as scale_kernels  # noqa: E402
from monkeyjump.ops.kernels import route as route_kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-5  # of logits of about 10, after a few blocks in fp32
KERNELS = {
    "down": lora_kernels,
    "up": lora_kernels,
    "at_once": few_kernels,
    "token_gates": route_kernels,
    "_add_sums": route_kernels,
    "scale": scale_kernels,
}
LOW_RANK = {"down", "up"}
WORK = {"at_once": LOW_RANK}  # of a launch that does what several others do
ROUTED = {"token_gates", "_add_sums"}
# what a training step of a method launches; a mixture of Propulsions is elementwise work beside its routers' logits
EXPECTED: dict[str, set[str]] = {
    "propulsion": {"scale"},
    "moe_propulsion": {"down"},
    "mjpropulsion": {"scale"} | ROUTED,
    **dict.fromkeys(("mjlora", "mjlorafa", "mjadalora"), LOW_RANK | ROUTED),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    called: Counter[str] = Counter()
    for name, module in KERNELS.items():
        original = getattr(module, name)

        def spy(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            called.update(WORK.get(_name, {_name}))
            return _original(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    return called


def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in batch.items()}


def padded_batch(method: str, seed: int) -> dict[str, torch.Tensor]:
    batch = batch_for(method, batch=2, length=5, seed=seed, prompt=2)
    batch["attention_mask"][0, :2] = 0
    return on_device(batch)


# methods with a second forward, whose gradients are compared
TWICE = ("lora", "hydralora", "moe_lora_fa", "mjlora", "mjlorafa", "mjadalora", "mjpropulsion")


def follows(method: str) -> dict[str, Any]:
    """Centres that follow every forward, so that every forward takes statistics."""
    return {"ema_interval": 1} if method.startswith("mj") else {}


def trained(method: str, choice: str) -> tuple[list[dict[str, torch.Tensor]], Any]:
    """Loss, logits of the real tokens and routing state of every forward, and the gradients of the last."""
    model = moved(method, **LOUD.get(method, {}), **follows(method)).to(DEVICE).train()
    history = []
    torch.manual_seed(3)
    with implementation(choice):
        for seed in range(2 if method in TWICE else 1):
            batch = padded_batch(method, seed)
            out = model(**batch)
            found = {"loss": out.loss.detach(), "logits": out.logits.detach()[batch["attention_mask"].bool()]}
            history.append({**found, **routing_state(model)})
        out.loss.backward()
    history[-1] |= gradients(model)
    return history, model


def seen(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor as errors of it are judged: with all of its name where it is one number, whose gradient may cancel."""
    if tensors[name].shape != (1,):
        return tensors[name].float()
    return torch.cat([value for key, value in tensors.items() if key.endswith(name.rpartition(".")[2])]).float()


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Within the tolerance of the largest entry of each tensor, as the orders of summation differ."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(seen(name, expected).abs().max()) if value.is_floating_point() else 0.0
        torch.testing.assert_close(
            found[name], value, rtol=TOLERANCE, atol=TOLERANCE * scale, msg=f"{{}} in {name}".format
        )


@pytest.mark.parametrize("method", [*(method for method in METHODS if method != "mola"), "mjlora_prompt", "lime"])
def test_triton_is_torch(method: str, launches: Counter[str]) -> None:
    expected, model = trained(method, "torch")
    assert not launches
    found, _ = trained(method, "triton")
    assert set(launches) == EXPECTED.get(method, LOW_RANK)
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b)
    # and all of it depends on the adapters, by far more than the tolerance
    batch = padded_batch(method, len(expected) - 1)
    real = batch["attention_mask"].bool()
    with implementation("torch"), model.disable_adapter(), torch.no_grad():
        without = model(**batch).logits[real]
    size = float(expected[-1]["logits"].abs().max())
    assert float((without - expected[-1]["logits"]).abs().max()) > 100 * TOLERANCE * size
    assert all(value.abs().max() > 0 for name, value in expected[-1].items() if "monkeyjump_adapter" in name)


def step(model: Any, method: str, autocast: bool) -> dict[str, torch.Tensor]:
    """Logits, gradients and what the centres follow, of the second of two steps, with masks."""
    torch.manual_seed(5)
    with implementation("triton"), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        for seed in range(2):
            model.zero_grad()
            out = model(**padded_batch(method, seed))
    out.loss.backward()
    return {"logits": out.logits.detach().float(), **gradients(model), **routing_state(model)}


# with every expert of a token, whose choice no rounding then changes
OURS = ("mjlora", "mjlorafa", "mjadalora", "mjpropulsion")
AUTOCAST = {**dict.fromkeys(OURS, 3), "moelora": 4, "hydralora": 4, "lime": None}  # method -> top_k


@pytest.mark.parametrize("method", ["mjlora", "mjadalora", "mjpropulsion", "moelora"])
def test_autocast_of_a_model_in_its_dtype_changes_nothing(method: str, launches: Counter[str]) -> None:
    """As a Trainer with bf16=True runs a model that was loaded in bf16."""
    plain, cast = (
        step(
            moved(method, tiny_llama(1), dropout=0.3, **follows(method)).to(DEVICE).to(torch.bfloat16).train(),
            *(method, autocast),
        )
        for autocast in (False, True)
    )
    assert set(launches) == EXPECTED.get(method, LOW_RANK)
    assert plain.keys() == cast.keys()
    for name, value in plain.items():
        assert torch.equal(cast[name], value), name


@pytest.mark.parametrize("method", AUTOCAST)
def test_autocast_of_a_model_in_fp32(method: str, launches: Counter[str]) -> None:
    """Kernels on what autocast has cast: as near to fp32 as torch, and with the dtypes that torch gives."""
    found = {}
    for name, choice, autocast in (("exact", "torch", False), ("torch", "torch", True), ("triton", "triton", True)):
        model = moved(method, top_k=AUTOCAST[method], **follows(method)).to(DEVICE).train()
        torch.manual_seed(3)  # of LiME's jitter
        with implementation(choice), torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
            out = model(**padded_batch(method, 0))
        out.loss.backward()
        found[name] = {"logits": out.logits.detach(), **gradients(model)}
        assert bool(launches) == (choice == "triton")
    assert EXPECTED.get(method, LOW_RANK) <= set(launches)
    for key in found["exact"]:
        assert found["triton"][key].dtype == found["torch"][key].dtype
        exact = seen(key, found["exact"])
        off = {name: float((seen(key, found[name]) - exact).norm()) for name in ("torch", "triton")}
        # the interpreter cuts off where a GPU rounds: up to two units of bf16, one way, where torch loses half of one;
        # LiME looks at its own outputs: with other roundings torch is two to four times nearer or farther, too
        cut, lost = (4, 2**-7) if DEVICE == "cpu" or method == "lime" else (1.5, 1e-3)
        assert off["triton"] <= cut * off["torch"] + lost * float(exact.norm()), key


@pytest.mark.parametrize(("method", "reentrant"), [("mjlora", True), ("mjlorafa", False), ("lora", False)])
def test_gradient_checkpointing_on_is_off(method: str, reentrant: bool) -> None:
    """At the first step already, with dropout, whose seed the recomputation draws again."""
    results = []
    for checkpointing in (False, True):
        model = moved(method, tiny_llama(1), dropout=0.3).to(DEVICE).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(7)
        with implementation("triton"):
            model(**padded_batch(method, 0)).loss.backward()
        results.append({**gradients(model), **routing_state(model)})
    assert_same(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_dropout_acts() -> None:
    """In training alone, and with another mask at every step."""
    model, batch = adapted(tiny_llama(1), dropout=0.5).to(DEVICE), padded_batch("mjlora", 0)
    with implementation("triton"), torch.no_grad():
        model.train()(**batch)  # from now on it is known who shares an input, and sums have one order
        torch.manual_seed(1)
        first, second = (model.train()(**batch).logits for _ in range(2))
        torch.manual_seed(1)
        again = model.train()(**batch).logits
        quiet = [model.eval()(**batch).logits for _ in range(2)]
    assert not torch.allclose(first, second, atol=1e-3)
    assert torch.equal(first, again)
    assert torch.equal(*quiet)


def test_cached_generation_is_uncached(launches: Counter[str]) -> None:
    """Prompts of several tokens, then one token at a time."""
    model = adapted(tiny_llama(1), temperature=0.2).to(DEVICE).eval()
    ids = padded([token_ids(1, length, seed=20 + length)[0] for length in (4, 6)], "left", 6).to(DEVICE)
    config = {"max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": PAD, "do_sample": False}
    found = {}
    for name, choice, cache in (("cached", "triton", True), ("uncached", "triton", False), ("torch", "torch", True)):
        with implementation(choice):
            out = model.generate(
                input_ids=ids,
                attention_mask=(ids != PAD).long(),
                generation_config=GenerationConfig(use_cache=cache, **config),
            )
        found[name] = out[:, ids.shape[1] :].tolist()
        assert launches["up"] > 0
    assert found["cached"] == found["uncached"] == found["torch"]
    assert len({token for row in found["cached"] for token in row}) > 2  # not one token over and over


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    """The model in low precision: kernels and torch are equally near to fp32."""
    batch = on_device(lm_batch(batch=2, length=7))
    logits = {}
    for name, choice, cast in (
        ("exact", "torch", torch.float32),
        ("torch", "torch", dtype),
        ("triton", "triton", dtype),
    ):
        model = adapted(tiny_llama(1), adapter="lora").to(DEVICE).to(cast).eval()
        with implementation(choice), torch.no_grad():
            logits[name] = model(**batch).logits.float()
    off = {
        name: float((logits[name] - logits["exact"]).norm() / logits["exact"].norm()) for name in ("torch", "triton")
    }
    cut = 4 if dtype == torch.bfloat16 and DEVICE == "cpu" else 1.5  # the interpreter cuts off where a GPU rounds
    assert 0 < off["triton"] < cut * off["torch"]
    assert off["torch"] < 0.1


@pytest.mark.parametrize("method", ["mjlora", "moe_lora_fa"])
def test_routing_is_recorded_as_it_happened(method: str) -> None:
    """At the first forward too: every router decides once, on its own input."""
    found = {}
    for choice in ("torch", "triton"):
        model = moved(method).to(DEVICE).eval()
        with implementation(choice), torch.no_grad(), record_routing(model) as trace:
            model(**padded_batch(method, 0))
        found[choice] = {
            f"{block} {name}": torch.as_tensor(value).cpu()
            for block in trace.blocks()
            for name, value in {"gates": trace.gates(block), **vars(trace.load(block))}.items()
            if name != "experts"
        }
    assert_same(found["triton"], found["torch"], rtol=1e-4, atol=1e-5)
