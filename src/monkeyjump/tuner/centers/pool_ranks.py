"""One sample of tokens for the centres, made of the batches of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

if TYPE_CHECKING:
    from monkeyjump.tuner.centers.sample import TokenCollector
    from monkeyjump.tuner.routers.base import BlockRouter


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_every_rank(done: bool, device: torch.device) -> bool:
    """Whether all ranks are done. A model in shards runs only if all ranks enter it, so they stop reading together."""
    if not several_ranks():
        return done
    flag = torch.tensor(int(done), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def pool_ranks(collector: TokenCollector, routers: list[BlockRouter]) -> None:
    """Make the sample of every rank what one process would keep of the batches of rank 0, then of rank 1, and so on.

    Where there are more tokens than wanted, every rank gives as many of its first ones as the others. Ranks that have
    read the same batches, as those of a tensor-parallel group do, are counted once.
    """
    if not several_ranks():
        return
    lists = {router.blocks.path: id(router.blocks) for router in routers}
    kept = {path: collector.kept.get(key, 0) for path, key in lists.items()}
    dtypes = {path: tokens.dtype for path, tokens in collector.tokens.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (collector.fingerprint, kept, dtypes, bool(collector.kinds)))
    fingerprints = [fingerprint for fingerprint, *_ in ranks]
    if len(set(fingerprints)) == 1:
        return
    dtypes = {path: dtype for _, _, found, _ in ranks for path, dtype in found.items()}  # a rank may have read nothing
    has_kinds = any(kinds for *_, kinds in ranks)
    for path, key in lists.items():
        counts = [
            kept[path] * (fingerprints.index(fingerprint) == i) for i, (fingerprint, kept, *_) in enumerate(ranks)
        ]
        shares = _shares(counts, collector.capacity)
        here = [router for router in routers if router.blocks.path == path and router.path in dtypes]
        for router in here:
            center = router.layers[collector.adapter_name][0].monkeyjump_center[collector.adapter_name]
            nothing = torch.zeros(collector.capacity, center.shape[-1], dtype=dtypes[router.path])
            tokens = collector.tokens.setdefault(router.path, nothing)
            tokens[: sum(shares)] = _joined(tokens, shares, center.device).to(tokens.device)
        if has_kinds and here:
            kinds = collector.kinds.get(key, torch.zeros(0, dtype=torch.long))
            collector.kinds[key] = _joined(kinds, shares, center.device).cpu()
        collector.kept[key] = sum(shares)


def _joined(own: Tensor, shares: list[int], device: torch.device) -> Tensor:
    """The first entries of all ranks, one rank after the other. Every rank adds its own to zeros, which is exact."""
    rank = dist.get_rank()
    start = sum(shares[:rank])
    joined = torch.zeros((sum(shares), *own.shape[1:]), dtype=own.dtype, device=device)
    joined[start : start + shares[rank]] = own[: shares[rank]].to(device)
    dist.all_reduce(joined)
    return joined


def _shares(counts: list[int], capacity: int) -> list[int]:
    """How many tokens each rank gives: all, or the same number each, so that there are not more than `capacity`."""
    most = max(counts)
    while sum(min(count, most) for count in counts) > capacity:
        most -= 1
    return [min(count, most) for count in counts]
