"""This module decides whether torch or Triton computes, and has the switch for users who know better.

The switch is `MONKEYJUMP_OPS=torch|triton|auto`, or `with implementation("torch"): ...` around the calls, which wins.
`auto` takes the kernels on a CUDA device.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from monkeyjump.errors import ConfigError

HAS_TRITON = importlib.util.find_spec("triton") is not None  # searched for here, since a compiler cannot trace it
CHOICES = ("auto", "torch", "triton")
_override: str | None = None


@contextmanager
def implementation(choice: str) -> Iterator[None]:
    """Use one implementation of every op inside, whatever the environment says."""
    global _override  # noqa: PLW0603 - a switch of the process, like the environment variable it overrules
    before = _override
    _override = _checked(choice, "implementation")
    try:
        yield
    finally:
        _override = before


def uses_kernels(x: Tensor) -> bool:
    """Whether Triton kernels work on x. They do not follow autocast, so what autocast would cast is left to torch."""
    choice = _override or ENVIRONMENT
    if choice == "torch" or type(x) not in PLAIN or autocast_dtype(x) not in (None, x.dtype):
        return False
    if choice == "auto":
        return x.is_cuda and HAS_TRITON and x.dtype in KERNEL_DTYPES
    if not HAS_TRITON or not (x.is_cuda or interpreted()):
        raise ConfigError(
            f"MONKEYJUMP_OPS=triton cannot run on a {x.device.type} tensor here: Triton "
            f"{'is not installed' if not HAS_TRITON else 'needs a GPU, or TRITON_INTERPRET=1 for tests'}. "
            "Use MONKEYJUMP_OPS=auto."
        )
    return x.dtype in KERNEL_DTYPES


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts the operands of a product with x; None where autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = (Tensor, torch.nn.Parameter)  # a tensor of another class (sharded, quantised) has no memory of its own


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _checked(choice: str, field: str) -> str:
    if choice not in CHOICES:
        raise ConfigError(f"{field}={choice!r} is not known: use one of {', '.join(CHOICES)}.")
    return choice


ENVIRONMENT = _checked(os.environ.get("MONKEYJUMP_OPS", "auto"), "MONKEYJUMP_OPS")
