"""A model that FSDP shards over two processes = one process on the concatenated batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import monkeyjump as mj
from monkeyjump.ops.dispatch import HAS_TRITON, implementation, interpreted
from tests.helpers import (
    adapted,
    assert_same,
    disturb,
    gradients,
    layers_of,
    lm_batch,
    routing_state,
    tiny_llama,
    wrap,
)
from tests.processes import free_port, in_new_processes, join_group

STEPS = 2
# what is wrapped by itself, and the adapter: AdaLoRA's regulariser reads its tensors outside the forward
WRAPPED = {"blocks": (True, "lora"), "the whole alone": (False, "lora"), "regularised": (True, "adalora")}
# their routers run in hooks of blocks; the balance loss of a rank is that of its own tokens, so it is off
LEARNED = ("hydralora", "moelora", "mixlora", "moa")
WRAPPED |= {method: (True, method) for method in LEARNED}


def build(adapter: str) -> Any:
    if adapter in LEARNED:
        balance: dict[str, Any] = {"aux_loss_weight": 0.0} if adapter in ("moelora", "mixlora") else {}
        config = mj.methods.build(adapter, task_type="CAUSAL_LM", dropout=0.0, **balance)
        model: Any = wrap(tiny_llama(1), config)
        disturb(model)
        return model.train()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    settings: dict[str, Any] = {"target_modules": targets, "shared_modules": ["o_proj"], "ema_interval": 1}
    model = adapted(tiny_llama(1), adapter=adapter, **settings)
    disturb(model)
    return model.train()


def train(model: Any, rows: slice) -> None:
    for step in range(STEPS):
        model.zero_grad()
        model(**{key: value[rows] for key, value in lm_batch(batch=4, seed=step).items()}).loss.backward()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def left_behind(model: Any) -> int:
    """Bytes of whole parameters of the blocks that a rank still holds after a step, and weights put side by side."""
    from torch.distributed.fsdp import FSDPModule

    blocks = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    groups: list[Any] = [block._get_fsdp_state()._fsdp_param_group for block in blocks]
    held = sum(p._unsharded_param.untyped_storage().nbytes() for group in groups for p in group.fsdp_params)
    return held + sum(
        shared._packed is not None for layer in layers_of(model).values() for shared in layer.shared.values()
    )


def worker(rank: int, port: int, folder: str, choice: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join_group(rank, port, 2)
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for name, (blocks, adapter) in WRAPPED.items():
        model = build(adapter)
        for block in model.get_base_model().model.layers if blocks else []:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with implementation("torch" if adapter in LEARNED else choice):
            train(model, slice(2 * rank, 2 * rank + 2))
        grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        found[name] = {"gradients": grads, "routing": routing_state(model), "left behind": left_behind(model)}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_sharded_is_whole(tmp_path: Path) -> None:
    choice = "triton" if HAS_TRITON and interpreted() else "torch"
    in_new_processes(worker, free_port(), str(tmp_path), choice, count=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, (_, adapter) in WRAPPED.items():
        alone = build(adapter)
        with implementation("torch" if adapter in LEARNED else choice):
            train(alone, slice(0, 4))
        assert_same(one[name]["gradients"], two[name]["gradients"])
        assert_same(one[name]["routing"], two[name]["routing"])
        assert_same(one[name]["gradients"], gradients(alone), rtol=1e-3, atol=1e-5)
        assert_same(one[name]["routing"], routing_state(alone), rtol=1e-4, atol=1e-5)
        assert one[name]["left behind"] == two[name]["left behind"] == 0
