"""Compiled training is the same training, in a known number of graphs, and never quietly something else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import PeftModel, get_peft_model
from torch._dynamo.backends.registry import lookup_backend

from monkeyjump import methods
from monkeyjump.errors import ConfigError
from monkeyjump.ops import dispatch
from monkeyjump.training.compile import compiled, compiled_parts
from tests.architectures.test_architectures import MODELS
from tests.helpers import COMPILING, adapted, assert_same, gradients, lm_batch, routing_state, tiny_llama, wrap

pytestmark = COMPILING
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


class Counted:
    """A backend that counts what it compiles and keeps the graphs."""

    def __init__(self, inner: str) -> None:
        self.inner: Any = lookup_backend(inner)
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)
        return self.inner(graph, inputs)


def small(layers: int, **settings: Any) -> PeftModel:
    base = tiny_llama(layers)
    base.config.use_cache = False  # as a run sets it
    few: dict[str, Any] = {
        "target_modules": ["q_proj", "k_proj", "gate_proj"],
        "shared_modules": ["gate_proj"],
    }  # quick to trace
    return adapted(base, ema_interval=1, **few, **settings).train()


def batch(length: int, seed: int, padded: bool = True) -> dict[str, torch.Tensor]:
    found = lm_batch(3, length, seed=seed)
    if padded:
        found["attention_mask"][0, -2:] = 0
        found["labels"][0, -2:] = -100
    return found


def steps(model: PeftModel, lengths: list[int], **how: Any) -> list[dict[str, torch.Tensor]]:
    """Gradients and routing state after each of some training steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    history = []
    for seed, length in enumerate(lengths):
        loss = model(**batch(length, seed, **how)).loss
        loss.backward()
        history.append({"loss": loss.detach(), **gradients(model), **routing_state(model)})
        optimizer.step()
        optimizer.zero_grad()
    return history


def compare(model: PeftModel, what: str, lengths: list[int], backend: Any) -> None:
    twin = copy.deepcopy(model)
    with compiled(model, what, shapes=len(set(lengths)), backend=backend):
        found = steps(model, lengths)
    for a, b in zip(found, steps(twin, lengths), strict=True):
        assert_same(a, b, **TOLERANCE)


# --- how many graphs ------------------------------------------------------------------------------------------------


def test_blocks_share_their_graphs_whatever_the_depth() -> None:
    """One for a shape, another where a batch has no padding and so no mask. The next model of the kind has them."""
    model, backend = small(4), Counted("eager")
    with compiled(model, "blocks", shapes=1, backend=backend) as report:
        steps(model, [8, 8, 8])
        assert report.graphs == len(backend.graphs) == 1
        steps(model, [8], padded=False)
        steps(model, [8, 8])
        assert report.graphs == 2
    assert report.seconds > 0
    assert str(report).startswith("2 graphs compiled in ")
    other = small(4)
    with compiled(other, "blocks", shapes=1, backend=backend) as report:
        steps(other, [8])
    assert (report.graphs, len(backend.graphs)) == (0, 2)


@pytest.mark.skipif(not (dispatch.HAS_TRITON and dispatch.interpreted()), reason="needs Triton's interpreter")
def test_learned_gates_do_not_tie_a_graph_to_a_length() -> None:
    """The projections that read one tensor compare the shapes of their gates, and the graph serves every length."""
    base = tiny_llama(1)
    base.config.use_cache = False
    model = get_peft_model(base, methods.build("hydralora", "mj_paper", target_modules=["q_proj", "k_proj"])).train()
    with dispatch.implementation("triton"), compiled(model, "blocks", shapes=3, backend="eager") as report:
        steps(model, [24, 40, 12])
    assert report.graphs == 1


def test_a_graph_for_each_shape_of_the_model() -> None:
    model, backend = small(1), Counted("eager")
    with compiled(model, "model", shapes=2, backend=backend) as report:
        steps(model, [8, 16, 8, 16, 8])
        steps(model, [8], padded=False)
    assert report.graphs == 2


def test_evaluation_and_calibration_inside_are_not_compiled() -> None:
    import monkeyjump as mj

    model, backend = small(1, center_init="kmeans"), Counted("eager")
    with compiled(model, "blocks", backend=backend):
        mj.initialize_centers(model, [lm_batch(4, 16, seed=s) for s in range(4)], num_tokens=64, progress=False)
        model.eval()
        for length in (5, 6, 7):
            model(**lm_batch(2, length))
            model.generate(lm_batch(2, length)["input_ids"], max_new_tokens=2, pad_token_id=0)
        with torch.no_grad():
            model.train()(**lm_batch(2, 9))
    assert backend.graphs == []


def test_blocks_of_every_kind_are_found() -> None:
    for name, count in {"llama": 2, "gpt2": 2, "t5": 4}.items():
        make, targets, shared, _ = MODELS[name]
        base = make()
        wrap(base, target_modules=targets, shared_modules=shared, granularity="sequence", task_type=None)
        assert len(compiled_parts(base, "blocks")) == count
        assert len(compiled_parts(base, "model")) == count // 2
    plain = tiny_llama(3)
    wrap(plain, layers_to_route=[], layers_to_transform=[1])
    assert compiled_parts(plain, "blocks") == list(plain.model.layers)
    assert compiled_parts(plain, "model") == [plain.model]
    with pytest.raises(ConfigError, match="finds no transformer block"):
        compiled_parts(tiny_llama(1), "blocks")


# --- the same numbers -----------------------------------------------------------------------------------------------


def test_compiled_blocks_equal_eager() -> None:
    compare(small(2), "blocks", [8, 8, 8], "aot_eager")


def test_a_compiled_model_equals_eager() -> None:
    compare(small(1), "model", [8, 8, 8], "aot_eager")


def test_gradient_checkpointing_of_compiled_blocks_equals_eager() -> None:
    """One graph runs forward and stages; the one that recomputes does not stage."""
    model = small(1)
    base: Any = model.get_base_model()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    backend = Counted("aot_eager")
    compare(model, "blocks", [8, 8, 8], backend)
    assert len(backend.graphs) == 2


def test_checkpointed_blocks_that_do_not_route_are_compiled_too() -> None:
    model = small(1, layers_to_route=[])
    base: Any = model.get_base_model()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    backend = Counted("aot_eager")
    compare(model, "blocks", [8, 8, 8], backend)
    assert backend.graphs


# --- never silently uncompiled --------------------------------------------------------------------------------------


def test_compiling_again_and_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monkeyjump.training.compile._VARIANTS", 1)
    model = small(1)
    with compiled(model, "blocks", shapes=1, backend="eager"):
        steps(model, [8, 12])
        with pytest.raises(ConfigError, match=r"again and again.*Set train\.compile=false"):
            steps(model, [16])
    with compiled(model, "blocks", shapes=1, backend="eager") as report:  # another run starts from nothing
        steps(model, [20, 24])
        assert report.graphs == 2


def test_code_that_cannot_be_traced_is_an_error() -> None:
    model = small(1)
    base: Any = model.get_base_model()
    handle = base.model.layers[0].mlp.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    refused = pytest.raises(ConfigError, match=r"LlamaDecoderLayer cannot be traced as one graph")
    with compiled(model, "blocks", backend="eager"), refused:
        steps(model, [8])
    handle.remove()
    assert base.model.layers[0]._compiled_call_impl is None
    steps(model, [8])


# --- CUDA graphs, as far as a CPU can tell --------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["blocks", "model"])
def test_what_a_forward_writes_has_a_fixed_address(what: str) -> None:
    """CUDA graphs are given up for a graph that writes into an input, unless torch knows that its address stays."""
    model = small(1)
    before = {name: buffer._version for name, buffer in model.named_buffers()}
    with compiled(model, what, backend="eager"):
        model(**batch(8, 0))
    written = {name: buffer for name, buffer in model.named_buffers() if buffer._version != before[name]}
    assert sum("staged_sum" in name for name in written) == 2
    assert sum("monkeyjump_center" in name for name in written) == 2
    if what == "blocks":  # the centres move in the hook of the model, which is not compiled then
        written = {name: buffer for name, buffer in written.items() if "staged" in name}
    assert all(getattr(buffer, "_dynamo_static_input_type", None) for buffer in written.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_on_a_gpu(what: str) -> None:
    """Inductor over accumulated micro-batches of changing shapes."""
    model = small(3).cuda()
    twin = copy.deepcopy(model)
    with compiled(model, what, shapes=2) as report:
        for seed, length in enumerate([24, 24, 32, 24, 32, 32, 24, 24, 32, 32]):
            given = {name: tensor.cuda() for name, tensor in batch(length, seed).items()}
            for one in (model, twin):
                one(**given).loss.backward()
            if seed % 2:
                assert_same(gradients(model), gradients(twin), rtol=1e-3, atol=1e-4)
                assert_same(routing_state(model), routing_state(twin), rtol=1e-3, atol=1e-4)
                for one in (model, twin):
                    one.zero_grad()
    assert report.graphs <= 4
