"""Who decides for whom: positions found by hand."""

from __future__ import annotations

import torch

from monkeyjump.routing.granularity import CallInputs, segments_of, select

CPU = torch.device("cpu")


def source(**inputs: object) -> list[int]:
    shape = inputs.pop("shape", (1, 6))
    selection = select(CallInputs(shape, CPU, **inputs), "sequence", str(inputs.pop("how", "prompt")))  # type: ignore[arg-type]
    assert selection.source is not None
    return selection.source.flatten().tolist()


def test_the_last_prompt_token_is_the_one_before_the_first_answer() -> None:
    labels = torch.tensor([[-100, -100, 5, 6, -100, 7]])
    assert source(labels=labels) == [1]


def test_without_a_prompt_the_first_real_token_decides() -> None:
    labels = torch.tensor([[3, 4, 5, 6, 7, 8]])
    assert source(labels=labels) == [0]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]]).bool()
    assert source(labels=labels.masked_fill(~mask, -100), mask=mask) == [2]


def test_without_an_answer_the_last_real_token_decides() -> None:
    labels = torch.full((1, 6), -100)
    assert source(labels=labels, mask=torch.tensor([[1, 1, 1, 1, 0, 0]]).bool()) == [3]


def test_prompt_lengths_do_not_count_padding() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]).bool()
    assert source(shape=(2, 6), mask=mask, prompt_lengths=torch.tensor([3, 2])) == [4, 1]


def test_generated_tokens_do_not_decide() -> None:
    assert source(generated_from=4) == [3]
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]]).bool()
    assert source(generated_from=4, mask=mask) == [3]


def test_packed_sequences_decide_each_for_itself() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    segments = segments_of(positions, None)
    assert segments is not None
    assert segments.tolist() == [[0, 0, 0, 1, 1, 2]]
    labels = torch.tensor([[-100, -100, 4, -100, 5, 6]])
    assert source(segments=segments, labels=labels) == [1, 1, 1, 3, 3, 5]
    selection = select(CallInputs((1, 6), CPU, segments=segments, labels=labels), "sequence", "prompt")
    assert selection.queries is not None
    assert selection.queries.tolist() == [[False, True, False, True, False, True]]


def test_pooling_counts_rows() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    selection = select(CallInputs((2, 3), CPU, mask=mask), "sequence", "mean")
    assert selection.queries is not None
    assert selection.queries.tolist() == [[True], [False]]
