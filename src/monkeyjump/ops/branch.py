"""Short kernels beside a long one: in a CUDA graph, a second stream becomes a branch that runs at the same time.

A low-rank update waits for memory while a frozen product waits for the matrix units, so beside each other they take
hardly longer than the product. Outside a graph the host would have to order the streams in every step, which takes it
longer than the kernels take the device; there, everything stays on one stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # (device, stream) -> the one beside it


class Branch:
    """Launches inside `with branch.beside():` run beside those after it, until `join`.

    What they write must be allocated before: memory of the second stream would lie apart from that of the first.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.stream: torch.cuda.Stream | None = None
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            self.current = torch.cuda.current_stream(tensor.device)
            key = (tensor.get_device(), self.current.cuda_stream)
            if key not in _streams:
                _streams[key] = torch.cuda.Stream(tensor.device)
            self.stream = _streams[key]
            self.stream.wait_stream(self.current)

    def beside(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @property
    def apart(self) -> bool:
        """Whether there is a second stream."""
        return self.stream is not None

    def reached(self) -> torch.cuda.Event | None:
        """Where the branch is now, for `join`."""
        return None if self.stream is None else self.stream.record_event()

    def join(self, reached: torch.cuda.Event | None = None) -> None:
        """What is launched from here on waits for the branch: for all of it so far, or only up to where it was."""
        if self.stream is not None:
            self.current.wait_event(self.stream.record_event() if reached is None else reached)
