"""MonkeyJumpConfig: every field, its help text and all validation of values.

What depends on the model (do the modules exist, are there enough of them to route) is checked in `tuner/placement.py`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peft.config import PeftConfig
from peft.utils.peft_types import PeftType

from monkeyjump.card import complete_card, published
from monkeyjump.config_options import KINDS, OPTION_NAMES, OptionKinds, place_options, read_options
from monkeyjump.config_rules import (
    LEARNED_ROUTERS,
    choice,
    config_problems,
    described,
    flag,
    fraction,
    integer,
    is_int,
    names,
    numbers,
    positive,
    setting,
    weight,
)
from monkeyjump.errors import ConfigError, MonkeyJumpWarning
from monkeyjump.registry import ADAPTERS


def extend_peft_types(name: str) -> PeftType:
    """Add `name` to the enum `PeftType` unless it is there, and return the member.

    PEFT keys its tables with members of the enum and refuses names it does not know; Transformers reads `.value` of the
    same member. A plain string would load but break `delete_adapter` and `load_adapter`.
    """
    if name in PeftType.__members__:
        return PeftType[name]
    member = str.__new__(PeftType, name)
    member._name_ = name
    member._value_ = name
    member._sort_order_ = len(PeftType.__members__)  # type: ignore[attr-defined]
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    type.__setattr__(PeftType, name, member)
    return member


PEFT_TYPE = extend_peft_types("MONKEYJUMP")
FORMAT = 1  # of a saved adapter, settings and tensors: one more where the same names come to mean something else
NAMES_OR_PATTERN = ("a list of names or a text", "e.g. ['q_proj', 'v_proj'], or 'all-linear'")
BLOCKS = (None, 0, "a list of block numbers >= 0", "count blocks from 0")


@dataclass
class MonkeyJumpConfig(PeftConfig, OptionKinds):
    """A JSON-able configuration of one Monkey Jump adapter.

    The defaults are the paper's. Every projection named in `target_modules` gets one adapter; those in
    `shared_modules` are always on, the others are the experts that tokens are routed to, block by block.
    What only one adapter or one baseline reads is in `adapter_options` and `method_options`. Its names are also taken
    as keywords, as they were when they were fields: `MonkeyJumpConfig(router="linear", aux_loss_weight=0.01)`.
    """

    # The adapters and where they are
    adapter: str = setting(f"What one expert adds to one linear: {', '.join(ADAPTERS)}.", "lora")
    r: int = integer("Rank of the adapters (unused by propulsion).", 2, 1, "use 1 or more")
    alpha: float = positive("The delta is multiplied by alpha / r (unused by propulsion).", 5.0, "the paper uses 5")
    dropout: float = fraction("Dropout on the adapter's input (unused by propulsion).", 0.05, "0 switches dropout off")
    adapter_options: dict[str, Any] | None = setting(
        "Settings that only the chosen adapter has, e.g. {'d_initial': 0.1} for vera; see docs/adapters.md."
    )
    target_modules: list[str] | str | None = names(
        "Modules to adapt: names (suffix match), a regular expression, 'all-linear', or None for the model's default. "
        "Of the last two, what cannot be routed is always on.", *NAMES_OR_PATTERN, lone=True,
    )  # fmt: skip
    exclude_modules: list[str] | str | None = names(
        "Modules never to adapt, matched like target_modules.", *NAMES_OR_PATTERN, lone=True
    )
    shared_modules: list[str] | None = names(
        "Targets that are always on, with gate 1. [] routes every target, and so does None beside a target_modules; "
        "with default targets None shares what the paper shares: o_proj and gate_proj on Llama-like models.",
        "a list of names", "write ['o_proj']",
    )  # fmt: skip
    layers_to_transform: list[int] | int | None = numbers("Blocks that get adapters; None = all.", *BLOCKS, lone=True)
    layers_pattern: list[str] | str | None = names(
        "Name of the block list, where layers_to_transform is ambiguous.", "a name or a list of them", "e.g. 'layers'",
        lone=True,
    )  # fmt: skip
    layers_to_route: list[int] | int | None = numbers(
        "Blocks that route, the others are plain PEFT; None = all, [] = none.", *BLOCKS, lone=True
    )
    modules_to_save: list[str] | None = names(
        "Further modules to train and save whole, e.g. a new head.", "a list of names", "write ['lm_head']"
    )

    # Who is chosen, and how strongly
    top_k: int | None = integer(
        "How many experts a token jumps to; None, for learned routers: all of them.", 2, 1,
        "use 1 or more, or None with a learned router; for always-on adapters set layers_to_route=[]", none=True,
    )  # fmt: skip
    expert_unit: str = choice(
        "What a token jumps to: a projection's adapter, or each rank-one part of it, with a centre of its own.",
        *("adapter", "rank"),
    )
    temperature: float = positive("Softmax temperature of the similarities.", 1.0, "the paper uses 1")
    similarity: str = choice("Token against centre", "cosine", "dot", "euclidean", "l1")
    renormalize: bool = flag("Divide the kept gates by their sum (the paper does not).")
    mean_gate: float | None = positive(
        "router='centroid': scale each token's gates to this mean over the routed projections, which renormalises them "
        "too; 1 keeps the strength of an adapter trained without gates. None leaves them as they come.", None,
        "1 keeps the strength of plain PEFT, None leaves the gates as they come",
    )  # fmt: skip
    jitter: float = weight("Deviation of noise on the logits, in training only.", 0.0, "0 switches the noise off")
    granularity: str = choice("Who decides", "token", "sequence", "task")
    sequence_token: str = choice("granularity='sequence': the state that decides", "prompt", "last", "mean", "max")
    task_experts: list[int] | int | None = numbers(
        "granularity='task': the expert (by position) of each task id. Or a number of groups that experts are dealt "
        "out to in turn: task i takes all of group i mod groups; where centres decide, a group has a centre and top_k "
        "counts groups. None: task i takes expert i mod E, and every expert has its centre.", None, 0,
        "one expert position >= 0 per task id, or the number of groups", "e.g. [0, 1, 2], or 2", lone=True, empty=False,
    )  # fmt: skip
    route_space: str = choice(
        "raw (the paper), or centered: less the mean token, estimated at initialisation.", "raw", "centered"
    )

    # Where the centres start, and how they follow the tokens
    center_init: str = choice("How centres start", "kmeans", "random", "random_normalized", "random_tokens")
    init_tokens: int | None = integer(
        "Tokens the centres start from. None: the paper's 50,000, or on a CPU as many as it reads in about a minute. "
        "With granularity='sequence' it counts texts; None: 5,000, or a few hundred on a CPU.",
        None, 1, "the paper uses 50000", none=True,
    )  # fmt: skip
    balance_kinds: bool = flag(
        "Where a model reads pictures or clips: tokens of text, image and video count alike for the centres.", True
    )
    ema_momentum: float = fraction(
        "Weight of the old centre in one update.", 0.5, "the paper uses 0.5; to freeze the centres set ema_stop=0"
    )
    ema_interval: int = integer("Training forwards per update.", 2, 1, "1 updates after every training forward")
    ema_stop: int = integer("No update after this many training forwards.", 5_000, 0, "0 never moves the centres")
    ema_assign: str = choice(
        "Tokens that move a centre: all routed to it (topk), or those it is first for (top1).", "topk", "top1"
    )
    ema_space: str = choice(
        "normalized: centres and means are of L2-normalised tokens; raw: of tokens as they are.", "normalized", "raw"
    )

    # Other methods than Monkey Jump: controls and baselines
    router: str = choice(
        "centroid: tokens against centres (Monkey Jump); linear: a learned softmax; sigmoid: learned gates, each for "
        "itself (MoA); lime: the projection's own outputs (LiME). Controls: uniform, one constant gate; shuffled, the "
        "centroid gates of other tokens.",
        *("centroid", "uniform", "shuffled", *LEARNED_ROUTERS),
    )
    placement: str = choice(
        "block: every routed projection is one expert (Monkey Jump); projection: N experts on each projection; ffn: N "
        "whole feed-forwards per block (MixLoRA); nested: the first ranks of one adapter, by task (MoRE).",
        *("block", "projection", "ffn", "nested"),
    )
    experts: int | list[int] = numbers(
        "placement='projection' or 'ffn': experts N; a list is spread over the blocks in equal parts (MoLA).",
        4, 1, "an integer >= 1, or a list of them spread over the blocks", "4 is the default", lone=True, empty=False,
    )  # fmt: skip
    method_options: dict[str, Any] | None = setting(
        "Settings that only this router or placement has, e.g. {'aux_loss_weight': 0.01}; see docs/methods.md."
    )

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:  # a task_type that PEFT does not know
            raise ConfigError(f"task_type={self.task_type!r}: {error}", title="invalid MonkeyJumpConfig") from None
        self.peft_type = PEFT_TYPE
        for name in ("target_modules", "exclude_modules", "shared_modules", "modules_to_save", "experts"):
            value = getattr(self, name)
            if isinstance(value, (set, tuple, frozenset)):
                setattr(self, name, sorted(value) if isinstance(value, (set, frozenset)) else list(value))
        for name in ("layers_to_transform", "layers_to_route"):
            value = getattr(self, name)
            value = [value] if isinstance(value, int) else value
            if isinstance(value, (list, set, tuple, frozenset, range)):
                setattr(self, name, sorted(value) if all(map(is_int, value)) else list(value))
        place_options(self, *self.__dict__.pop("_given_options", ({}, False)))
        problems = [*config_problems(self), *read_options(self)]
        if problems:
            raise ConfigError(problems, title="invalid MonkeyJumpConfig")

    @property
    def scaling(self) -> float:
        return self.alpha / self.r

    @property
    def groups(self) -> int | None:
        """How many groups share a centre, where centres decide and experts are dealt out to groups."""
        return self.task_experts if self.uses_centers and isinstance(self.task_experts, int) else None

    @property
    def units(self) -> int:
        """Experts that one routed projection is for a router without parameters."""
        return self.r if self.expert_unit == "rank" else 1

    @property
    def uses_centers(self) -> bool:
        return self.placement == "block" and self.router in ("centroid", "shuffled") and self.granularity != "task"

    @property
    def learns_router(self) -> bool:
        return self.placement != "nested" and self.router in LEARNED_ROUTERS

    @property
    def contrastive_weight(self) -> float:
        """The weight of the contrastive loss, which two placements have."""
        return self.more.contrastive_weight if self.placement == "nested" else self.projection.contrastive_weight

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "format_version": FORMAT}

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the configuration, and beside it a card that says what this is and which import loading needs.

        A base model that this library keeps in its cache is named as other machines know it, not by its folder here.
        """
        here = self.base_model_name_or_path
        self.base_model_name_or_path = published(here) or here
        try:
            super().save_pretrained(save_directory, **kwargs)
        finally:
            self.base_model_name_or_path = here
        complete_card(Path(save_directory), self)  # PEFT has written one by now; Transformers writes none


def _take_options_as_keywords(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor with every option as a keyword too; the signature stays that of the fields.

    PEFT drops what it does not find in the signature as soon as a file holds one unknown name. Unknown names of a file
    (it spells its `peft_type`) are therefore dropped here, with PEFT's warning, before PEFT would drop the options.
    """

    @functools.wraps(init)
    def constructor(self: MonkeyJumpConfig, *args: Any, **given: Any) -> None:
        version = given.pop("format_version", 1)  # the first files have none
        if type(version) is not int or not 1 <= version <= FORMAT:
            raise ConfigError(
                f"format_version={version!r} of a saved adapter: this version of monkeyjump reads 1"
                f"{f' to {FORMAT}' if FORMAT > 1 else ''}. Update monkeyjump to read adapters of later versions.",
                title="invalid MonkeyJumpConfig",
            )
        saved = type(given.get("peft_type")) is str  # a copied configuration has PEFT's enumeration there
        self.__dict__["_given_options"] = {name: given.pop(name) for name in OPTION_NAMES if name in given}, saved
        unknown = sorted(given.keys() - {field.name for field in fields(self)}) if saved else []
        if unknown:
            message = f"Unexpected keyword arguments {unknown} for class MonkeyJumpConfig: ignored."
            warnings.warn(message, MonkeyJumpWarning, stacklevel=2)
        init(self, *args, **{name: value for name, value in given.items() if name not in unknown})

    return constructor


MonkeyJumpConfig.__init__ = _take_options_as_keywords(MonkeyJumpConfig.__init__)  # type: ignore[method-assign]
_kinds = [f"method_options with {kind.needs}:\n{described(fields(kind))}" for kind in KINDS.values()]
MonkeyJumpConfig.__doc__ = "\n\n".join(
    [inspect.cleandoc(MonkeyJumpConfig.__doc__ or ""), described(fields(MonkeyJumpConfig)), *_kinds]
)
