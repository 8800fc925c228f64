"""Every method by name."""

from monkeyjump.methods.presets import PRESETS, build, names

__all__ = ["PRESETS", "build", "names"]
