"""The PEFT tuner: it plans where adapters go, injects them, and keeps PEFT's promises for routed adapters."""

from __future__ import annotations

import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from peft.peft_model import PeftModel
from peft.tuners.tuners_utils import BaseTuner, _maybe_include_all_linear_layers, onload_layer
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.quantization_utils import get_quantization_kwargs
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from monkeyjump.adapters import ADAPTERS, Adapter
from monkeyjump.adapters.moa import AttentionPrompt, ParallelBottleneck
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.errors import ConfigError
from monkeyjump.routing.learned import LearnedRouter
from monkeyjump.routing.more_ranks import RankSelector
from monkeyjump.tuner.centers.calibrate import draw_random_centers, needs_no_data
from monkeyjump.tuner.context import RoutingContext
from monkeyjump.tuner.default_targets import DEFAULT_TARGETS, leaves_targets_open, settle, shares_as_the_paper
from monkeyjump.tuner.layer import MonkeyJumpLayer
from monkeyjump.tuner.mixed_batch import check, mixing
from monkeyjump.tuner.module_paths import block_of, language_path, matches, outside_language, owner_of
from monkeyjump.tuner.placement import Block, Placement, place
from monkeyjump.tuner.routers.base import BlockRouter
from monkeyjump.tuner.routers.centroid import CentroidRouter
from monkeyjump.tuner.routers.learned import LearnedRouterOfBlock
from monkeyjump.tuner.routers.mixlora import FeedForwardExperts, IdleRouter
from monkeyjump.tuner.routers.moa import MoaRouter
from monkeyjump.tuner.routers.more import MoreRouter

COMPILED = "_orig_mod."  # torch.compile puts this before the paths of a model's modules


class MonkeyJumpModel(BaseTuner):
    """Puts a MonkeyJumpLayer on every target and a router on every block that routes."""

    prefix = "monkeyjump_"
    tuner_layer_cls = MonkeyJumpLayer
    target_module_mapping: Any = ChainMap(  # noqa: RUF012 - declared on the instance by PEFT
        DEFAULT_TARGETS, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    )

    routing: RoutingContext

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, **kwargs: Any) -> None:
        super().__init__(model, peft_config, adapter_name, **kwargs)
        _call_when_wrapped(self)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Check everything, then inject: a configuration that does not fit leaves the model as it was."""
        config = cast(MonkeyJumpConfig, self.peft_config[adapter_name])
        _check_name(adapter_name, config)
        plain = getattr(model, COMPILED.rstrip("."), model)
        is_open, paper = leaves_targets_open(config), shares_as_the_paper(config)
        self._language = language_path(plain)
        self._prepare_adapter_config(config, self.get_model_config(plain))
        is_target = self._target_test(plain, config, kwargs.get("state_dict"))
        if is_open:
            settle(plain, config, is_target, paper)
        placement = place(plain, config, is_target)
        self._placement = placement
        existing = find_context(plain)
        self.routing = existing if existing is not None else RoutingContext(plain)
        try:
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        except BaseException:
            if existing is None:
                self.routing.remove()
            raise
        self._connect(plain, adapter_name, config, placement)

    @classmethod
    def get_model_config(cls, model: nn.Module) -> dict:
        """The configuration that default targets go by: of the language model, where there are others beside it."""
        found = BaseTuner.get_model_config(model)
        return found if language_path(model) is None else {**found, "model_type": found["text_config"]["model_type"]}

    def _check_target_module_exists(self, peft_config: Any, key: str) -> Any:  # type: ignore[override]
        """PEFT's test, but a plain name means projections of the language model: a pattern, or a path, means others."""
        found = BaseTuner._check_target_module_exists(peft_config, key)
        names = peft_config.target_modules
        if found and not isinstance(names, str) and outside_language(key.removeprefix(COMPILED), self._language):
            return any("." in name and matches(key, name) for name in names or ())
        return found

    def _target_test(
        self, model: nn.Module, config: MonkeyJumpConfig, state_dict: dict[str, torch.Tensor] | None
    ) -> Callable[[str], bool]:
        """Return a test of whether the module at a path gets an adapter, by the configuration or the loaded tensors."""
        if isinstance(config.target_modules, str) and leaves_targets_open(config):
            _maybe_include_all_linear_layers(config, model)
            # PEFT recognises an adapted linear layer by the name of its class, and does not know ours.
            head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
            adapted = {path for path, module in model.named_modules() if isinstance(module, MonkeyJumpLayer)}
            config.target_modules |= {path for path in adapted if model.get_submodule(path) is not head}  # type: ignore[operator]
        if state_dict is None:
            return lambda path: bool(self._check_target_module_exists(config, path))
        adapted = {key.rsplit(f".{self.prefix}", 1)[0].removeprefix(COMPILED) for key in state_dict}
        return lambda path: path in adapted

    def _create_and_replace(  # type: ignore[override]
        self,
        peft_config: MonkeyJumpConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        current_key = current_key.removeprefix(COMPILED)
        role = self._placement.role(current_key)
        layer = target
        if not isinstance(layer, MonkeyJumpLayer):
            layer = MonkeyJumpLayer(target, self.routing, get_quantization_kwargs(self.model), current_key)
        layer.update_layer(adapter_name, peft_config, role, inference_mode=peft_config.inference_mode)
        if adapter_name not in self.active_adapters:
            for container in (getattr(layer, part) for part in layer.adapter_layer_names):
                if adapter_name in container:
                    container[adapter_name].requires_grad_(False)
        if layer is not target:
            self._replace_module(parent, target_name, layer, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        """PEFT moves weights from the child to the new module; a module that was trained as a whole brings its own."""
        if isinstance(child, ModulesToSaveWrapper):
            setattr(parent, child_name, new_module)
        else:
            super()._replace_module(parent, child_name, new_module, child)

    def _connect(self, model: nn.Module, adapter_name: str, config: MonkeyJumpConfig, placement: Placement) -> None:
        for block in placement.blocks:
            layers = [model.get_submodule(path) for path in block.routed or (block.host,)]
            router = self.routing.router(model, block, router_class(config, block))
            router.add(adapter_name, config, block, layers)  # type: ignore[arg-type]
        modules = dict(model.named_modules())
        homes = {block_of(path, modules) for path in placement.targets}
        for home in sorted(home for home in homes if home is not None):
            holder = home.rpartition(".")[0]
            blocks = self.routing.block_list(model, owner_of(home, modules))
            blocks.hold(modules[holder], modules[holder.rpartition(".")[0]])
        adapted = [module for module in modules.values() if isinstance(module, MonkeyJumpLayer)]
        self.routing.shared_inputs.plan(adapter_name, [m for m in adapted if adapter_name in m.monkeyjump_adapter])
        if ADAPTERS.get(config.adapter).auxiliary_loss is not Adapter.auxiliary_loss:
            self.routing.regularized = True
        if config.uses_centers and needs_no_data(config):
            draw_random_centers(self.routing, adapter_name, seed=0)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Let the rows of a call have adapters of their own, where PEFT hands over `adapter_names`."""
        names = kwargs.get("adapter_names")
        if names is None:
            yield
        else:
            with mixing(self.routing, self.model, check(self.model, names, self._language)):
                yield

    def _unload_and_optionally_merge(  # type: ignore[override]
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        if merge:
            self._check_all_mergeable(adapter_names, safe_merge)
        super()._unload_and_optionally_merge(merge=merge, progressbar=progressbar, adapter_names=adapter_names)
        self.routing.remove()
        return self.model

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        self._check_all_mergeable(adapter_names, safe_merge)
        super().merge_adapter(adapter_names=adapter_names)

    def _check_all_mergeable(self, adapter_names: Sequence[str] | None, safe_merge: bool) -> None:
        """Refuse before any layer is merged, so that a refusal leaves nothing half merged."""
        for layer in self.model.modules():
            if isinstance(layer, MonkeyJumpLayer):
                with onload_layer(layer):
                    layer.check_merge(list(adapter_names or layer.active_adapters), safe_merge)

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what PEFT's LoRA and (IA)3 offer: the centres and routers of two adapters have no weighted mean."""
        raise ConfigError(
            "add_weighted_adapter is not offered for Monkey Jump adapters, whose routing cannot be averaged: make "
            "several adapters active together, model.base_model.set_adapter([...]), which adds what they do."
        )

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        remapped = super()._remap_adapter_state_dict_for_load(
            model=model, config=config, adapter_name=adapter_name, state_dict=state_dict
        )
        _check_checkpoint(model, config, adapter_name, remapped)
        return remapped


def router_class(config: MonkeyJumpConfig, block: Block) -> type[BlockRouter]:
    """The class of the router that turns the states entering a block into gates."""
    if config.placement == "nested":
        return MoreRouter
    if block.extras:
        return MoaRouter
    if config.placement == "ffn":
        return FeedForwardExperts if block.routed else IdleRouter
    if config.placement == "projection" or config.learns_router:
        return LearnedRouterOfBlock
    return CentroidRouter


def find_context(model: nn.Module) -> RoutingContext | None:
    """The routing state of a model, however its adapters came onto it; None if it has none."""
    for module in model.modules():
        if isinstance(module, MonkeyJumpLayer):
            return module.context
    return None


def require_context(model: nn.Module) -> RoutingContext:
    context = find_context(model)
    if context is None:
        raise ConfigError(
            f"this {type(model).__name__} carries no Monkey Jump adapter: wrap it with "
            "peft.get_peft_model(model, MonkeyJumpConfig(...)) first."
        )
    return context


def _call_when_wrapped(tuner: MonkeyJumpModel) -> None:
    """Hook into the PeftModel that takes this tuner as its child, if one does (native injection never does)."""
    reference = weakref.ref(tuner)

    def on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(child, MonkeyJumpModel) and child is reference():
            handle.remove()
            if isinstance(parent, PeftModel):
                child.routing.adopt(parent)

    handle = register_module_module_registration_hook(on_registration)
    weakref.finalize(tuner, handle.remove)


@cache
def _built_in_names() -> frozenset[str]:
    """The names of all tensors that the adapters and routers of this library have."""
    sigmoid = MonkeyJumpConfig(router="sigmoid", method_options={"router_hidden": "swiglu", "threshold": 0.5})
    with torch.device("meta"):
        owners: list[nn.Module] = [
            ADAPTERS.get(kind)(1, 1, MonkeyJumpConfig()) for kind in ADAPTERS if ADAPTERS.built_in(kind)
        ]
        owners += [LearnedRouter(1, 1, sigmoid), RankSelector(1, 1, 1, "none")]
        owners += [ParallelBottleneck(1, 1), AttentionPrompt(1, 1, 1)]
    return frozenset(name for owner in owners for name in owner.state_dict())


def _check_name(adapter_name: str, config: MonkeyJumpConfig) -> None:
    """Refuse the name of a tensor: PEFT finds an adapter's tensors by parts of their keys and would mix them up."""
    with torch.device("meta"):
        own: nn.Module = ADAPTERS.get(config.adapter)(1, 1, config)
    taken = sorted({*_built_in_names(), *own.state_dict()})
    if adapter_name in taken:
        raise ConfigError(
            f"adapter name {adapter_name!r} is also the name of a tensor of an adapter or router ({', '.join(taken)}): "
            "saving would mix them up; choose another name."
        )


def _check_checkpoint(
    model: nn.Module, config: MonkeyJumpConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
) -> None:
    """A saved adapter must hold everything this model's adapter has, in the same shapes, and nothing more."""
    marker = MonkeyJumpModel.prefix
    own = {
        key: value
        for key, value in model.state_dict().items()
        if f".{marker}" in f".{key}" and (f".{adapter_name}." in key or key.endswith(f".{adapter_name}"))
    }
    saved = {key: value for key, value in state_dict.items() if f".{marker}" in f".{key}"}
    missing = sorted(set(own) - set(saved))
    foreign = sorted(set(saved) - set(own))
    wrong = [key for key in own if key in saved and own[key].shape != saved[key].shape]
    problems = []
    if wrong:
        key = wrong[0]
        problems.append(
            f"{len(wrong)} tensors have another shape than in this model, e.g. {key}: saved {tuple(saved[key].shape)}, "
            f"here {tuple(own[key].shape)}. The adapter was made for base model {config.base_model_name_or_path!r} "
            "and the configuration beside it: load that model."
        )
    broken = [key for key, value in saved.items() if not torch.isfinite(value).all()]
    if broken:
        problems.append(
            f"{len(broken)} tensors of the saved adapter hold NaN or infinity, e.g. {broken[0]}: the training "
            "diverged, or the file is damaged; take an earlier checkpoint."
        )
    centers = [key for key in missing if "monkeyjump_center" in key or "monkeyjump_step" in key]
    if centers:
        problems.append(
            f"the saved adapter has no centres for {len(centers)} of its projections, e.g. {centers[0]}: it is "
            "incomplete; save it again with model.save_pretrained, or call initialize_centers on a new adapter."
        )
    rest = [key for key in missing if key not in centers]
    if rest:
        problems.append(f"the saved adapter lacks {len(rest)} tensors of this one, e.g. {rest[0]}.")
    if foreign:
        problems.append(
            f"the saved adapter holds {len(foreign)} tensors this model has no place for, e.g. {foreign[0]}: is this "
            f"the base model it was made for ({config.base_model_name_or_path!r})?"
        )
    if problems:
        raise ConfigError(problems, title=f"adapter {adapter_name!r} cannot be loaded into this model")
