"""Where feed-forward experts live: which targets belong to the feed-forward of a block, and which module that is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monkeyjump.tuner.placement import Block

_ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)


def in_attention(path: str, home: str) -> bool:
    """Whether a projection of block `home` belongs to its attention, by the names of the modules around it."""
    return bool(_ATTENTION.search(path.removeprefix(f"{home}.").rpartition(".")[0]))


def feed_forward_of(home: str, experts: list[str]) -> str | None:
    """Path of the module inside block `home` that holds all these projections; None where only the block does."""
    path = experts[0].rpartition(".")[0]
    while not all(expert.startswith(f"{path}.") for expert in experts):
        path = path.rpartition(".")[0]
    return path if path.startswith(f"{home}.") else None


def seen_from_feed_forward(block: Block, experts: list[str]) -> Block:
    """The block and its feed-forward; without a target there it has no experts, and its first target an idle router."""
    if experts:
        return replace(block, feed_forward=feed_forward_of(block.path, experts) or "")
    return replace(block, routed=(), names=(), host=block.routed[0])


def feed_forward_problem(home: str, experts: list[str]) -> list[str]:
    if not experts or feed_forward_of(home, experts) is not None:
        return []
    names = sorted({path.removeprefix(f"{home}.") for path in experts})
    return [
        f"placement='ffn' needs a feed-forward that is a module of its own, but {names} of block {home!r} have only "
        "the block in common: this architecture cannot carry whole feed-forward experts; use placement='projection', "
        "or put what is no feed-forward into shared_modules."
    ]
