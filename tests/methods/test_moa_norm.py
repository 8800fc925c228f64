"""MoA's router on the block's input after its first norm: the gates it gives, on several architectures, and bad input.

That checkpointing, padding, generation, saving and compiling change nothing is tested with every method.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Olmo2Config, Olmo2ForCausalLM

import monkeyjump as mj
from tests.helpers import assert_same, gradients, layers_of, lm_batch, tiny_llama
from tests.methods.common import learned_routers, moved, spread
from tests.methods.test_structures_architectures import SIZES, made

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora experts": ("moa", {}),
    "all experts": ("moa published", {}),
    "softmax over projections": ("mjlora", {"router": "linear", "aux_loss_weight": 0.5}),
    "experts on projections": ("moelora", {"router_scope": "block"}),
}


def normed_by_hand(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Router of each block on the norm of what enters it."""
    found: dict[str, torch.Tensor] = {}
    blocks = model.get_base_model().model.layers

    def enter(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        key = str([*blocks].index(module))
        (router,) = learned_routers(module).values()
        h = args[0] if args else kwargs["hidden_states"]
        scale = (h.square().mean(-1, keepdim=True) + module.input_layernorm.variance_epsilon).rsqrt()
        found[key] = router(module.input_layernorm.weight * h * scale).gates

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_gates_are_those_of_the_normed_state(case: str) -> None:
    method, changes = CASES[case]
    base = tiny_llama()
    with torch.no_grad():
        for block in base.model.layers:
            block.input_layernorm.weight.uniform_(0.5, 2.0)  # a norm that does more than scale
    model = moved(method, copy.deepcopy(base), router_input="norm", **changes).eval()
    raw = moved(method, copy.deepcopy(base), **changes).eval()
    batch = lm_batch()
    with mj.record_routing(model) as trace, torch.no_grad():
        logits = model(**batch).logits
    expected = normed_by_hand(model, batch)
    assert list(expected) == trace.blocks() == ["0", "1"]
    for key, gates in expected.items():
        torch.testing.assert_close(trace.gates(key), gates, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not torch.allclose(raw(**batch).logits, logits, atol=1e-2)


def test_two_adapters_that_read_different_states() -> None:
    batch = lm_batch()
    with torch.no_grad():
        alone = [moved("moa", router_input=where).eval()(**batch).logits for where in ("block", "norm")]
    model = moved("moa")
    model.add_adapter("second", mj.methods.build("moa", "mj_paper", dropout=0.0, router_input="norm"))
    twin = moved("moa", router_input="norm").state_dict()
    model.load_state_dict({k.replace("default", "second"): v for k, v in twin.items()}, strict=False)
    with torch.no_grad():
        for name, expected in zip(("default", "second"), alone, strict=True):
            model.set_adapter(name)
            assert torch.equal(model.eval()(**batch).logits, expected)
    model.set_adapter("default")
    model.delete_adapter("second")
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, alone[0])


@pytest.mark.parametrize("name", ["phi3", "gemma2", "qwen3", "t5"])
def test_other_architectures(name: str) -> None:
    """The norm is found, and every router learns through it."""
    targets = {"phi3": ["qkv_proj", "o_proj"], "t5": ["wi_0", "wo"]}.get(name, ["q_proj", "o_proj"])
    settings: dict[str, Any] = {"extra_experts": [], "r": 2, "dropout": 0.0, "task_type": None}
    config = mj.methods.build("moa", router_input="norm", target_modules=targets, **settings)
    model: Any = get_peft_model(made(name), config)
    spread(model)
    for path, module in model.named_modules():
        if path.endswith(".monkeyjump_adapter.default"):
            torch.nn.init.normal_(module.B, std=0.3)
    model.train()(**lm_batch()).loss.backward()
    assert all(gradient.abs().sum() > 0 for gradient in gradients(model).values())


def test_gpt2_and_a_model_without_a_norm_on_the_input() -> None:
    settings: dict[str, Any] = {"extra_experts": [], "r": 2, "router_input": "norm", "router_hidden": None}
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None)
    )
    model: Any = get_peft_model(gpt2, mj.methods.build("moa", target_modules=["c_attn", "c_fc"], **settings))
    assert model(**lm_batch()).loss.isfinite()
    torch.manual_seed(0)
    olmo = Olmo2ForCausalLM(Olmo2Config(**SIZES))  # norms after attention and feed-forward only
    before = copy.deepcopy(olmo.state_dict())
    with pytest.raises(mj.ConfigError, match=r"needs a norm on the input of block 'model.layers.0'"):
        get_peft_model(olmo, mj.methods.build("moa", target_modules=["q_proj", "v_proj"], **settings))
    assert not layers_of(olmo)
    assert_same(before, olmo.state_dict())


@pytest.mark.parametrize(
    ("method", "settings"), [("mjlora", {}), ("moelora", {}), ("mixlora", {"layout": "ffn"}), ("more", {})]
)
def test_only_routers_that_a_block_has(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(
        mj.ConfigError,
        match=r"router_input='norm' (needs router='linear'|is for a learned router that a whole block has)",
    ):
        mj.methods.build(method, "mj_paper", router_input="norm", **settings)
    with pytest.raises(mj.ConfigError, match=r"choose one of block, norm|needs router='linear'"):
        mj.methods.build(method, "mj_paper", router_input="input", **settings)
