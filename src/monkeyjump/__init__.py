"""Routed parameter-efficient fine-tuning for Hugging Face models.

Importing the package makes PEFT know the method; after that `peft.get_peft_model(model, MonkeyJumpConfig(...))` and
everything built on PEFT work as for LoRA.
"""

from monkeyjump import methods
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.training.callbacks import MonkeyJumpCallback
from monkeyjump.tuner.allocation import allocate_ranks
from monkeyjump.tuner.calibrate import initialize_centers
from monkeyjump.tuner.count import count_parameters
from monkeyjump.tuner.register import register as _register
from monkeyjump.tuner.trace import record_routing

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "MonkeyJumpCallback",
    "MonkeyJumpConfig",
    "allocate_ranks",
    "count_parameters",
    "initialize_centers",
    "methods",
    "record_routing",
]

_register()
