"""Adapters for programs that do not know this package: plain LoRA of PEFT, whole models, folders of Transformers."""

from monkeyjump.export.gates import Gates, constant_gates, mean_gates, task_names, why_not_exact
from monkeyjump.export.lora import save_lora
from monkeyjump.export.whole import push, save_for_transformers, save_merged

__all__ = ["Gates", "constant_gates", "mean_gates", "push", "save_for_transformers", "save_lora", "save_merged"]
__all__ += ["task_names", "why_not_exact"]
