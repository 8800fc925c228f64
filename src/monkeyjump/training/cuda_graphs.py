"""CUDA graphs, and what the graphs of one model share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch
from torch import Tensor


class Memory:
    """What all graphs of a model share, since only one of them runs at a time: a pool of memory and a stream."""

    def __init__(self) -> None:
        self.stream = _stream_of_thread(torch.cuda.current_device())
        self.renew()

    def renew(self) -> None:
        """A pool of its own, also after a recording that failed, whose pool cannot be used again."""
        self.pool = torch.cuda.graph_pool_handle()


_threads = threading.local()


def _stream_of_thread(device: int) -> torch.cuda.Stream:
    """One stream for all recordings of a thread: libraries keep 32 MiB and more for every stream they have seen."""
    streams: dict[int, torch.cuda.Stream] = vars(_threads).setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


class CudaGraph:
    """Work that is done again, into the same tensors, whenever it is replayed. Tests have a stand-in for the CPU."""

    def __init__(self, memory: Memory) -> None:
        self._graph, self._memory = torch.cuda.CUDAGraph(), memory

    def prepare(self, work: Callable[[], None]) -> None:
        """Compile the kernels of the work, all at once; what it computes is undefined."""
        from monkeyjump.ops.kernels.launch import compiled_together

        # kernels are named by the thread that is inside, so the backward must not have one of its own
        with compiled_together(), torch.autograd.set_multithreading_enabled(False):
            work()

    def rehearse(self, work: Callable[[], None]) -> None:
        """Do the work on the stream that will be recorded: libraries keep things for each stream."""
        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        memory, mode = self._memory, "thread_local"  # other threads may load data meanwhile
        collecting, stream = gc.isenabled(), torch.cuda.current_stream()
        gc.disable()  # what it would free now may be a graph or an event, which a recording does not survive
        try:
            with torch.cuda.graph(self._graph, pool=memory.pool, stream=memory.stream, capture_error_mode=mode):
                return work()
        except RuntimeError:
            torch.cuda.empty_cache()
            memory.renew()
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=memory.stream, capture_error_mode=mode):
                torch.zeros(1, device="cuda")  # until a recording succeeds, random numbers belong to the failed one
            raise
        finally:
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own
            if collecting:
                gc.enable()

    def replay(self) -> None:
        self._graph.replay()
