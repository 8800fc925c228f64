"""Spherical k-means: ours, flash-kmeans and scikit-learn on the same tokens. Seconds and inertia, one JSON record.

    python benchmarks/kmeans.py --blocks 4 --tokens 20000 --hidden 576 --k 3 --output kmeans.json

Every method gets the same number of restarts; the inertia is computed here, from the labels, by the same function.
flash-kmeans starts from random tokens and has no restarts of its own: it is run `--restarts` times with different seeds
and the best run per block is kept; `flash-kmeans, 1 start` is the first of these runs alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from monkeyjump.routing.kmeans import spherical_kmeans


def hidden_like(blocks: int, tokens: int, hidden: int, device: str, dtype: torch.dtype) -> Tensor:
    """Overlapping clusters in an anisotropic space around one common direction, a sink token every 512: [L, N, D]."""
    rng = torch.Generator().manual_seed(0)
    scale = 3 * torch.arange(1, hidden + 1).float().rsqrt()
    x = torch.empty(blocks, tokens, hidden, dtype=dtype, device=device)
    for block in x:
        directions = 0.8 * torch.randn(6, hidden, generator=rng)
        noise = torch.randn(tokens, hidden, generator=rng)
        member = torch.randint(6, (tokens,), generator=rng)
        filled = 2 * torch.randn(1, hidden, generator=rng) + (directions[member] + noise) * scale
        filled[::512] = 100 * torch.randn(1, hidden, generator=rng) + noise[::512]
        block.copy_(filled)
    return x


def inertia_of(x: Tensor, labels: Tensor) -> list[float]:
    """Sum of squares of the normalised tokens around their cluster means in fp64, per block."""
    result = []
    for block, label in zip(x, labels, strict=True):
        unit = normalize(block.float(), dim=-1).double()
        clusters = [unit[label == cluster] for cluster in label.unique()]
        result.append(sum(float((members - members.mean(0)).square().sum()) for members in clusters))
    return result


def ours(x: Tensor, args: argparse.Namespace, starts: int) -> Tensor:
    return spherical_kmeans(x, args.k, restarts=starts, max_iter=args.max_iter, tol=args.tol).labels


def flash(x: Tensor, args: argparse.Namespace, starts: int) -> Tensor:
    """Triton cosine k-means on CUDA; elsewhere the package's torch version, Euclidean, on normalised tokens."""
    import flash_kmeans
    from flash_kmeans.torch_fallback import batch_kmeans_Euclid_torch_native

    unit = normalize(x.float(), dim=-1)
    best_labels, best = None, None
    for start in range(starts):
        torch.manual_seed(start)
        if x.is_cuda:
            labels, centers, _ = flash_kmeans.batch_kmeans_Cosine(unit, args.k, max_iters=args.max_iter, tol=args.tol)
        else:
            labels, centers, _ = batch_kmeans_Euclid_torch_native(unit, args.k, max_iters=args.max_iter, tol=args.tol)
        # what a user would choose by: distance to the centres found
        index = labels.long()[..., None]
        loss = torch.stack([(u - c[i[:, 0]]).square().sum() for u, c, i in zip(unit, centers, index, strict=True)])
        if best is None or best_labels is None:
            best_labels, best = labels.clone(), loss
        else:
            better = loss < best
            best_labels, best = torch.where(better[:, None], labels, best_labels), torch.where(better, loss, best)
    assert best_labels is not None
    return best_labels


def sklearn(x: Tensor, args: argparse.Namespace, starts: int) -> Tensor:
    from sklearn.cluster import KMeans

    labels = []
    for block in x:
        model = KMeans(args.k, n_init=starts, max_iter=args.max_iter, random_state=0)
        labels.append(torch.from_numpy(model.fit_predict(normalize(block.float(), dim=-1).cpu().numpy())))
    return torch.stack(labels).to(x.device)


METHODS: dict[str, tuple[str, Callable[[Tensor, argparse.Namespace, int], Tensor], bool]] = {
    # name: (distribution it needs, function, one start only)
    "monkeyjump": ("monkeyjump", ours, False),
    "monkeyjump, 1 start": ("monkeyjump", ours, True),
    "flash-kmeans": ("flash-kmeans", flash, False),
    "flash-kmeans, 1 start": ("flash-kmeans", flash, True),
    "scikit-learn": ("scikit-learn", sklearn, False),
}


def measure(x: Tensor, run: Callable[[], Tensor], repeats: int) -> dict:
    """Seconds of `repeats` runs after a warm-up on CUDA (kernels compile there), peak extra memory, inertia.

    The CPU seconds of the process tell a slow method from a busy machine; set OMP_NUM_THREADS=1 to compare by them.
    """
    cuda = x.is_cuda
    if cuda:
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        labels = run()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    row = {"seconds_median": statistics.median(seconds), "seconds": seconds, "cpu_seconds": cpu_seconds}
    if cuda:
        row["peak_extra_bytes"] = torch.cuda.max_memory_allocated() - before
    return {**row, "inertia": inertia_of(x, labels)}


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--max-iter", type=int, default=100)
    parser.add_argument("--tol", type=float, default=1e-4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--output", type=Path, help="write the record here as JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    x = hidden_like(args.blocks, args.tokens, args.hidden, args.device, getattr(torch, args.dtype))
    results = {}
    for name in args.methods:
        distribution, function, single = METHODS[name]
        if version(distribution) is None:
            print(f"{name}: skipped, {distribution} is not installed (pip install {distribution})")
            continue
        starts = 1 if single else args.restarts
        results[name] = measure(x, partial(function, x, args, starts), args.repeats)
        row = results[name]
        print(
            f"{name:24s} {row['seconds_median']:9.3f} s, CPU {statistics.median(row['cpu_seconds']):9.3f} s, "
            f"inertia {sum(row['inertia']):.2f}",
            flush=True,
        )
    record = {
        "command": shlex.join([Path(sys.executable).name, "benchmarks/kmeans.py", *(argv or sys.argv[1:])]),
        "device": torch.cuda.get_device_name()
        if x.is_cuda
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average_1min": os.getloadavg()[0],
        "versions": {d: version(d) for d in ("monkeyjump", "torch", "flash-kmeans", "scikit-learn", "triton")},
        "arguments": {key: value for key, value in vars(args).items() if key != "output"},
        "results": results,
    }
    if args.output:
        args.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
