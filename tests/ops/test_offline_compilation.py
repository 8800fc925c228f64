"""Kernels go through Triton's compiler, not only through its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KERNELS = {
    *("down_kernel", "up_kernel", "up_backward_kernel", "down_backward_kernel", "add_parts_kernel"),
    *("few_sums_kernel", "few_products_kernel"),
    *("route_kernel", "route_rows_kernel", "add_sums_kernel", "scale_kernel", "scale_backward_kernel"),
    *("nearest_kernel", "sums_kernel", "chords_kernel"),
}


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
