"""What one expert adds to one linear."""

from monkeyjump.adapters.adalora import AdaLoraAdapter
from monkeyjump.adapters.base import ADAPTERS, Adapter, Gate
from monkeyjump.adapters.lora import LoraAdapter
from monkeyjump.adapters.lora_fa import LoraFaAdapter
from monkeyjump.adapters.propulsion import PropulsionAdapter

__all__ = ["ADAPTERS", "AdaLoraAdapter", "Adapter", "Gate", "LoraAdapter", "LoraFaAdapter", "PropulsionAdapter"]
