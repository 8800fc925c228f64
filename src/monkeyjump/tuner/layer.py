"""The layer PEFT puts in place of a linear: the frozen base, one adapter module per adapter name, and routing state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils.quantization_utils import quantization_extra_repr, resolve_quantization_backend
from torch import nn
from transformers.pytorch_utils import Conv1D

from monkeyjump.adapters import ADAPTERS, Adapter, BaseLinear, Gate
from monkeyjump.adapters.mixture import mixture_of
from monkeyjump.adapters.moa import AttentionPrompt, ParallelBottleneck
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.routing.learned import LearnedRouter
from monkeyjump.routing.lime import LimeRouter
from monkeyjump.routing.more_ranks import RankSelector
from monkeyjump.tuner.call import row_adapters_of
from monkeyjump.tuner.module_paths import linear_shape
from monkeyjump.tuner.placement import Role
from monkeyjump.tuner.routers.moa_placement import Extra

if TYPE_CHECKING:
    from monkeyjump.tuner.context import RoutingContext
    from monkeyjump.tuner.fast.shared_inputs import SharedInput
    from monkeyjump.tuner.mixed_batch import RowAdapters
    from monkeyjump.tuner.routers.base import BlockRouter

Folded = tuple[torch.Tensor, torch.Tensor | None]  # a weight [O, D] and a bias

UNINITIALIZED = -1  # value of `monkeyjump_step` while the centres wait for `initialize_centers`


class Fp32BufferDict(BufferDict):
    """Persistent buffers by adapter name that keep their precision when the model is cast."""

    def __init__(self) -> None:
        super().__init__(persistent=True)

    def __getitem__(self, key: str) -> torch.Tensor:
        return super().__getitem__(key)

    def _apply(self, fn, recurse=True):
        """Move, never cast: not to bf16, and not to fp64 either, since routing is computed in fp32."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(move, recurse)


class FrozenLinear:
    """The linear under a layer, for adapters that need more of it than its widths (`adapters.base.BaseLinear`).

    It is a plain object, so that an adapter which keeps it does not hold the base as a submodule of its own.
    """

    def __init__(self, layer: MonkeyJumpLayer) -> None:
        self.layer = layer
        self.path = layer.path
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def weight(self) -> torch.Tensor:
        weight = self.layer.get_base_weight()
        return weight.T if isinstance(self.layer.get_base_layer(), Conv1D) else weight

    def bias(self) -> torch.Tensor | None:
        bias = getattr(self.layer.get_base_layer(), "bias", None)
        return None if bias is None else bias.detach()


class MonkeyJumpLayer(nn.Module, BaseTunerLayer):
    """y = W x + gate * delta(x), for every active adapter.

    The centre of a routed projection, and a learned router, live here beside the adapter, because PEFT saves and loads
    what hangs on tuner layers. The statistics staged for the next update are saved too: a resumed run commits what the
    interrupted one would have.
    """

    cast_input_dtype_enabled = True  # PEFT's `disable_input_dtype_casting` turns it off; no input is cast here anyway
    adapter_layer_names = ("monkeyjump_adapter", "monkeyjump_router", "monkeyjump_parallel", "monkeyjump_prompt")
    other_param_names = tuple(f"monkeyjump_{name}" for name in ("center", "mean", "staged_sum", "staged_count", "step"))
    monkeyjump_center: Fp32BufferDict
    monkeyjump_mean: Fp32BufferDict
    monkeyjump_staged_sum: Fp32BufferDict
    monkeyjump_staged_count: Fp32BufferDict
    monkeyjump_step: Fp32BufferDict

    def __init__(
        self, base_layer: nn.Module, context: RoutingContext, quantization: dict[str, Any], path: str = ""
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.context = context
        self.path = path
        self.in_features, self.out_features = linear_shape(base_layer)
        self.quantization_backend = resolve_quantization_backend(self.get_base_layer(), **quantization)
        self.monkeyjump_adapter = nn.ModuleDict()
        self.monkeyjump_router = nn.ModuleDict()
        self.monkeyjump_parallel = nn.ModuleDict()
        self.monkeyjump_prompt = nn.ModuleDict()
        for name in self.other_param_names:
            setattr(self, name, Fp32BufferDict())
        self.routers: dict[str, tuple[BlockRouter, int]] = {}  # adapter name -> (router of the block, expert position)
        self.shared: dict[str, SharedInput] = {}  # adapter name -> the projections that read the same input
        self.places: dict[str, int] = {}  # adapter name -> the position of this one among them
        self.merged_adapters: list[str] = []
        self.frozen: Folded | None = None  # the base while several adapters are merged: their sum cannot be undone
        self._disable_adapters = False

    def update_layer(
        self, adapter_name: str, config: MonkeyJumpConfig, role: Role | None, inference_mode: bool = False
    ) -> None:
        """Add an adapter; `role` is None for one that is always on."""
        self.context.shared_inputs.leave(adapter_name, self)
        self.monkeyjump_adapter[adapter_name] = _new_adapter(config, role, FrozenLinear(self))
        router = _new_router(config, role, self, adapter_name)
        if router is not None:
            self.monkeyjump_router[adapter_name] = router
        if role is not None:
            for extra in role.extras:
                getattr(self, f"monkeyjump_{extra.kind}")[adapter_name] = _new_extra(extra, config, role.width)
        if role is not None and config.uses_centers:
            width, units = role.width, (config.units,) if config.expert_unit == "rank" else ()
            self.monkeyjump_center[adapter_name] = torch.zeros(*units, width)
            self.monkeyjump_staged_sum[adapter_name] = torch.zeros(*units, width)
            self.monkeyjump_staged_count[adapter_name] = torch.zeros(units)
            self.monkeyjump_step[adapter_name] = torch.tensor(UNINITIALIZED)
            if config.route_space == "centered":
                self.monkeyjump_mean[adapter_name] = torch.zeros(width)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move, never cast: PEFT's own version would round adapters and centres to the dtype of the base."""
        if device is None:
            device, _ = self._get_base_layer_device_and_dtype(self.get_base_layer())
        if device is None or device.type == "meta":
            return
        for name in self.adapter_layer_names + self.other_param_names:
            container = getattr(self, name)
            if adapter_name not in container:
                continue
            entry = container[adapter_name]
            tensors = [*entry.parameters(), *entry.buffers()] if isinstance(entry, nn.Module) else [entry]
            if not any(tensor.is_meta for tensor in tensors):
                container[adapter_name] = entry.to(device)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = row_adapters_of(self.context)
        names = self.active_adapters if rows is None else rows.used
        together = not args and not kwargs and (rows is None or not rows.mixed)
        if together and (shared := self._shared_output(names, x)) is not None:
            return shared
        base = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
                base = self.base_layer(x, *args, **kwargs)
            return base
        if self.merged:
            return base
        if rows is not None and rows.mixed:
            return self._mixed_output(x, base, rows)
        if self.quantization_backend is not None:
            base = self.quantization_backend.maybe_clone_base_result(base)
        out = base
        for name in names:
            if name in self.monkeyjump_adapter:
                gate = self._gate(name, x)
                out = self.monkeyjump_adapter[name](x, base, out, gate)
                if gate is not None:
                    router, position = self.routers[name]
                    router.observe(name, position, x, base, gate)
        return out

    def running_adapters(self) -> list[str]:
        """The adapters of this thread's call: those of its rows, where each has its own, or the active ones."""
        rows = row_adapters_of(self.context)
        return self.active_adapters if rows is None else rows.used

    def _mixed_output(self, x: torch.Tensor, base: torch.Tensor, rows: RowAdapters) -> torch.Tensor:
        """The frozen output, and in the rows of each adapter what it adds; no adapter computes with others' rows."""
        out = base.clone()
        for name in rows.used:
            if name in self.monkeyjump_adapter:
                own, gate = rows.positions(name, x), self._gate(name, x)
                frozen = base[own]
                own_gate = None if gate is None else gate[own.to(gate.device)]
                out[own] = self.monkeyjump_adapter[name](x[own], frozen, frozen, own_gate)
        return out

    def _shared_output(self, names: list[str], x: torch.Tensor) -> torch.Tensor | None:
        """The output that the first projection to read x has computed for all of them; None where that is slower."""
        if len(names) != 1 or self._disable_adapters:
            return None
        group = self.shared.get(names[0])
        if group is None:
            return None
        return group.traced_output(self.places[names[0]], x) if torch.compiler.is_compiling() else group.output(self, x)

    def _gate(self, adapter_name: str, x: torch.Tensor) -> Gate:
        """The gate of each token of x [..., 1], or None where the adapter is always on."""
        if adapter_name not in self.routers:
            return None
        router, position = self.routers[adapter_name]
        return router.gate(adapter_name, position, x)

    def delete_adapter(self, adapter_name: str) -> None:
        self.context.shared_inputs.leave(adapter_name, self)
        super().delete_adapter(adapter_name)
        router = self.routers.pop(adapter_name, None)
        if router is not None:
            router[0].forget(adapter_name)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Fold always-on adapters into the base. Each adds what it adds to the frozen linear, as in `forward`."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.monkeyjump_adapter]
        if not names:
            return
        self.check_merge(names, safe_merge)
        frozen = self._frozen()
        names = [*self.merged_adapters, *names]
        self._set_base(*self._folded(frozen, names))
        self.merged_adapters = names
        weight, bias, dtype = *frozen, self.get_base_weight().dtype
        self.frozen = (weight.to(dtype), None if bias is None else bias.to(dtype)) if len(names) > 1 else None

    @torch.no_grad()
    def unmerge(self) -> None:
        if self.merged_adapters:
            self._set_base(*self._frozen())
            self.merged_adapters, self.frozen = [], None

    @torch.no_grad()
    def check_merge(self, adapter_names: list[str], safe: bool = False) -> None:
        """Refuse routed adapters and, if `safe`, those that give weights which are no numbers."""
        names = [name for name in adapter_names if name in self.monkeyjump_adapter]
        routed = [name for name in names if name in self.routers or self.monkeyjump_adapter[name].by_token]
        if routed:
            raise ValueError(
                f"adapter {routed[0]!r} is routed: its strength depends on the token, so there is no single weight to "
                "merge it into. Keep it as an adapter, or merge adapters that are always on (layers_to_route=[])."
            )
        for name in names if safe else []:
            tensors = [tensor for tensor in self._folded(self._frozen(), [name]) if tensor is not None]
            dtype = self.get_base_weight().dtype  # a number may be too large for it
            if not all(torch.isfinite(tensor.to(dtype)).all() for tensor in tensors):
                raise ValueError(
                    f"NaNs detected in the merged weights. The adapter {name} seems to be broken: at {self.path!r} it "
                    "gives NaN or infinite numbers. Nothing was merged."
                )

    def _frozen(self) -> Folded:
        """The weight [O, D] and the bias of the base without what is merged into it, at least in fp32."""
        layer = self.get_base_layer()
        weight, bias = self.frozen or (self.get_base_weight().detach(), getattr(layer, "bias", None))
        if self.frozen is None and isinstance(layer, Conv1D):
            weight = weight.T
        folded = _precise(weight), None if bias is None else _precise(bias.detach())
        for name in self.merged_adapters if self.frozen is None else []:  # one at most
            folded = self.monkeyjump_adapter[name].merged(*folded, -1)  # type: ignore[operator]
        return folded

    def _folded(self, frozen: Folded, adapter_names: list[str]) -> Folded:
        """The frozen linear with these adapters in it: the sum of what each of them changes."""
        weight, bias = frozen
        for name in adapter_names:
            own_weight, own_bias = self.monkeyjump_adapter[name].merged(*frozen, +1)  # type: ignore[operator]
            weight = weight + (own_weight - frozen[0])
            bias = None if bias is None else bias + (own_bias - frozen[1])
        return weight, bias

    def _set_base(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        layer: Any = self.get_base_layer()
        weight = weight.T.contiguous() if isinstance(layer, Conv1D) else weight
        self.set_base_weight(weight.to(self.get_base_weight()))
        if bias is not None:
            layer.bias.data = bias.to(layer.bias)

    def extra_repr(self) -> str:
        return quantization_extra_repr(self)

    def __repr__(self) -> str:
        return "monkeyjump." + super().__repr__()


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _new_adapter(config: MonkeyJumpConfig, role: Role | None, linear: BaseLinear) -> Adapter:
    """One expert, or all experts of a projection in one adapter; one that is always on (no role) is a plain one."""
    if role is not None and not role.plain and config.placement in ("projection", "ffn"):
        return mixture_of(config, linear, role.experts)
    return ADAPTERS.get(config.adapter).for_linear(linear, config)


def _new_router(
    config: MonkeyJumpConfig, role: Role | None, layer: MonkeyJumpLayer, adapter_name: str
) -> nn.Module | None:
    """The learned router that hangs on a projection: its own, or on the first projection that of the whole block."""
    in_features = layer.in_features
    if role is not None and config.placement == "nested":
        return RankSelector(config.more.tasks, config.more.task_width or in_features, config.r, config.more.rank_scale)
    if role is None or not config.learns_router:
        return None
    if config.router == "lime":
        return LimeRouter(FrozenLinear(layer), layer.monkeyjump_adapter[adapter_name], config)  # type: ignore[arg-type]
    if config.placement == "projection" and config.projection.router_scope == "projection":
        return LearnedRouter(in_features, role.experts, config)
    return LearnedRouter(role.width, role.experts, config) if role.first else None


def _new_extra(extra: Extra, config: MonkeyJumpConfig, width: int) -> nn.Module:
    """A further expert of a block whose states are `width` wide."""
    if extra.kind == "parallel":
        return ParallelBottleneck(width, config.moa.parallel_width)
    return AttentionPrompt(config.moa.prompt_length, width, extra.heads)
