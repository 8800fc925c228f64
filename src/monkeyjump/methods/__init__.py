"""Every method by name."""

from monkeyjump.methods import baselines  # noqa: F401  they register themselves
from monkeyjump.methods.presets import (
    COMPARED,
    CONTROLS,
    OURS,
    PEERS,
    PRESETS,
    build,
    describe,
    names,
    overrides_of_each,
)

__all__ = ["COMPARED", "CONTROLS", "OURS", "PEERS", "PRESETS", "build", "describe", "names", "overrides_of_each"]
