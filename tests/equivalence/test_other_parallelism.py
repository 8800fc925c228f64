"""DeepSpeed's ZeRO, tensor-parallel and expert-parallel plans: training equals that of one process, or is refused."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import monkeyjump as mj
from monkeyjump.errors import ConfigError
from tests.helpers import (
    VOCAB,
    adapted,
    assert_same,
    centers,
    gradients,
    lm_batch,
    mj_config,
    routing_state,
    tiny_llama,
)
from tests.processes import free_port, in_new_processes, join_group
from tests.tiny_folder import save_tiny_model

STEPS = 3


def learned() -> Any:
    return get_peft_model(tiny_llama(2), mj.methods.build("moelora", task_type="CAUSAL_LM", dropout=0.0))


def test_zero3_refuses_learned_routers() -> None:
    """ZeRO-3 marks the parameters that it manages."""
    models: list[Any] = [learned(), adapted(tiny_llama(2))]
    for model in models:
        for parameter in model.parameters():
            parameter.ds_id = 0
    with pytest.raises(ConfigError, match=r"trains a router, which DeepSpeed's ZeRO stage 3"):
        models[0].train()(**lm_batch())
    models[0].eval()(**lm_batch())
    models[1].train()(**lm_batch())


def on_a_plan(rank: int, port: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM

    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    join_group(rank, port, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh)
    weight = model.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(
        ConfigError, match=r"10 target modules \('model.layers.0.self_attn.q_proj' first\) have weights"
    ):
        get_peft_model(model, mj_config())
    assert model.model.layers[0].self_attn.q_proj.weight is weight  # the model is as it was
    experts_on_a_plan(f"{folder}-experts")


def experts_on_a_plan(folder: str) -> None:
    """Adapters on attention, with the experts of the base spread over the ranks, train as in the whole model."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if "ep_size" not in inspect.signature(DistributedConfig).parameters:  # before Transformers 5.19
        return
    config = AutoConfig.from_pretrained(folder)
    # of the tensor-parallel rules only those that give way to expert parallelism: from 5.23 on there must be some
    config.base_model_tp_plan = {name: how for name, how in config.base_model_tp_plan.items() if "experts" in name}
    plan = DistributedConfig(tp_size=2, ep_size=2)
    spread = AutoModelForCausalLM.from_pretrained(folder, config=config, distributed_config=plan)
    assert hasattr(spread.model.layers[0].mlp.experts.down_proj, "device_mesh")
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    models: list[Any] = [spread, AutoModelForCausalLM.from_pretrained(folder)]
    for place, model in enumerate(models):
        models[place] = adapted(model, target_modules=attention, shared_modules=["o_proj"], ema_interval=1).train()
        for seed in range(2):  # the second forward moves the centres by what the first has staged
            models[place](**lm_batch(seed=seed)).loss.backward()
    assert_same(gradients(models[0]), gradients(models[1]), rtol=1e-3, atol=1e-5)
    assert_same(centers(models[0]), centers(models[1]), rtol=1e-4, atol=1e-5)


def test_tensor_parallel_targets_are_refused_and_expert_parallel_models_train(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, initializer_range=0.2)).save_pretrained(tmp_path / "tiny-experts")
    in_new_processes(on_a_plan, free_port(), str(save_tiny_model(tmp_path / "tiny")), count=2)


def train(model: Any, backward: Any, rows: slice) -> None:
    for step in range(STEPS):
        backward(model(**{name: values[rows] for name, values in lm_batch(batch=4, seed=step).items()}).loss)


def trained(model: Any) -> dict[str, torch.Tensor]:
    values = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    return values | routing_state(model)


def with_zero(rank: int, port: int, folder: str) -> None:
    import deepspeed

    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    join_group(rank, port, 2)
    found = {}
    for stage in (2, 3):
        model = adapted(tiny_llama(2), ema_interval=1).train()
        # DeepSpeed clips gradients at 1 unless it is told not to
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
        }
        settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)

        def backward(loss: torch.Tensor, engine: Any = engine) -> None:
            engine.backward(loss)
            engine.step()

        train(engine, backward, slice(2 * rank, 2 * rank + 2))
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            found[stage] = trained(model)
    torch.save(found, Path(folder) / f"{rank}.pt")


def test_zero_is_one_process(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    in_new_processes(with_zero, free_port(), str(tmp_path), count=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    model = adapted(tiny_llama(2), ema_interval=1).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train(model, backward, slice(0, 4))
    for stage in (2, 3):
        assert_same(one[stage], two[stage])
        assert_same(one[stage], trained(model), rtol=1e-4, atol=1e-5)
