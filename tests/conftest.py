"""Settings of the whole suite."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# No test may reach for the network: set before anything imports huggingface_hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU the kernels run in Triton's interpreter, which it decides on when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _prepare_the_language_once() -> None:
    """Triton's interpreter replaces its language for every function that a kernel calls: a third of its time.

    What it replaces depends on the module of the function alone and stays until the launch is over.
    """
    from triton.runtime import interpreter

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()

    def once(fn: Any) -> Any:
        if id(fn.__globals__) in done:
            return None  # only a launch asks what to put back, and it is the first
        done.add(id(fn.__globals__))
        return replace(fn)

    def fresh(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, fresh


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    _prepare_the_language_once()


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """Our own warnings are errors, whoever they are attributed to.

    The settings file cannot say so: pytest would import the package to find the class before this file is read.
    """
    config.addinivalue_line("filterwarnings", "error::monkeyjump.errors.MonkeyJumpWarning")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What one test compiled must not serve, or be counted in, the next."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
