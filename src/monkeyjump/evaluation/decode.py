"""Greedy answers: the prompts at once, then all rows token by token, where possible with every step one CUDA graph.

Prompts are not recorded: they are read as for scoring, and their keys and values are then copied. A recording serves
all batches of its number of rows and cache slots, of which there are few: rows are filled up to a power of two and
slots to a multiple of 64. Only the last recording is kept, because batches are sorted by length.

Shapes: B prompts, P prompt tokens, R rows and S slots of a recording, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monkeyjump.evaluation.forward import AnswerReader, Prefix
from monkeyjump.evaluation.jobs import Batch
from monkeyjump.evaluation.recorded_step import GrowingStep, RecordedStep, new_graph, say_why
from monkeyjump.training.cuda_graphs import CudaGraph

_STEPS_BETWEEN_LOOKS = 8  # steps after which it is asked, once, whether every row has ended
_SLOTS = 64


class Decoder:
    """Generates the answers of batches. It holds a recording, so it must not outlive what the model is switched to."""

    def __init__(self, reader: AnswerReader, end_ids: set[int]) -> None:
        self.reader = reader
        self.ends = torch.tensor(sorted(end_ids), dtype=torch.long, device=reader.device)
        self._new_graph = new_graph(reader)
        self._recorded: _Recorded | None = None

    def answers(self, batch: Batch) -> Tensor:
        """The most likely next token, again and again, [B, at most the longest limit]. Rows that ended are padded."""
        prefix = self.reader.read(self.reader.prepare(batch), cached=True)
        steps = max(job.limit for job in batch.jobs)
        rows = self._recorded_rows(prefix, steps) or _Rows(self.reader, self.ends, prefix)
        for step in range(1, steps):
            if step % _STEPS_BETWEEN_LOOKS == 0 and bool(rows.ended.all()):
                break
            rows.advance()
        return rows.found()

    def _recorded_rows(self, prefix: Prefix, steps: int) -> _Recorded | None:
        if self._new_graph is None:
            return None
        (B, P), recorded = prefix.mask.shape, self._recorded
        R, S = 1 << (B - 1).bit_length(), -(-(P + steps) // _SLOTS) * _SLOTS
        if recorded is None or recorded.mask.shape != (R, 1, 1, S):
            recorded = self._recorded = None  # its memory is needed
            try:
                recorded = self._recorded = _Recorded(self.reader, self.ends, prefix, R, S, self._new_graph())
            except RuntimeError as error:
                self._new_graph = None
                say_why(str(error).splitlines()[0])
                return None
        recorded.start(prefix)
        return recorded


def _chosen(reader: AnswerReader, ends: Tensor, logits: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
    """The next token of each row, and which rows have ended with it: [R, V], [R] -> [R], [R]."""
    tokens = logits.argmax(-1).masked_fill(ended, reader.pad_id)
    return tokens, ended | (tokens.unsqueeze(1) == ends).any(1)


class _Rows:
    """Decoding as it comes, on a cache that grows."""

    def __init__(self, reader: AnswerReader, ends: Tensor, prefix: Prefix) -> None:
        self.reader, self.ends, self.steps = reader, ends, GrowingStep(reader, prefix)
        nobody = torch.zeros_like(prefix.lengths, dtype=torch.bool)
        tokens, self.ended = _chosen(reader, ends, prefix.logits[:, -1], nobody)
        self.tokens = [tokens]

    def advance(self) -> None:
        tokens, self.ended = _chosen(self.reader, self.ends, self.steps.after(self.tokens[-1]), self.ended)
        self.tokens.append(tokens)

    def found(self) -> Tensor:
        return torch.stack(self.tokens, 1)


class _Recorded(RecordedStep):
    """Decoding by a recorded step that also chooses. Rows without a prompt have ended before they begin."""

    def __init__(self, reader: AnswerReader, ends: Tensor, like: Prefix, R: int, S: int, graph: CudaGraph) -> None:
        self.ends, self.tokens = ends, like.lengths.new_zeros(R, S)
        self.ended = like.lengths.new_zeros(R, dtype=torch.bool)
        super().__init__(reader, like, R, S, graph)

    def start(self, prefix: Prefix) -> None:
        """Put a batch of prompts in place."""
        super().start(prefix)
        (rows, self.width), self.count = prefix.mask.shape, 1
        self.rows = rows
        self.ended.fill_(True)
        tokens, ended = _chosen(self.reader, self.ends, prefix.logits[:, -1], torch.zeros_like(self.ended[:rows]))
        self.ended[:rows].copy_(ended)
        self.token[:rows, 0].copy_(tokens)
        self.tokens[:rows, self.width].copy_(tokens)

    def advance(self) -> None:
        self.count += 1
        self.graph.replay()

    def found(self) -> Tensor:
        return self.tokens[: self.rows, self.width : self.width + self.count].clone()

    def _step(self) -> list[Tensor]:
        """Run the last token and choose the next, all in place."""
        (logits,) = super()._step()
        tokens, ended = _chosen(self.reader, self.ends, logits, self.ended)
        self.ended.copy_(ended)
        self.token.copy_(tokens.unsqueeze(1))
        self.tokens.index_copy_(1, self.place, self.token)
        return []
