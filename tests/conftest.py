"""Settings of the whole suite."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# What `make check` leaves out, beside all that compiles (`helpers.COMPILING`): programs and trainers that run, kernels
# at model size or in every shape. Together they are three quarters of the suite's time.
SLOW = (
    *("bench", "cli", "experiments", "training", "architectures/test_mixtures.py", "contract/test_peft_training.py"),
    *("contract/test_trainer.py", "contract/test_trl.py", "equivalence/test_generation.py", "evaluation/test_run.py"),
    *("equivalence/test_sharded.py", "equivalence/test_distributed.py", "equivalence/test_uneven_ranks.py"),
    *("equivalence/test_other_parallelism.py", "explorer/test_browser.py", "test_export.py"),
    *("test_docs.py", "test_examples.py", "test_imports.py", "test_notebooks.py", "test_packaging.py"),
    *("adapters/test_brought.py", "equivalence/test_continuous_batching.py", "equivalence/test_save_load.py"),
    *("equivalence/test_mixed_batches.py", "evaluation/test_decode.py", "ops/test_route_kernel.py"),
    *("faults/test_kills.py", "faults/test_long_runs.py", "faults/test_malformed.py"),
    *("methods/test_kernels.py", "methods/test_trainers.py", "models/test_default_model.py"),
    *("ops/test_kernel_lora.py", "ops/test_offline_compilation.py", "ops/test_router_logits.py"),
    *("ops/test_scale_kernel.py", "tuner/test_compile_generation.py", "tuner/test_dtypes.py", "tuner/test_packing.py"),
    *("serving", "tasks/test_mixture.py", "tuner/test_sharing.py", "tuner/test_sharing_limits.py"),
)
TESTS = Path(__file__).parent

# Tests leave much behind that lives until the end, such as traces of the compiler. The collector need not go through
# all of it every few hundred objects, which takes a tenth of the time; a test collects what must be gone at once.
gc.set_threshold(20_000, 10, 50)
# No test may reach for the network: set before anything imports huggingface_hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU the kernels run in Triton's interpreter, which it decides on when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _prepare_the_language_once() -> None:
    """What Triton's interpreter does at every launch, though once is enough: a quarter of its time.

    It replaces the language of a module for a launch and for every function that a kernel calls, and puts it back;
    here it stays replaced, as no kernel is compiled in this process. It looks for overflows of integers, for which
    there is no room in tensors this small. And it makes a table of all types wherever it needs the one of NumPy.
    """
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set[int]()

    def once(fn: Any) -> Any:
        if id(fn.__globals__) not in replaced:
            replaced.add(id(fn.__globals__))
            replace(fn)
        return SimpleNamespace(restore=lambda: None)

    of_numpy, known = interpreter._get_np_dtype, dict[str, Any]()

    def looked_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = of_numpy(dtype)
        return known[name]

    interpreter._patch_lang = once
    interpreter._get_np_dtype = looked_up
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    _prepare_the_language_once()


@pytest.hookimpl(tryfirst=True)  # before -m looks at markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow; and make our own warnings errors, whoever they are attributed to.

    The settings file cannot say the latter: pytest would import the package to find the class before this file is read.
    """
    config.addinivalue_line("filterwarnings", "error::monkeyjump.errors.MonkeyJumpWarning")
    paths = [TESTS / name for name in SLOW]
    for item in items:
        if any(item.path.is_relative_to(path) for path in paths):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What was imported stays until the end: to go through all of it again takes the collector half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Or extension modules would complain, at the end of the process, of what is left."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Encoded texts of the tests are kept apart from those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("data-cache")
        patch.setattr("monkeyjump.tasks.cache.folder", lambda: folder)
        yield folder


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What one test compiled must not serve, or be counted in, the next."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
