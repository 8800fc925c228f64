"""Warnings about routing while a model trains, on loads that are known."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest

from monkeyjump.errors import MonkeyJumpWarning
from monkeyjump.training import callbacks
from monkeyjump.training.callbacks import RoutingWatch
from monkeyjump.tuner.model import require_context
from monkeyjump.tuner.trace import ExpertLoad
from tests.helpers import adapted

EXPERTS = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVEN = [0.25] * 4


def said(monkeypatch: pytest.MonkeyPatch, looks: Sequence[list[float]], blocks: int = 1) -> list[list[str]]:
    """What is said at each look at blocks that all have these shares."""
    shares = iter(looks)

    def staged(*_: object) -> dict[str, ExpertLoad]:
        share = next(shares)
        return {f"layers.{block}": ExpertLoad(EXPERTS, share, []) for block in range(blocks)}

    monkeypatch.setattr(callbacks, "staged_load", staged)
    model = adapted(top_k=2)
    watched, found = RoutingWatch(model, require_context(model)), []
    for _ in looks:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watched.look()
        found.append([str(each.message) for each in caught if each.category is MonkeyJumpWarning])
    return found


def test_an_expert_that_dies_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = [0.5, 0.3, 0.2, 0.0]
    found = said(monkeypatch, [EVEN, dead, dead, EVEN, dead, dead, dead, dead])
    expected = ["1 expert got no token in the last 3 steps that were logged: layers.0 o_proj."]
    assert found == [[], [], [], [], [], [], expected, []]


def test_many_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = said(monkeypatch, [[0.5, 0.3, 0.2, 0.0]] * 3, blocks=6)
    assert found[2][0].startswith("6 experts got no token")
    assert found[2][0].endswith("layers.3 o_proj and 2 more.")


def test_two_that_take_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of top-2, a block whose tokens all go to the same two; the two without tokens are not named again."""
    found = said(monkeypatch, [[0.5, 0.0, 0.49, 0.01]] * 4)
    expected = (
        "1 block sent all tokens to the same experts in the last 3 steps that were logged: layers.0 (q_proj, v_proj)."
    )
    assert found == [[], [], [expected], []]


def test_even_loads_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, [EVEN] * 5) == [[]] * 5


def test_dead_experts_are_revived_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three looks, and again after three more if it did not help."""
    load = {"layers.0": ExpertLoad(EXPERTS, [0.5, 0.3, 0.2, 0.0], [])}
    asked: list[dict[str, list[str]]] = []
    monkeypatch.setattr(callbacks, "staged_load", lambda *_: load)
    monkeypatch.setattr(callbacks, "revive_experts", lambda model, idle, name: asked.append(idle))
    model = adapted(top_k=2)
    watched = RoutingWatch(model, require_context(model), revive=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            watched.look()
    words = "1 expert got no token in the last 3 steps that were logged; their centres were moved: layers.0 o_proj."
    assert [str(each.message) for each in caught] == [words] * 2
    assert asked == [{"layers.0": ["o_proj"]}] * 2
