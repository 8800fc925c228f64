"""Experts switched off for the forwards of one thread, to see what the model does without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from monkeyjump.errors import ConfigError
from monkeyjump.registry import did_you_mean
from monkeyjump.tuner.call import KnockedOut, running
from monkeyjump.tuner.model import require_context


@contextmanager
def knock_out(model: nn.Module, experts: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Inside the `with`, these experts have gate 0 in every forward of `model` that this thread runs.

    `experts` has the names of a trace: `{"3": ["q_proj"]}` switches off what q_proj adds in block 3. The gates of the
    others stay as they are. Nothing of the model is changed, so other threads do not notice.
    """
    context = require_context(model)
    known: dict[str, list[str]] = {}
    for router in context.routers():
        for adapter_name in router.names:
            for key, names in router.experts_by_key(adapter_name).items():
                known.setdefault(key, []).extend(names)
    problems = [
        f"block {block!r} routes nothing.{did_you_mean(str(block), list(known))} Blocks: {', '.join(known) or 'none'}."
        for block in experts
        if block not in known
    ]
    problems += [
        f"block {block!r} has no expert {name!r}. Its experts: {', '.join(dict.fromkeys(known[block]))}."
        for block, wanted in experts.items()
        for name in wanted
        if block in known and name not in known[block]
    ]
    if problems:
        raise ConfigError(problems, title="nothing to knock out")
    here = running()
    outer: KnockedOut | None = here.knocked_out.get(context)
    before = outer or {}
    here.knocked_out[context] = {
        block: frozenset(experts.get(block, ())) | before.get(block, frozenset()) for block in {*experts, *before}
    }
    try:
        yield
    finally:
        if outer is None:
            del here.knocked_out[context]
        else:
            here.knocked_out[context] = outer
