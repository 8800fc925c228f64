"""The gates of an adapter as constants: exactly, where its routing does not look at tokens, or their mean over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from monkeyjump.analysis.usage import ExpertUsage
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.load import TASK_IDS
from monkeyjump.routing.centroid import task_gates, uniform_gates
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.routers.learned import routes_alone

Gates = dict[str, Tensor | None]  # by path of a projection: the gates of its experts [G]; None where it is always on


def layers_of(model: nn.Module, name: str = "default") -> dict[str, MonkeyJumpLayer]:
    """The layers that hold an adapter, by the path of their linear in the base model."""
    found = (module for module in model.modules() if isinstance(module, MonkeyJumpLayer))
    return {layer.path: layer for layer in found if name in layer.monkeyjump_adapter}


def routed(model: nn.Module, name: str = "default") -> bool:
    """Whether some projection of the adapter has a gate."""
    return any(name in layer.routers for layer in layers_of(model, name).values())


def by_task(config: MonkeyJumpConfig) -> bool:
    """Whether the task of a row, and nothing else, decides."""
    if config.placement == "nested":
        return True
    return config.placement == "block" and config.granularity == "task" and not _constant(config)


def why_not_exact(model: nn.Module, name: str = "default") -> str | None:
    """Why no constant gates are those of the adapter; None where they are."""
    config = _config(model, name)
    if any(layer.monkeyjump_adapter[name].by_token for layer in layers_of(model, name).values()):
        return f"adapter={config.adapter!r} chooses its ranks anew for every token"
    if not routed(model, name) or _constant(config) or by_task(config):
        return None
    if config.learns_router:
        return f"router={config.router!r} decides from the states of the tokens"
    return f"granularity={config.granularity!r}: every {config.granularity} has gates of its own"


def task_names(model: nn.Module, name: str = "default") -> dict[str, int]:
    """The tasks that an adapter tells apart, by name where it knows their names; none where tasks decide nothing."""
    config = _config(model, name)
    if not routed(model, name) or not by_task(config):
        return {}
    known = getattr(model, TASK_IDS, None)
    if known:
        return dict(known)
    routers = [layer.routers[name][0] for layer in layers_of(model, name).values() if name in layer.routers]
    count = config.more.tasks if config.placement == "nested" else max(len(router.names[name]) for router in routers)
    if config.task_experts is not None:
        count = config.task_experts if isinstance(config.task_experts, int) else len(config.task_experts)
    return {f"task-{number}": number for number in range(count)}


@torch.no_grad()
def constant_gates(model: nn.Module, task: int | None = None, name: str = "default") -> Gates:
    """The gates that an adapter has whatever the tokens are, for one task where tasks decide."""
    config, ids = _config(model, name), torch.tensor([[task or 0]])

    def gates(layer: MonkeyJumpLayer, router: Any, position: int) -> Tensor:
        if config.placement == "nested":
            return layer.monkeyjump_router[name].gates()[task].detach()  # type: ignore[operator]
        if config.placement == "projection":
            return uniform_gates(ids, router.experts[name], config)[0, 0]
        decide = uniform_gates if _constant(config) else task_gates
        return _own(router, name, position, decide(ids, len(router.names[name]), config)[0, 0])

    return _of_layers(model, name, gates)


def mean_gates(model: nn.Module, usage: ExpertUsage, name: str = "default") -> Gates:
    """The mean gate of every expert over the rows of a usage, in which every task counts the same."""
    config, loads = _config(model, name), usage.mean()

    def gates(layer: MonkeyJumpLayer, router: Any, position: int) -> Tensor:
        key = router._key_of(name, position) if routes_alone(config) else router.key
        wide = torch.tensor(loads[key].mean_gate)
        return wide if config.placement == "projection" else _own(router, name, position, wide)

    return _of_layers(model, name, gates)


def mean_over_tasks(each: list[Gates]) -> Gates:
    """The mean of the gates of several tasks."""
    stacked = {path: [gates[path] for gates in each] for path in each[0]}
    return {
        path: None if gates[0] is None else torch.stack([gate for gate in gates if gate is not None]).mean(0)
        for path, gates in stacked.items()
    }


def _of_layers(model: nn.Module, name: str, gates: Callable[[MonkeyJumpLayer, Any, int], Tensor]) -> Gates:
    layers = layers_of(model, name).items()
    return {path: gates(layer, *layer.routers[name]) if name in layer.routers else None for path, layer in layers}


def _own(router: Any, name: str, position: int, wide: Tensor) -> Tensor:
    """The gates of one projection among those of its block."""
    number = router.gates_each(name)
    return wide.narrow(-1, position * number, number)


def _constant(config: MonkeyJumpConfig) -> bool:
    return config.router == "uniform" and config.placement in ("block", "projection")


def _config(model: Any, name: str) -> MonkeyJumpConfig:
    config = model.peft_config[name]
    if not isinstance(config, MonkeyJumpConfig):
        raise ConfigError(
            f"the adapter is one of PEFT's own ({config.peft_type}): PEFT loads it as it is.",
            title="cannot export",
        )
    return config
