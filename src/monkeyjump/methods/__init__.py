"""Every method by name."""

from monkeyjump.methods import mixlora, more  # noqa: F401  they register themselves
from monkeyjump.methods.presets import PRESETS, build, names

__all__ = ["PRESETS", "build", "names"]
