"""FSDP2 through Accelerate, in a plain loop and in a Trainer, and TRL's SFTTrainer on two ranks = one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from monkeyjump.training.callbacks import MonkeyJumpCallback
from tests.helpers import adapted, assert_same, lm_batch, tiny_llama
from tests.processes import free_port, in_new_processes
from tests.training.test_two_ranks import be_rank

STEPS, RATE = 3, 0.05


def build() -> Any:
    return adapted(tiny_llama(2), ema_interval=1).train()


class Rows(Dataset):
    """Four rows for each step, in an order that nobody shuffles."""

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # two ranks take turns with batches of two rows
        return {name: values[index % 4] for name, values in lm_batch(batch=4, seed=index // 4).items()}


def shard_on_cpu(accelerator: Any) -> None:
    """Switch FSDP2 on: Accelerate itself does so on accelerators only, and leaves it out without a word on a CPU."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="FULL_STATE_DICT",
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    assert accelerator.is_fsdp2


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class Sharding(InOrder):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        shard_on_cpu(self.accelerator)
        self.is_fsdp_enabled = True


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Everything of the adapter, gathered: trained tensors and routing state."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = {name: value.detach() for name, value in tensors if "monkeyjump_" in name}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def plain_loop(rank: int) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    shard_on_cpu(accelerator)
    model = build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(STEPS):
        batch = {name: values[2 * rank : 2 * rank + 2] for name, values in lm_batch(batch=4, seed=step).items()}
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def arguments(folder: str, rows: int, **changes: Any) -> dict[str, Any]:
    return {
        **{"output_dir": folder, "per_device_train_batch_size": rows, "max_steps": STEPS, "learning_rate": RATE},
        **{"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "use_cpu": True},
        **{"report_to": "none", "save_strategy": "no", "remove_unused_columns": False, "logging_steps": 1},
        **{"bf16": False, "disable_tqdm": True, "average_tokens_across_devices": True, **changes},
    }


def trainer(kind: type[Trainer], folder: str, rows: int) -> Any:
    made = kind(build(), TrainingArguments(**arguments(folder, rows)), train_dataset=Rows())
    made.add_callback(MonkeyJumpCallback(progress=False))
    made.train()
    return made.model_wrapped


def sft(folder: str, rows: int) -> Any:
    from datasets import Dataset as Table
    from trl import SFTConfig, SFTTrainer

    class Ordered(SFTTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    from tests.tasks.conftest import make_tokenizer

    rows_of = [{"input_ids": Rows()[i]["input_ids"].tolist()} for i in range(len(Rows()))]
    config = SFTConfig(
        **arguments(folder, rows, remove_unused_columns=True, gradient_checkpointing=False, max_length=8)
    )
    made = Ordered(build(), config, train_dataset=Table.from_list(rows_of), processing_class=make_tokenizer())
    made.add_callback(MonkeyJumpCallback(progress=False))
    made.train()
    return made.accelerator.unwrap_model(made.model_wrapped)


def worker(rank: int, port: int, folder: str) -> None:
    be_rank(rank, port)
    from accelerate.state import AcceleratorState

    found = {"loop": whole(plain_loop(rank))}
    AcceleratorState._reset_state()
    found["trainer"] = whole(trainer(Sharding, folder, rows=2))
    AcceleratorState._reset_state()
    found["sft"] = whole(sft(folder, rows=2))
    torch.save(found, Path(folder) / f"{rank}.pt")


def alone(rank: int, folder: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    found = {"trainer": whole(trainer(InOrder, folder, rows=4)), "sft": whole(sft(folder, rows=4))}
    torch.save(found, Path(folder) / "alone.pt")


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    in_new_processes(worker, free_port(), str(tmp_path), count=2)
    in_new_processes(alone, str(tmp_path))
    one, two, single = (torch.load(tmp_path / f"{name}.pt") for name in (0, 1, "alone"))
    for name, expected in (("loop", "trainer"), ("trainer", "trainer"), ("sft", "sft")):
        assert_same(one[name], two[name])
        assert_same(one[name], single[expected], rtol=1e-3, atol=1e-5)
