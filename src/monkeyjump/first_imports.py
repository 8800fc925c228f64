"""The first imports of torch, Transformers and PEFT, which are most of a start."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Imports inside make nearly a million objects that stay for good, so the garbage collector leaves them alone.

    That takes 0.9 s off the 5.1 s of `train`'s imports, and 0.3 s off every full collection later (measured on a CPU).
    """
    if "torch" in sys.modules:  # they were imported already, and what a running program has made may be garbage
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extensions complain of what is never freed
        gc.enable()


def without_advice_to_others() -> None:
    """Do not show a person what these packages say about each other."""
    for name in ("torchao", "torch.utils._pytree"):  # on import: about builds of torchao
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
    # PEFT 0.21 asks Transformers from 5.23 on by a name that is going away
    warnings.filterwarnings("ignore", r".is_gradient_checkpointing. is deprecated", FutureWarning)
