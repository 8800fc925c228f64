"""The loss of a causal language model without its logits, for training forwards only, on any Transformers model.

A causal model of Transformers ends in `logits = self.lm_head(hidden)` and `loss = self.loss_function(logits, labels)`.
While a FusedLoss is installed, a training forward with labels passes the hidden states through the head untouched and
the loss function makes the loss from them and the head's weight. No model code is replaced, so everything around it
stays: routers' losses are added to the loss as before, and a forward without labels or in evaluation has its logits.
Only tokens that have a label go through the head; of a question and its answer these are few.
A model that does anything to the logits before the loss (soft-capping, scaling) is recognised by the tensor that
reaches the loss not being the one that left the head, and refused before training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.forward import evaluating
from monkeyjump.evaluation.run import has_adapter, without_adapter
from monkeyjump.ops.linear_cross_entropy import IGNORE, linear_cross_entropy
from monkeyjump.tuner.model import find_context

Kernel = Callable[..., torch.Tensor]  # with the arguments of `linear_cross_entropy`
_PLACES = 256  # on a GPU numbers of tokens that go through the head are multiples of this: memory is used again


class UnsupportedModelError(Exception):
    """Why a model's loss cannot be fused."""


def choose_kernel(setting: bool | str, on_gpu: bool) -> str:
    """What `train.fused_loss` means on this machine: "off", "torch" or "liger"."""
    if setting in (False, "off"):
        return "off"
    installed = find_spec("liger_kernel") is not None
    if setting == "liger" and not (installed and on_gpu):
        lacking = "a GPU" if installed else "the package liger-kernel"
        raise ConfigError(
            f"train.fused_loss='liger' needs {lacking}: {'run on one' if installed else 'pip install liger-kernel'}, "
            "or choose 'torch' or 'auto'."
        )
    return "liger" if setting != "torch" and installed and on_gpu else "torch"


@contextmanager
def fused_loss(model: Any, setting: bool | str, on_gpu: bool, evaluation: bool = False) -> Iterator[str]:
    """Train inside with the loss that `setting` asks for; yields what it came to: "off", "torch" or "liger".

    With `evaluation` a model in evaluation mode has it, too, for whoever wants gradients without dropout.
    """
    chosen = choose_kernel(setting, on_gpu)
    if chosen == "off":
        yield chosen
        return
    fused = FusedLoss(model, liger_kernel if chosen == "liger" else linear_cross_entropy)
    try:
        fused.check()
    except UnsupportedModelError as problem:
        if setting != "auto":
            raise ConfigError(
                f"train.fused_loss={setting!r} does not fit this model: {problem}. Set train.fused_loss=false."
            ) from None
        print(f"the loss is not fused: {problem}")
        yield "off"
        return
    with fused.installed():
        fused.forced = evaluation
        yield chosen


def liger_kernel(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None, *, divisor: Any
) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE, reduction="mean" if divisor is None else "sum")
    value = loss(weight, hidden, targets, bias)
    return value if divisor is None else value / divisor


class LabelCount:
    """How many tokens of a batch have a label. It is asked for before the blocks run and read after they were launched,
    so that the host waits for no more than the end of the step before."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.number, self.copied = torch.count_nonzero(labels != IGNORE), None
        blind = torch.compiler.is_compiling() or (labels.is_cuda and torch.cuda.is_current_stream_capturing())
        self.known = not blind
        if labels.is_cuda and self.known:
            self.number = torch.empty((), dtype=torch.long, pin_memory=True).copy_(self.number, non_blocking=True)
            self.copied = torch.cuda.current_stream(labels.device).record_event()

    def places(self, targets: torch.Tensor) -> torch.Tensor | None:
        """Where the targets [N] that count are, on a GPU filled up to a multiple of 256 with others; None: take all."""
        if not self.known:
            return None
        multiple = 1
        if self.copied is not None:
            self.copied.synchronize()
            multiple = _PLACES
        number = -(-max(1, int(self.number)) // multiple) * multiple
        if 2 * number > targets.shape[0]:
            return None
        return (targets == IGNORE).to(torch.uint8).sort(stable=True).indices[:number]


class FusedLoss:
    """The head and the loss function of one model, joined while `installed`."""

    def __init__(self, model: Any, kernel: Kernel) -> None:
        self.model = model
        self.base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.head: Any = self.base.get_output_embeddings()
        self.kernel = kernel
        self.forced = False  # fuse in evaluation, too
        self._active = False  # whether this forward is fused
        self._hidden: torch.Tensor | None = None  # what the head was given in this forward
        self._used = False
        self._labels: LabelCount | None = None  # of this forward

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Shadow the head's forward and the model's loss function on the instances; take both back at the end."""
        places = ((self.head, "forward"), (self.base, "_loss_function"))
        before = [vars(holder).get(name) for holder, name in places]
        self._project_all, self._plain_loss = self.head.forward, self.base.loss_function
        self.head.forward = self._project
        self.base._loss_function = self._loss
        handles = [
            self.base.register_forward_pre_hook(self._before, with_kwargs=True),
            self.base.register_forward_hook(self._after, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for (holder, name), shadowed in zip(places, before, strict=True):
                delattr(holder, name)
                if shadowed is not None:
                    setattr(holder, name, shadowed)

    def check(self) -> None:
        """Raise UnsupportedModelError unless the fused loss of three tokens is the ordinary one."""
        weight = getattr(self.head, "weight", None)
        if not isinstance(self.head, nn.Linear) or not isinstance(weight, torch.Tensor):
            raise UnsupportedModelError(f"its output layer is no plain linear layer but a {type(self.head).__name__}")
        if not weight.is_floating_point() or weight.shape != (self.head.out_features, self.head.in_features):
            raise UnsupportedModelError("its output layer is quantised")
        if any(parameter.requires_grad for parameter in self.head.parameters()):
            raise UnsupportedModelError("its output layer is trained")
        if self.base.loss_function is not ForCausalLMLoss:
            raise UnsupportedModelError("its loss is not that of a causal language model")
        expected = self._probe()
        with self.installed():
            self.forced, self._used = True, False
            try:
                found = self._probe()
            finally:
                self.forced = False
        if not self._used:
            raise UnsupportedModelError("its forward does not go through lm_head and loss_function")
        if not torch.allclose(found, expected, rtol=2e-2, atol=2e-2):
            raise UnsupportedModelError(f"fused and ordinary loss differ ({float(found):.4f}, {float(expected):.4f})")

    def _probe(self) -> torch.Tensor:
        """The loss of three tokens, in evaluation and without gradients: nothing of the model moves."""
        device = self.head.weight.device
        ids = torch.arange(3, device=device).unsqueeze(0)
        extras = {"task_ids": torch.zeros(1, dtype=torch.long, device=device)} if find_context(self.model) else {}
        devices = [device] if device.type == "cuda" else []
        # without adapters, whose kernels would be compiled for three tokens
        off = without_adapter(self.model) if has_adapter(self.model) else nullcontext()
        with evaluating(self.model), off, torch.random.fork_rng(devices=devices):
            return self.model(input_ids=ids, labels=ids.clone(), use_cache=False, **extras).loss.float()

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        trains = self.forced or (module.training and torch.is_grad_enabled())
        labels: torch.Tensor | None = kwargs.get("labels") if trains else None
        self._active = labels is not None
        shifted = kwargs.get("shift_labels") is not None
        self._labels = None if labels is None or shifted else LabelCount(labels)

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._active:
            return self._project_all(hidden)
        self._hidden = hidden
        return hidden

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """In the place of `ForCausalLMLoss`, whose options Transformers names."""
        if not self._active:
            return self._plain_loss(logits, labels, *args, **options)
        if logits is not self._hidden:
            raise UnsupportedModelError("it changes the logits between lm_head and the loss")
        self._used = True
        shift_labels, ignore_index = options.get("shift_labels"), options.get("ignore_index", IGNORE)
        num_items_in_batch = options.get("num_items_in_batch")
        if shift_labels is None:  # token n is what the tokens before it predict
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        if ignore_index != IGNORE:
            targets = targets.masked_fill(targets == ignore_index, IGNORE)
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(logits.device)
        hidden = logits.reshape(-1, logits.shape[-1])
        kept = None if self._labels is None else self._labels.places(targets)
        if kept is not None:
            hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
        return self.kernel(hidden, self.head.weight, targets, self.head.bias, divisor=num_items_in_batch)

    def _after(self, module: nn.Module, args: tuple, output: Any) -> Any:
        fused, self._active, self._hidden = self._active and self._hidden is not None, False, None
        self._labels = None
        if fused and isinstance(output, ModelOutput):  # hidden states must not pass for logits
            return type(output)(**{**output, "logits": None})
        if fused and isinstance(output, tuple):
            return (output[0], None, *output[2:])
        return output
