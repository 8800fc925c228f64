"""What hangs on a projection: its adapter, which may hold several experts, and the learned router it may carry."""

from __future__ import annotations

from torch import nn

from monkeyjump.adapters import ADAPTERS, Adapter
from monkeyjump.adapters.base import BaseLinear
from monkeyjump.adapters.mixture import mixture_of
from monkeyjump.adapters.parallel import ParallelBottleneck
from monkeyjump.adapters.prompt import AttentionPrompt
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.routing.learned import LearnedRouter
from monkeyjump.routing.more_ranks import RankSelector
from monkeyjump.tuner.placement import Role
from monkeyjump.tuner.routers.moa_placement import Extra


def new_adapter(config: MonkeyJumpConfig, role: Role | None, linear: BaseLinear) -> Adapter:
    """One expert, or all experts of a projection in one adapter; one that is always on (no role) is a plain one."""
    if role is not None and not role.plain and config.placement in ("projection", "ffn"):
        return mixture_of(config, linear, role.experts)
    return ADAPTERS.get(config.adapter).for_linear(linear, config)


def new_router(config: MonkeyJumpConfig, role: Role | None, in_features: int) -> nn.Module | None:
    """The learned router that hangs on a projection: its own, or on the first projection that of the whole block."""
    if role is not None and config.placement == "nested":
        return RankSelector(config.more.tasks, config.more.task_width or in_features, config.r, config.more.rank_scale)
    if role is None or not config.learns_router:
        return None
    if config.placement == "projection" and config.projection.router_scope == "projection":
        return LearnedRouter(in_features, role.experts, config)
    return LearnedRouter(role.width, role.experts, config) if role.first else None


def new_extra(extra: Extra, config: MonkeyJumpConfig, width: int) -> nn.Module:
    """A further expert of a block whose states are `width` wide."""
    if extra.kind == "parallel":
        return ParallelBottleneck(width, config.moa.parallel_width)
    return AttentionPrompt(config.moa.prompt_length, width, extra.heads)
