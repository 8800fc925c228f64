"""Make PEFT, and through it Transformers, know the method."""

from __future__ import annotations

from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils.peft_types import register_peft_method

from monkeyjump.config import PEFT_TYPE, MonkeyJumpConfig
from monkeyjump.tuner.model import MonkeyJumpModel


def register() -> None:
    """Register the method with PEFT. A second call in the same process changes nothing."""
    if PEFT_TYPE not in PEFT_TYPE_TO_TUNER_MAPPING:
        register_peft_method(name=PEFT_TYPE.value.lower(), config_cls=MonkeyJumpConfig, model_cls=MonkeyJumpModel)
