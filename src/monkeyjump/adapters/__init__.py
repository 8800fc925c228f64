"""Adapters: each module defines what one expert adds to one linear."""

from monkeyjump.adapters.adalora import AdaLoraAdapter
from monkeyjump.adapters.base import ADAPTERS, Adapter, BaseLinear, Gate, register
from monkeyjump.adapters.dora import DoraAdapter
from monkeyjump.adapters.flylora import FlyLoraAdapter
from monkeyjump.adapters.ia3 import Ia3Adapter
from monkeyjump.adapters.lime import LimeAdapter
from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.adapters.lora_fa import LoraFaAdapter
from monkeyjump.adapters.propulsion import PropulsionAdapter
from monkeyjump.adapters.vera import VeraAdapter

__all__ = ["ADAPTERS", "Adapter", "BaseLinear", "Gate", "register"]
__all__ += [
    "AdaLoraAdapter",
    "DoraAdapter",
    "FlyLoraAdapter",
    "Ia3Adapter",
    "LimeAdapter",
    "LoraAdapter",
    "LoraFaAdapter",
]
__all__ += ["PropulsionAdapter", "VeraAdapter"]
