"""The paper's theorem and proposition on its own example, and on trained shapes."""

from __future__ import annotations

import torch

from monkeyjump.analysis.theory import Ranks, check_ranks, rank, theory_in_words

FIRST, SECOND = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [-1.0, 0.0]])
TOKENS = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
OUTPUTS = torch.stack([TOKENS @ FIRST.T, TOKENS @ SECOND.T])


def test_the_papers_example_has_rank_2_against_1() -> None:
    found = check_ranks(OUTPUTS, torch.eye(2))
    assert (found.hard, found.summed, found.full, found.reached) == (2, 1, 2, 2)
    assert found.covered
    assert found.fed
    assert found.patterns == 2
    assert "a larger rank than the sum in 1 of 1 groups" in theory_in_words([found])[2]


def test_premises_that_do_not_hold_are_said() -> None:
    found = check_ranks(OUTPUTS, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert not found.covered
    assert not found.fed
    assert found.reached == found.hard == 1
    assert "first choice of some token in 0 of 1" in theory_in_words([found])[0]


def test_the_bound_by_patterns_of_the_proposition_can_fail() -> None:
    """One pattern, but different weights: the outputs span two dimensions, and the mean expert only one."""
    found = check_ranks(OUTPUTS, torch.tensor([[0.6, 0.4], [0.4, 0.6]]))
    assert (found.patterns, found.bound, found.soft) == (1, 1, 2)
    assert "The bound by patterns holds in 0 of 1" in theory_in_words([found])[6]


def test_generic_low_rank_experts_lose_nothing_in_their_sum_and_a_shared_factor_does() -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, gates = normal(200, 16), torch.nn.functional.one_hot(torch.arange(200) % 3, 3).float()
    own = torch.stack([x @ normal(16, 2) @ normal(2, 24) for _ in range(3)])
    down = normal(16, 2)
    shared = torch.stack([x @ down @ normal(2, 24) for _ in range(3)])
    assert [(each.hard, each.summed) for each in (check_ranks(own, gates), check_ranks(shared, gates))] == [
        (6, 6),
        (6, 2),
    ]
    assert isinstance(check_ranks(own, gates), Ranks)


def test_rank_ignores_what_rounding_leaves() -> None:
    matrix = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)) @ torch.randn(4, 40)
    assert rank(matrix) == rank(matrix.T) == 4
    assert rank(torch.zeros(3, 5)) == 0
