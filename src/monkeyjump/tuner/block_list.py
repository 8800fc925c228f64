"""The blocks of one list: sees the 2-D mask, commits the staged statistics, opens the next staging."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.routing.ema import committed
from monkeyjump.routing.granularity import CallInputs, Selection, packed_mask, segments_of, select
from monkeyjump.tuner.inputs import expanded_rows, real_tokens
from monkeyjump.tuner.layer import UNINITIALIZED, MonkeyJumpLayer

if TYPE_CHECKING:
    from monkeyjump.tuner.routers.centroid import BlockRouter
    from monkeyjump.tuner.context import RoutingContext

ARGUMENTS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "seq_idx",
    "past_key_values",
    "encoder_hidden_states",
)
KEPT = "monkeyjump_decisions"  # attribute of a KV cache: the sequence decisions its entries were made with


class BlockGroup:
    """The blocks of one ModuleList and the state they share during a forward."""

    def __init__(self, context: RoutingContext, owner: nn.Module) -> None:
        self.context = context
        self.routers: dict[str, BlockRouter] = {}
        self.staging = False  # open between the start and the end of a training forward, closed in recomputation
        self.arguments: dict[str, Any] = {}
        self.selections: dict[str, Selection] = {}
        self.masks: dict[tuple[int, int], torch.Tensor | None] = {}
        self.kept: dict[tuple[str, str], torch.Tensor] | None = None  # decisions that came with the KV cache
        self.fresh: dict[tuple[str, str], torch.Tensor] = {}  # decisions of this forward
        self.task_ids: torch.Tensor | None = None
        self.initialized: set[str] = set()
        self.told: set[str] = set()  # adapters that have said how they do without task ids
        self._parameters = list(inspect.signature(owner.forward).parameters)
        self._handles = [
            owner.register_forward_pre_hook(self.before, with_kwargs=True),
            owner.register_forward_hook(self.after, with_kwargs=True),
        ]

    def layers(self, adapter_name: str) -> list[MonkeyJumpLayer]:
        """The routed projections of all blocks, in order."""
        return [layer for router in self.routers.values() for layer in router.layers.get(adapter_name, [])]

    def active(self) -> dict[str, MonkeyJumpConfig]:
        names: dict[str, MonkeyJumpConfig] = {}
        for router in self.routers.values():
            for name in router.active():
                names.setdefault(name, router.configs[name])
        return names

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.selections, self.masks, self.fresh, self.kept, self.staging = {}, {}, {}, None, False
        active = self.active()
        if not active and self.context.collector is None:
            return
        self.arguments = {name: self._argument(name, args, kwargs) for name in ARGUMENTS}
        collector = self.context.collector
        self.arguments["labels"] = self.context.labels if collector is None else collector.labels
        self.arguments["prompt_lengths"] = self.context.prompt_lengths
        self.task_ids = self.context.task_ids
        self.staging = module.training and torch.is_grad_enabled()
        if self.staging and not torch.compiler.is_compiling():
            self.context.sharing.draw(module)
        self.kept = self._kept_decisions(self.arguments["past_key_values"])
        for name, config in active.items():
            if config.uses_centers:
                self._require_centers(name, config)
                if self.staging:
                    self._commit(name, config)
        tokens = (
            self.arguments["input_ids"] if self.arguments["input_ids"] is not None else self.arguments["inputs_embeds"]
        )
        if tokens is not None and collector is None:
            for name, config in active.items():
                self._select(name, config, tokens.shape[:2], tokens.device)

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if self.staging:
            self._reduce_staged()
            self.staging = False
        if self.fresh and self.kept is None:
            cache = getattr(output, "past_key_values", None)
            if cache is not None:
                setattr(cache, KEPT, (self.context.generation, self.fresh))
        self.fresh = {}

    def selection(self, adapter_name: str, config: MonkeyJumpConfig, h: torch.Tensor) -> Selection:
        if adapter_name not in self.selections:
            self._select(adapter_name, config, h.shape[:2], h.device)
        return self.selections[adapter_name]

    def mask(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor | None:
        """The real tokens of this forward, [B, T]; None = all."""
        if shape not in self.masks:
            mask = self.call_inputs(shape, device).mask
            self.masks[shape] = None if mask is None else mask.to(device)
        return self.masks[shape]

    def call_inputs(self, shape: tuple[int, int], device: torch.device) -> CallInputs:
        """The arguments of this forward in the form that selection understands."""
        mask = real_tokens(self.arguments.get("attention_mask"), shape)
        seq_idx, positions = self.arguments.get("seq_idx"), self.arguments.get("position_ids")
        if mask is not None or self.arguments.get("past_key_values") is not None or self.context.generated_from:
            positions = None  # they tell of packing only where Transformers reads them so: no mask, no cache
        segments = segments_of(positions, seq_idx)
        if segments is not None and segments.shape != shape:
            segments = segments.expand(shape) if segments.shape[0] == 1 and segments.shape[1] == shape[1] else None
        packed = packed_mask(seq_idx) if segments is not None else None
        if packed is not None:
            mask = packed if mask is None else mask & packed
        labels, lengths = self.arguments.get("labels"), self.arguments.get("prompt_lengths")
        has_answers = self.context.causal and (labels is None or labels.shape == shape)
        per_row = has_answers and (segments is None or lengths is None or lengths.shape[0] == shape[0])
        return CallInputs(
            shape=shape,
            device=device,
            mask=mask,
            labels=labels if has_answers else None,
            prompt_lengths=expanded_rows(lengths, shape[0]) if lengths is not None and per_row else None,
            segments=segments,
            generated_from=1 if self._in_decoder() else self.context.generated_from,
            training=self.staging and has_answers,
        )

    def _in_decoder(self) -> bool:
        """Whether these blocks decode what an encoder read: all but their first token is the answer."""
        return self.context.encoder_decoder and self.arguments.get("encoder_hidden_states") is not None

    def _select(self, adapter_name: str, config: MonkeyJumpConfig, shape: Any, device: torch.device) -> None:
        if not config.uses_centers or (config.granularity == "sequence" and self.kept is not None):
            return
        inputs = self.call_inputs((int(shape[0]), int(shape[1])), device)
        self.selections[adapter_name] = select(inputs, config.granularity, config.sequence_token)

    def _argument(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = self._parameters.index(name) if name in self._parameters else len(args)
        return args[position] if position < len(args) else None

    def _kept_decisions(self, cache: Any) -> dict[tuple[str, str], torch.Tensor] | None:
        """The decisions the cached keys and values were made with; None for a new prompt."""
        kept = getattr(cache, KEPT, None)
        if kept is None:
            return None
        if torch.compiler.is_compiling():  # the prefill settled it; a counter in a guard would recompile every time
            return kept[1]
        return None if kept[0] != self.context.generation or int(cache.get_seq_length()) == 0 else kept[1]

    def _require_centers(self, name: str, config: MonkeyJumpConfig) -> None:
        if name in self.initialized or torch.compiler.is_compiling():
            return
        if int(self.layers(name)[0].monkeyjump_step[name]) != UNINITIALIZED:
            blank = sum(not layer.monkeyjump_center[name].any() for layer in self.layers(name))
            if blank:  # Transformers' own loader only prints which tensors a checkpoint lacks
                raise ConfigError(
                    f"{blank} of the centres of adapter {name!r} are missing although its schedule has started: the "
                    "checkpoint it was loaded from is incomplete; save it again, or call initialize_centers."
                )
            self.initialized.add(name)
        elif self.staging or config.inference_mode:
            raise ConfigError(
                f"the centres of adapter {name!r} are not initialised (center_init={config.center_init!r}): call "
                "monkeyjump.initialize_centers(model, dataloader) before training, or give the Trainer a "
                "MonkeyJumpCallback()."
            )

    def _commit(self, name: str, config: MonkeyJumpConfig) -> None:
        """Move the centres by what the previous training forward staged, and count this one."""
        for layers in _alike(self.layers(name), name):
            centers = [layer.monkeyjump_center[name] for layer in layers]
            new = committed(
                torch.stack(centers),
                torch.stack([layer.monkeyjump_staged_sum[name] for layer in layers]),
                torch.stack([layer.monkeyjump_staged_count[name] for layer in layers]),
                layers[0].monkeyjump_step[name],
                config,
            )
            with torch.no_grad():
                torch._foreach_copy_(centers, list(new.unbind()))
                torch._foreach_add_([layer.monkeyjump_step[name] for layer in layers], 1)

    def _reduce_staged(self) -> None:
        """Make the staged statistics those of the whole data-parallel batch, on every rank."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return
        for name, config in self.active().items():
            if not config.uses_centers:
                continue
            for layers in _alike(self.layers(name), name):
                sums = [layer.monkeyjump_staged_sum[name] for layer in layers]
                counts = [layer.monkeyjump_staged_count[name] for layer in layers]
                flat = torch.cat([torch.stack(sums).flatten(), torch.stack(counts)])
                distributed.all_reduce(flat)
                with torch.no_grad():
                    torch._foreach_copy_(sums, list(flat[: -len(layers)].view(len(layers), -1).unbind()))
                    torch._foreach_copy_(counts, list(flat[-len(layers) :].unbind()))


def _alike(layers: list[MonkeyJumpLayer], name: str) -> list[list[MonkeyJumpLayer]]:
    """Group layers whose centres can be stacked (same width, same device)."""
    groups: dict[tuple, list[MonkeyJumpLayer]] = {}
    for layer in layers:
        center = layer.monkeyjump_center[name]
        groups.setdefault((center.shape[0], center.device), []).append(layer)
    return list(groups.values())
