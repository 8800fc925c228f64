"""Hooks on one list of blocks: they open a call at its entrance, move the centres, and keep a prompt's decisions."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.tuner.call import BlocksCall, Decisions, ModelCall, calls_of, running
from monkeyjump.tuner.centers.schedule import Schedule, over_ranks
from monkeyjump.tuner.layer import UNINITIALIZED, MonkeyJumpLayer
from monkeyjump.tuner.module_paths import language_path, outside_language
from monkeyjump.tuner.recomputation import carry_calls, forget_calls, refuse_unknown_recomputation

if TYPE_CHECKING:
    from monkeyjump.tuner.context import RoutingContext
    from monkeyjump.tuner.routers.base import BlockRouter

ARGUMENTS = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "seq_idx"),
    *("past_key_values", "encoder_hidden_states"),
)
KEPT = "monkeyjump_decisions"  # attribute of a KV cache: the sequence decisions its entries were made with


class BlockList:
    """The blocks of one ModuleList and the model that runs them."""

    def __init__(self, context: RoutingContext, owner: nn.Module, path: str) -> None:
        self.context = context
        self.owner = owner
        self.path = path
        self.tower = outside_language(path, language_path(context.base))
        self.holders: list[nn.Module] = []  # the lists themselves and the modules around them
        self.routers: dict[str, BlockRouter] = {}
        self.initialized: set[str] = set()
        self.told: set[str] = set()  # adapters that have warned that they got no task ids
        self.schedule = Schedule()
        self._parameters = list(inspect.signature(owner.forward).parameters)
        self._handles = [
            owner.register_forward_pre_hook(self.before, with_kwargs=True),
            owner.register_forward_hook(self.after, with_kwargs=True),
            owner.register_forward_hook(self.close, always_call=True),
        ]

    def hold(self, *holders: nn.Module) -> None:
        self.holders += [holder for holder in holders if not any(holder is other for other in self.holders)]

    def layers(self, adapter_name: str) -> list[MonkeyJumpLayer]:
        """The routed projections of all blocks, in order."""
        return [layer for router in self.routers.values() for layer in router.layers.get(adapter_name, [])]

    def active(self) -> dict[str, MonkeyJumpConfig]:
        names: dict[str, MonkeyJumpConfig] = {}
        for router in self.routers.values():
            for name in router.active():
                names.setdefault(name, router.configs[name])
        return names

    def checkpointing(self) -> list[nn.Module]:
        """The modules that may checkpoint blocks."""
        return [self.owner, *self.holders, *(block for holder in self.holders for block in holder.children())]

    def remove(self) -> None:
        forget_calls(self.checkpointing())
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        blocks = self.open()
        blocks.staging = module.training and torch.is_grad_enabled()
        if blocks.staging:
            refuse_unknown_recomputation(self.path)
            self.context.shared_inputs.draw_seeds(blocks.call)
            if not torch.compiler.is_compiling():
                carry_calls(self.checkpointing(), list(self.routers.values()))
        active, collector = self.active(), self.context.collector
        if not active and collector is None:
            return
        if "read_index" in kwargs:  # what Transformers' continuous batching tells its attention
            _refuse_ragged_rows(active)
        blocks.arguments = {name: self._argument(name, args, kwargs) for name in ARGUMENTS}
        blocks.arguments["labels"] = blocks.call.labels if collector is None else collector.labels
        tokens = blocks.arguments["input_ids"]
        tokens = blocks.arguments["inputs_embeds"] if tokens is None else tokens
        deciding = [name for name, config in active.items() if _decides_for_rows(config, blocks.call)]
        if deciding and not self.tower:
            width = None if tokens is None else int(tokens.shape[1])
            blocks.kept = self._kept_decisions(blocks, width, deciding[0])
        for name, config in active.items():
            if blocks.staging and config.learns_router:
                self._refuse_zero3(name)
            if config.uses_centers:
                self._require_centers(name, config, blocks.staging)
                if blocks.staging and self.schedule.begin(name, config, self.layers(name), self.context):
                    blocks.statistics = True
        if not torch.compiler.is_compiling():  # a compiled graph would be made again for every new number
            blocks.commits = self.schedule.commits
        if tokens is not None and collector is None:
            self._look_ahead(blocks, active, (int(tokens.shape[0]), int(tokens.shape[1])), tokens.device)

    def open(self) -> BlocksCall:
        """Open a call of these blocks inside the model's call, or inside a new one where blocks are run directly."""
        call = calls_of(self.context)
        if call is None:
            call = self.context.open()
        here = running()
        nested = here.blocks is not None and here.blocks.call is call and here.blocks.blocks is not self
        outer = here.blocks if nested else None
        here.blocks = BlocksCall(call, self, outer=outer, traced=torch.compiler.is_compiling())
        return here.blocks

    def close(self, module: nn.Module, args: tuple, output: Any) -> None:
        """End the call. This also runs after a forward that raised, and drops the statistics that it staged."""
        blocks = running().blocks
        if blocks is None or blocks.blocks is not self:
            return
        running().blocks = blocks.outer
        if not blocks.call.entered and not blocks.call.wrapped and running().blocks is None:
            self.context.close(blocks.call)  # the blocks were entered directly and had opened it
        if blocks.staging and not torch.compiler.is_compiling():
            for name in self.active():
                self.schedule.abandon(name, self.layers(name))

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Count the tokens and the forward, and keep its decisions. This runs only after a forward that finished."""
        blocks = running().blocks
        if blocks is None or blocks.blocks is not self:
            return
        if blocks.staging:
            for adapter, tokens in blocks.counted:
                adapter.count_tokens(tokens)
            for name, config in self.active().items():
                if config.uses_centers:
                    pooled = blocks.statistics and not blocks.call.recorded
                    self.schedule.finish(name, config, self.layers(name), self.context, pooled)
        if blocks.fresh and blocks.kept is None:
            cache = getattr(output, "past_key_values", None)
            if cache is not None:
                setattr(cache, KEPT, (blocks.call.generation, blocks.fresh))

    def after_replay(self) -> None:
        """Make the statistics of a replayed forward those of all ranks, as a forward itself does at its end."""
        for name, config in self.active().items():
            if config.uses_centers:
                over_ranks(name, self.layers(name))

    def _look_ahead(
        self, blocks: BlocksCall, active: dict[str, MonkeyJumpConfig], shape: tuple[int, int], device: torch.device
    ) -> None:
        """Compute here what all blocks ask for, so that a compiled block only looks it up."""
        for name, config in active.items():
            if config.uses_centers and not (config.granularity == "sequence" and blocks.kept is not None):
                blocks.selection(name, config, shape, device)
            if not config.uses_centers and (blocks.staging or self.context.trace is not None):
                blocks.real_tokens(shape, device)

    def _argument(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        position = self._parameters.index(name) if name in self._parameters else len(args)
        return args[position] if position < len(args) else None

    def _kept_decisions(self, blocks: BlocksCall, width: int | None, adapter_name: str) -> Decisions | None:
        """The decisions that the cached keys and values were made with; None for a new prompt.

        A decision is made at the end of the whole prompt. Where only a part of the prompt is here, or the cache holds
        an earlier decision, the result could not be that of one prefill, so the forward is refused.
        """
        cache, generation = blocks.arguments["past_key_values"], blocks.call.generation
        kept: Any = getattr(cache, KEPT, None)
        if torch.compiler.is_compiling():  # the prefill has checked; a counter in a guard would recompile every time
            return None if kept is None else kept[1]
        past = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
        prompt = None if generation is None else generation.prompt_width
        here = past or width
        if past and kept is None:
            reason = f"the cache holds {past} tokens of a forward without that decision"
        elif past and generation is None and width != 1:
            reason = f"{width} tokens follow a cache of {past}: they may belong to the prompt"
        elif past and generation is not None and kept[0] is not generation:
            reason = f"the cache of {past} tokens was made for an earlier prompt"
        elif prompt is not None and here is not None and here < prompt:
            reason = f"a prompt of {prompt} tokens comes in parts (prefill_chunk_size)"
        else:
            return kept[1] if past else None
        raise ConfigError(
            f"adapter {adapter_name!r} routes whole sequences by the end of the prompt, but {reason}: give the whole "
            "prompt, or the whole conversation, in one forward without past_key_values, or use granularity='token'."
        )

    def _refuse_zero3(self, name: str) -> None:
        """ZeRO-3 frees a weight after the call of its own module; gates of mixtures are trained through several."""
        layer = next(iter(self.layers(name)), None)
        if layer is not None and any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
            raise ConfigError(
                f"adapter {name!r} trains a router, which DeepSpeed's ZeRO stage 3 does not gather for the backward "
                "pass: use ZeRO stage 2, FSDP2 or plain data parallelism, or a method with centres."
            )

    def _require_centers(self, name: str, config: MonkeyJumpConfig, staging: bool) -> None:
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
        elif staging or config.inference_mode:
            raise ConfigError(
                f"the centres of adapter {name!r} are not initialised (center_init={config.center_init!r}): call "
                "monkeyjump.initialize_centers(model, dataloader) before training, or give the Trainer a "
                "MonkeyJumpCallback()."
            )


def _decides_for_rows(config: MonkeyJumpConfig, call: ModelCall) -> bool:
    """Whether an adapter decides once for a whole row, by its prompt."""
    by_prompt = config.placement == "nested" and call.task_ids is None
    return by_prompt or (config.uses_centers and config.granularity == "sequence")


def _refuse_ragged_rows(active: dict[str, MonkeyJumpConfig]) -> None:
    """Continuous batching puts parts of many sequences into one row: nothing can be decided for that row."""
    for name, config in active.items():
        if reason := by_row(config):
            raise ConfigError(
                f"adapter {name!r} decides for whole rows ({reason}), but continuous batching puts the tokens of many "
                "sequences into one: use generate, or an adapter with granularity='token'."
            )


def by_row(config: MonkeyJumpConfig) -> str | None:
    """The setting by which an adapter decides once for a whole row of a batch, if it does."""
    if config.placement == "nested":
        return "placement='nested'"
    if (config.uses_centers and config.granularity == "sequence") or config.granularity == "task":
        return f"granularity={config.granularity!r}"
    return "router='shuffled'" if config.router == "shuffled" else None


def repeat_rows(cache: Any, rows: Tensor) -> None:
    """Repeat rows of a KV cache, with the decisions that belong to them, for several answers to one prompt."""
    cache.reorder_cache(rows)
    kept = getattr(cache, KEPT, None)
    if kept is not None:
        setattr(cache, KEPT, (kept[0], {key: made[rows.to(made.device)] for key, made in kept[1].items()}))
