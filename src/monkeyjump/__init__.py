"""Routed parameter-efficient fine-tuning for Hugging Face models.

Importing the package makes PEFT know the method, now or when PEFT is imported; after that
`peft.get_peft_model(model, MonkeyJumpConfig(...))` and everything built on PEFT work as for LoRA.
"""

import importlib
from typing import TYPE_CHECKING, Any

from monkeyjump.import_hook import register_with_peft

if TYPE_CHECKING:
    from monkeyjump import methods
    from monkeyjump.config import MonkeyJumpConfig
    from monkeyjump.errors import ConfigError
    from monkeyjump.training.callbacks import MonkeyJumpCallback
    from monkeyjump.training.fast import fast
    from monkeyjump.tuner.centers.calibrate import initialize_centers
    from monkeyjump.tuner.count import count_parameters
    from monkeyjump.tuner.from_lora import from_lora, route
    from monkeyjump.tuner.knock_out import knock_out
    from monkeyjump.tuner.trace import record_routing
    from monkeyjump.tuner.training.optimizer_steps import allocate_ranks, balance_ranks, project_gradients

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "MonkeyJumpCallback",
    "MonkeyJumpConfig",
    "allocate_ranks",
    "balance_ranks",
    "count_parameters",
    "fast",
    "from_lora",
    "initialize_centers",
    "knock_out",
    "methods",
    "project_gradients",
    "record_routing",
    "route",
]

_HOMES = {
    "ConfigError": "errors",
    "MonkeyJumpCallback": "training.callbacks",
    "MonkeyJumpConfig": "config",
    "allocate_ranks": "tuner.training.optimizer_steps",
    "balance_ranks": "tuner.training.optimizer_steps",
    "count_parameters": "tuner.count",
    "fast": "training.fast",
    "from_lora": "tuner.from_lora",
    "initialize_centers": "tuner.centers.calibrate",
    "knock_out": "tuner.knock_out",
    "methods": "methods",
    "project_gradients": "tuner.training.optimizer_steps",
    "record_routing": "tuner.trace",
    "route": "tuner.from_lora",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'monkeyjump' has no attribute {name!r}")
    module = importlib.import_module(f"monkeyjump.{_HOMES[name]}")
    value = module if name == "methods" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_with_peft()
