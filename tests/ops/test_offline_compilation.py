"""Kernels go through Triton's compiler, not only through its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from monkeyjump.ops.kernels.launch import Launcher

KERNELS = {
    *(
        "lora_products.down_kernel",
        "lora_products.up_kernel",
        "lora_products.up_backward_kernel",
        "lora_products.down_backward_kernel",
    ),
    *("lora_sums.down_kernel", "lora_sums.up_kernel", "lora_sums.up_backward_kernel", "partial_sums.add_parts_kernel"),
    *("lora_few_tokens.few_sums_kernel", "lora_few_tokens.few_products_kernel"),
    *("route.route_kernel", "route.route_rows_kernel", "route.add_sums_kernel"),
    *("propulsion.scale_kernel", "propulsion.scale_backward_kernel"),
    *("kmeans.nearest_kernel", "kmeans.sums_kernel", "kmeans.chords_kernel"),
}


def test_the_list_is_complete() -> None:
    """Every function that a launcher of the package launches."""
    import importlib
    import pkgutil

    from monkeyjump.ops import kernels

    found = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        own = vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        found |= {f"{module.name}.{value.kernel.__name__}" for value in own.values() if isinstance(value, Launcher)}
    assert found == KERNELS


def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ops.offline_compilation"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == KERNELS
