"""What is launched again without Triton looking at the arguments, and what is not."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

launch = pytest.importorskip("monkeyjump.ops.kernels.launch")

X = torch.zeros(8)
STREAMS = 100
FIRST = (X, (X, X), None, (3, 5), 7, 0.5, True, 16)  # the last two are constants


class Kernel:
    """Stands for a Triton kernel: it writes down who launched, itself, a compiled variant, or one with its hooks."""

    params = tuple(SimpleNamespace(is_constexpr=place >= 6) for place in range(len(FIRST)))

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.direct: list[tuple] = []
        self.hooked: list[tuple] = []

    def __getitem__(self, grid: tuple) -> Any:
        def ask(*args: Any, num_warps: int, num_stages: int) -> Any:
            self.asked.append((grid, args))
            return Compiled(self)

        return ask

    def warmup(self, *args: Any, grid: tuple, num_warps: int, num_stages: int) -> Any:
        return Compiled(self)


class Compiled:
    function, packed_metadata = 11, 12

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *args: self.kernel.hooked.append((grid, args))

    def run(self, x: int, y: int, z: int, stream: int, function: int, packed: int, *rest: Any) -> None:
        assert (stream, function, packed) == (-1 + STREAMS, self.function, self.packed_metadata)
        assert rest[:3] == (None, None, None)
        self.kernel.direct.append(((x, y, z), rest[3:]))


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a tensor of the CPU says
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    streams = SimpleNamespace(get_current_stream=lambda device: device + STREAMS)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=streams))
    return launch.Launcher(Kernel())


def test_the_same_kind_of_arguments_is_launched_directly(launcher: Any) -> None:
    launcher((2, 1), *FIRST)
    others = (torch.ones(9), (X.clone(), torch.nn.Parameter(X.clone())), None, (3, 5), 7, 0.25, True, 16)
    launcher((4, 3), *others)
    assert len(launcher.kernel.asked) == 1
    ((grid, args),) = launcher.kernel.direct
    assert grid == (4, 3, 1)
    assert all(found is given for found, given in zip(args, others, strict=True))


def test_kernels_that_are_named_first_are_compiled_once(launcher: Any) -> None:
    """Inside nothing is launched; afterwards nothing has to be compiled, and other threads launch all the time."""
    with launch.compiled_together() as named:
        for _ in range(2):
            launcher((2, 1), *FIRST)
        beside = Thread(target=launcher, args=((2, 1), *FIRST[:-1], 32))
        beside.start()
        beside.join()
    assert len(named) == len(launcher.kernel.asked) == 1
    launcher((4, 3), *FIRST)
    assert len(launcher.kernel.asked) == 1
    assert launcher.kernel.direct == [((4, 3, 1), FIRST)]


@pytest.mark.parametrize("direct", [True, False])
def test_an_unknown_triton_is_launched_in_the_public_way(
    launcher: Any, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways hand the same grid and arguments to the kernel."""
    monkeypatch.setattr(launch, "DIRECT", direct)
    for _ in range(2):
        launcher((2, 1), *FIRST)
    assert len(launcher.kernel.asked) == (1 if direct else 2)
    launched = [((*grid, 1), args) for grid, args in launcher.kernel.asked] + launcher.kernel.direct
    assert launched == [((2, 1, 1), FIRST)] * 2


@pytest.mark.parametrize(
    ("version", "known"),
    [("3.5.1", False), ("3.6.0", True), ("3.9.0", True), ("3.9.1+git12ab", True), ("3.10.0", False), ("4.0.0", False)],
)
def test_versions_whose_compiled_kernels_are_called(version: str, known: bool) -> None:
    assert launch.knows_compiled_kernels(version) == known


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_a_profiler_sees_the_launches(launcher: Any, name: str, chained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own way calls the hooks."""
    if chained:
        monkeypatch.setattr(getattr(launch.knobs.runtime, name), "calls", [print])
    else:
        monkeypatch.setattr(launch.knobs.runtime, name, print)
    for _ in range(2):
        launcher((2, 1), *FIRST)
    assert launcher.kernel.hooked == [((2, 1, 1), FIRST)]
    assert launcher.kernel.direct == []


@pytest.mark.parametrize(
    ("place", "other"),
    [
        (0, X.bfloat16()),
        (0, X[1:]),  # not aligned
        (0, None),
        (1, (X, X[1:])),
        (1, (X, None)),
        (1, (X,)),
        (2, X),
        (3, (3, 6)),
        (4, 16),
        (6, False),
        (7, 32),
    ],
)
def test_another_kind_is_left_to_triton(launcher: Any, place: int, other: Any) -> None:
    launcher((2, 1), *FIRST)
    launcher((2, 1), *FIRST[:place], other, *FIRST[place + 1 :])
    assert len(launcher.kernel.asked) == 2
    assert launcher.kernel.direct == []


def test_ever_new_numbers_do_not_fill_the_memory(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_KEYS", 3)
    for number in range(10):
        launcher((2, 1), *FIRST[:4], number, *FIRST[5:])
        assert 1 <= len(launcher.compiled) <= 3
