"""From the inputs of a forward to the gates of every block, without touching the model's code.

Three plain objects hang on hooks (bound methods, so that a deep copy routes with its own centres):
- `RoutingContext`, one per base model, sees what only the top is given: labels, task ids, the start of a generation;
- `BlockGroup`, one per list of blocks, sees the 2-D mask, commits the staged statistics and opens the next staging;
- `BlockRouter`, one per block, turns the hidden state that enters the block into gates, which the layers read.

Shapes: B batch, T tokens, D hidden width, E routed projections of a block.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.routing.ema import committed
from monkeyjump.routing.granularity import IGNORE, CallInputs, Selection, packed_mask, segments_of, select
from monkeyjump.routing.router import Decision, route, task_gates, uniform_gates
from monkeyjump.tuner.auxiliary import auxiliary_loss
from monkeyjump.tuner.layer import UNINITIALIZED, MonkeyJumpLayer
from monkeyjump.tuner.placement import Block

if TYPE_CHECKING:
    from monkeyjump.tuner.calibrate import TokenCollector
    from monkeyjump.tuner.trace import RoutingTrace

REMEMBERED = 8  # training forwards a block keeps the gates of, for recomputation in a later backward
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


class RoutingContext:
    """What the top of the model knows about the current call."""

    def __init__(self, model: nn.Module) -> None:
        self.labels: torch.Tensor | None = None
        self.task_ids: torch.Tensor | None = None
        self.prompt_lengths: torch.Tensor | None = None
        self.generated_from: int | None = None
        self.generation = 0
        self.in_generation = False
        self.regularized = False  # whether some adapter has a loss of its own
        self.regularizer_due = False  # whether a training forward could not add it
        self.trace: RoutingTrace | None = None
        self.collector: TokenCollector | None = None
        self.groups: dict[str, BlockGroup] = {}
        config = getattr(model, "config", None)
        can_generate = getattr(model, "can_generate", None)
        self.encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.causal = can_generate is not None and can_generate() and not self.encoder_decoder
        self._model = model
        if can_generate is not None and can_generate():
            # `generate` has no hooks, and only it knows where the prompt ends and takes `task_ids`. Shadowed on the
            # instance, so that every way there (PEFT's wrappers, a model with native adapters) passes through.
            model.generate = self.generate  # type: ignore[assignment]
        self._handles = [
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            # also after a failed forward, whose labels and task ids must not reach the next
            model.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        ]

    def router(self, model: nn.Module, block: Block) -> BlockRouter:
        """The router of a block, made and hooked in at the first asking."""
        if block.owner not in self.groups:
            self.groups[block.owner] = BlockGroup(self, model.get_submodule(block.owner))
        group = self.groups[block.owner]
        if block.path not in group.routers:
            group.routers[block.path] = BlockRouter(group, block, model.get_submodule(block.path))
        return group.routers[block.path]

    def routers(self) -> Iterator[BlockRouter]:
        for group in self.groups.values():
            yield from group.routers.values()

    def remove(self) -> None:
        """Take every hook off the model."""
        vars(self._model).pop("generate", None)
        holders: list[RoutingContext | BlockGroup | BlockRouter] = [self, *self.groups.values(), *self.routers()]
        for holder in holders:
            for handle in holder._handles:
                handle.remove()
            holder._handles = []
        self.groups = {}

    def adopt(self, peft_model: nn.Module) -> None:
        """PEFT's causal-LM wrapper drops `task_ids` for methods it does not know: take them before it does."""
        self._handles.append(peft_model.register_forward_pre_hook(self.before_wrapper, with_kwargs=True))

    def before_wrapper(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, self._take_extras(kwargs)

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self.labels = kwargs.get("labels")
        return args, self._take_extras(kwargs)

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if module.training and torch.is_grad_enabled():
            output = self._with_auxiliary_loss(module, kwargs, output)
        self.labels = None
        if not self.in_generation:
            self.task_ids = self.prompt_lengths = None
        return output

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the base model; the end of its prompt is what sequence routing decides from."""
        inputs = [*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
        width = next((tensor.shape[1] for tensor in inputs if isinstance(tensor, torch.Tensor)), None)
        if self.encoder_decoder:
            width = None
        extras = kwargs.pop("task_ids", None), kwargs.pop("prompt_lengths", None)
        with self.generating(width, *extras):
            return type(self._model).generate(self._model, *args, **kwargs)  # type: ignore[attr-defined]

    @contextmanager
    def generating(
        self, prompt_width: int | None, task_ids: torch.Tensor | None, prompt_lengths: torch.Tensor | None
    ) -> Iterator[None]:
        """Every forward inside belongs to one generation from a prompt of this (padded) width."""
        self.generation += 1
        self.in_generation = True
        self.generated_from, self.task_ids, self.prompt_lengths = prompt_width, task_ids, prompt_lengths
        try:
            yield
        finally:
            self.in_generation = False
            self.generated_from = self.task_ids = self.prompt_lengths = None

    def _take_extras(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if "task_ids" in kwargs or "prompt_lengths" in kwargs:
            kwargs = dict(kwargs)
            self.task_ids = kwargs.pop("task_ids", self.task_ids)
            self.prompt_lengths = kwargs.pop("prompt_lengths", self.prompt_lengths)
        return kwargs

    def _with_auxiliary_loss(self, module: nn.Module, kwargs: dict[str, Any], output: Any) -> Any:
        """Add the adapters' own regularisers to the loss the model returns."""
        if not self.regularized:
            return output
        as_tuple = isinstance(output, tuple)
        loss = (
            (output[0] if self.labels is not None and output else None) if as_tuple else getattr(output, "loss", None)
        )
        if not isinstance(loss, torch.Tensor) or hasattr(output, "log_probs"):
            # The trainer makes the loss itself, from logits or (TRL) log-probabilities: the callback adds this there.
            self.regularizer_due = True
            return output
        extra = auxiliary_loss(module)
        if extra is None:
            return output
        items = kwargs.get("num_items_in_batch")
        if items is not None and self.labels is not None:
            # The loss is a share of an accumulated batch; so must this be, or it grows with the accumulation steps.
            extra = extra * ((self.labels[..., 1:] != IGNORE).sum() / items)
        if as_tuple:
            return (loss + extra, *output[1:])
        output.loss = loss + extra
        return output


class BlockGroup:
    """The blocks of one ModuleList and the state they share during a forward."""

    def __init__(self, context: RoutingContext, owner: nn.Module) -> None:
        self.context = context
        self.routers: dict[str, BlockRouter] = {}
        self.staging = False  # open between the start and the end of a training forward, closed in recomputation
        self.arguments: dict[str, Any] = {}
        self.selections: dict[str, Selection] = {}
        self.kept: dict[tuple[str, str], torch.Tensor] | None = None  # decisions that came with the KV cache
        self.fresh: dict[tuple[str, str], torch.Tensor] = {}  # decisions of this forward
        self.task_ids: torch.Tensor | None = None
        self.initialized: set[str] = set()
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
        self.selections, self.fresh, self.kept, self.staging = {}, {}, None, False
        active = self.active()
        if not active and self.context.collector is None:
            return
        self.arguments = {name: self._argument(name, args, kwargs) for name in ARGUMENTS}
        collector = self.context.collector
        self.arguments["labels"] = self.context.labels if collector is None else collector.labels
        self.arguments["prompt_lengths"] = self.context.prompt_lengths
        self.task_ids = self.context.task_ids
        self.staging = module.training and torch.is_grad_enabled()
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
        if self.fresh:
            cache = getattr(output, "past_key_values", None)
            if cache is not None:
                setattr(cache, KEPT, (self.context.generation, self.fresh))
        self.fresh = {}

    def selection(self, adapter_name: str, config: MonkeyJumpConfig, h: torch.Tensor) -> Selection:
        if adapter_name not in self.selections:
            self._select(adapter_name, config, h.shape[:2], h.device)
        return self.selections[adapter_name]

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
        if kept is None or kept[0] != self.context.generation:
            return None
        if not torch.compiler.is_compiling() and int(cache.get_seq_length()) == 0:
            return None
        return kept[1]

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


class BlockRouter:
    """The gates of one block."""

    def __init__(self, group: BlockGroup, block: Block, module: nn.Module) -> None:
        self.group = group
        self.key = block.key
        self.path = block.path
        self.names: dict[str, tuple[str, ...]] = {}  # adapter name -> its experts, in order
        self.configs: dict[str, MonkeyJumpConfig] = {}
        self.layers: dict[str, list[MonkeyJumpLayer]] = {}
        self.gates: dict[str, torch.Tensor] = {}
        self.remembered: dict[tuple[str, int], torch.Tensor] = {}
        self.shape: tuple[int, int] = (0, 0)
        self._handles = [
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after),
        ]

    def add(self, adapter_name: str, config: MonkeyJumpConfig, block: Block, layers: list[MonkeyJumpLayer]) -> None:
        self.names[adapter_name] = block.names
        self.configs[adapter_name] = config
        self.layers[adapter_name] = layers
        for position, layer in enumerate(layers):
            layer.routers[adapter_name] = (self, position)

    def forget(self, adapter_name: str) -> None:
        for table in (self.names, self.configs, self.layers, self.gates):
            table.pop(adapter_name, None)
        self.group.initialized.discard(adapter_name)

    def active(self) -> list[str]:
        return [
            name
            for name, layers in self.layers.items()
            if name in layers[0].active_adapters and not layers[0].disable_adapters and not layers[0].merged
        ]

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        h = hidden_states(args, kwargs, self.path)
        self.shape = (h.shape[0], h.shape[1])
        collector = self.group.context.collector
        if collector is not None:
            collector.observe(self, h)
        recomputing = in_backward()
        for name in self.active():
            gates = self._recall(name, h) if recomputing else None
            if gates is None:
                gates = self._decide(name, h, module.training)
                self._remember(name, h, gates)
            self.gates[name] = gates
            trace = self.group.context.trace
            if trace is not None and not recomputing:
                mask = real_tokens(self.group.arguments.get("attention_mask"), h.shape[:2])
                trace.record(self.key, name, self.names[name], gates.expand(*h.shape[:2], -1), mask)

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.gates = {}

    def gate(self, adapter_name: str, position: int, x: torch.Tensor) -> torch.Tensor:
        """The gate of the tokens of x, [..., 1]."""
        if adapter_name not in self.gates:
            raise RuntimeError(
                f"a routed projection of block {self.path!r} ran outside its block: call the whole block, which "
                "computes the gates."
            )
        gate = self.gates[adapter_name][..., position]
        if x.dim() == 2 and gate.dim() == 2:  # a module that flattens its tokens
            gate = gate.expand(self.shape).reshape(-1)
        if x.shape[:-1] != gate.shape and not (gate.dim() == 2 and gate.shape[1] == 1 and x.shape[0] == gate.shape[0]):
            expert = self.names[adapter_name][position]
            raise ConfigError(
                f"projection {expert!r} of block {self.path!r} sees tokens of shape {tuple(x.shape[:-1])}, but the "
                f"block was entered by {tuple(self.shape)}: it cannot be routed token by token. Add it to "
                "shared_modules, or use granularity='sequence' or 'task'."
            )
        return gate.unsqueeze(-1).to(x.device)

    def _remember(self, name: str, h: torch.Tensor, gates: torch.Tensor) -> None:
        """Keep the gates of a training forward for its recomputation under gradient checkpointing.

        Between the two, another forward may have moved the centres and brought another mask. The key is the memory of
        h: checkpointing keeps h alive until it recomputes, so no later tensor can have taken its place.
        """
        if self.group.staging and not torch.compiler.is_compiling():
            while len(self.remembered) >= REMEMBERED:
                self.remembered.pop(next(iter(self.remembered)))
            self.remembered.pop((name, h.data_ptr()), None)
            self.remembered[name, h.data_ptr()] = gates

    def _recall(self, name: str, h: torch.Tensor) -> torch.Tensor | None:
        gates = self.remembered.get((name, h.data_ptr()))
        if gates is not None and self.configs[name].jitter > 0:
            self._route(name, h, training=True)  # draws what the forward drew, for the dropout after it
        return gates

    def centers(self, adapter_name: str) -> torch.Tensor:
        return torch.stack([layer.monkeyjump_center[adapter_name] for layer in self.layers[adapter_name]])

    def _decide(self, name: str, h: torch.Tensor, training: bool) -> torch.Tensor:
        config, layers, group = self.configs[name], self.layers[name], self.group
        if config.router == "uniform":
            return uniform_gates(h, len(layers), config)
        if config.granularity == "task":
            return self._task_gates(config, len(layers), h)
        if config.granularity == "sequence" and group.kept is not None and (self.path, name) in group.kept:
            gates = expanded_rows(group.kept[self.path, name], h.shape[0])
            group.fresh[self.path, name] = gates
            return gates
        decision = self._route(name, h, training)
        if group.staging:
            self._stage(name, decision)
        if config.granularity == "sequence" and not training:
            group.fresh[self.path, name] = decision.gates[:, -1:]
        return decision.gates

    def _route(self, name: str, h: torch.Tensor, training: bool) -> Decision:
        config, layers = self.configs[name], self.layers[name]
        centers = self.centers(name)
        if h.shape[-1] != centers.shape[-1]:
            raise ConfigError(
                f"block {self.path!r} is entered by states of width {h.shape[-1]}, but the centres of adapter "
                f"{name!r} have width {centers.shape[-1]}: the block list does not carry the model's hidden state."
            )
        mean = layers[0].monkeyjump_mean[name] if config.route_space == "centered" else None
        return route(
            h.detach().to(centers.device),
            centers,
            mean,
            self.group.selection(name, config, h),
            config,
            training=training,
            with_statistics=self.group.staging,
        )

    @torch.no_grad()
    def _stage(self, name: str, decision: Decision) -> None:
        assert decision.sums is not None
        assert decision.counts is not None
        layers = self.layers[name]
        torch._foreach_copy_([layer.monkeyjump_staged_sum[name] for layer in layers], list(decision.sums.unbind()))
        torch._foreach_copy_([layer.monkeyjump_staged_count[name] for layer in layers], list(decision.counts.unbind()))

    def _task_gates(self, config: MonkeyJumpConfig, experts: int, h: torch.Tensor) -> torch.Tensor:
        task_ids = self.group.task_ids
        if task_ids is None:
            raise ConfigError(
                "granularity='task' needs `task_ids`, one integer per row of the batch: add them to the batch "
                "(with the Trainer also set remove_unused_columns=False), or choose granularity='token'."
            )
        task_ids = task_ids.reshape(-1).to(h.device)
        seq_idx = self.group.arguments.get("seq_idx")
        if seq_idx is not None:  # packed: one id per sequence of the row
            return task_gates(task_ids[seq_idx.clamp_min(0).long()], experts, config)
        rows = expanded_rows(task_ids, h.shape[0])
        if rows.shape[0] != h.shape[0]:
            raise ConfigError(
                f"task_ids has {rows.shape[0]} entries for a batch of {h.shape[0]} rows: give one per row."
            )
        return task_gates(rows.unsqueeze(1), experts, config)


def in_backward() -> bool:
    """Whether this code runs inside a backward pass: gradient checkpointing is recomputing a block."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def hidden_states(args: tuple, kwargs: dict[str, Any], path: str) -> torch.Tensor:
    """The hidden state a block was called with."""
    h = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
    if not isinstance(h, torch.Tensor) or h.dim() != 3:
        raise ConfigError(
            f"block {path!r} was not called with a [batch, tokens, width] hidden state: this architecture cannot be "
            "routed; set layers_to_route=[] for adapters that are always on."
        )
    return h


def real_tokens(mask: Any, shape: Any) -> torch.Tensor | None:
    """[B, T] True on real tokens, from any mask a Transformers model is called with; None = all real."""
    if isinstance(mask, dict):  # one mask per attention type
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        return None
    T = shape[1]
    if mask.dim() == 4:  # [B, 1, T, S]: a token is real if it may attend to itself; a lone decoded token always is
        if T == 1:
            return None
        own = mask[:, 0, :, :T].diagonal(dim1=-2, dim2=-1)
        return (own if own.dtype == torch.bool else own == 0).expand(shape[0], T)
    if mask.dim() != 2 or mask.shape[1] < T:
        raise ConfigError(
            f"attention_mask of shape {tuple(mask.shape)} does not cover {T} tokens: pass the [batch, tokens] mask of "
            "the tokens that enter the blocks."
        )
    return mask[:, -T:].bool()


def expanded_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeat per-row values for a batch that `generate` widened (beams, several returned sequences)."""
    if tensor.shape[0] == rows or rows % tensor.shape[0] != 0:
        return tensor
    return tensor.repeat_interleave(rows // tensor.shape[0], dim=0)


def _alike(layers: list[MonkeyJumpLayer], name: str) -> list[list[MonkeyJumpLayer]]:
    """Group layers whose centres can be stacked (same width, same device)."""
    groups: dict[tuple, list[MonkeyJumpLayer]] = {}
    for layer in layers:
        center = layer.monkeyjump_center[name]
        groups.setdefault((center.shape[0], center.device), []).append(layer)
    return list(groups.values())
