"""What the compiled modes have in common: the parts there are to compile, how often torch may, and how often it did."""

from __future__ import annotations

PARTS = ("blocks", "model")


def allow_graphs(blocks: int) -> None:
    """The blocks share one code object, and each may need a graph of its own."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(64, 8 * blocks)
    torch._dynamo.config.accumulated_recompile_limit = 16 * torch._dynamo.config.recompile_limit


def graphs() -> int:
    """How many graphs the compiler has made so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
