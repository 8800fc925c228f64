"""Who decides between torch and Triton: the override, the environment, then what the tensor is."""

from __future__ import annotations

import runpy

import pytest
import torch

from monkeyjump.errors import ConfigError
from monkeyjump.ops import dispatch
from monkeyjump.ops.dispatch import implementation, uses_kernels

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing chosen, Triton there, the interpreter for want of a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "0" if CUDA else "1")
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "ENVIRONMENT", "auto")


def read_again() -> str:
    """What a new process would find in the environment."""
    return runpy.run_path(dispatch.__file__)["ENVIRONMENT"]


def tensor(dtype: torch.dtype = torch.float32, device: str = DEVICE) -> torch.Tensor:
    return torch.zeros(2, dtype=dtype, device=device)


def test_by_default_kernels_are_for_gpus() -> None:
    """On a CPU not even where the interpreter could run them."""
    assert uses_kernels(tensor()) == CUDA
    assert not uses_kernels(tensor(device="cpu"))


@pytest.mark.parametrize(("choice", "expected"), [("torch", False), ("triton", True), ("auto", CUDA)])
def test_the_environment(choice: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONKEYJUMP_OPS", choice)
    assert read_again() == choice
    monkeypatch.setattr(dispatch, "ENVIRONMENT", choice)
    assert uses_kernels(tensor()) == expected


@pytest.mark.parametrize("environment", ["torch", "triton", "auto"])
def test_the_override_wins_and_is_taken_back(environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ENVIRONMENT", environment)
    before = uses_kernels(tensor())
    with implementation("triton"):
        assert uses_kernels(tensor())
        with implementation("torch"):
            assert not uses_kernels(tensor())
            with implementation("auto"):  # auto is a choice too: it does not ask the environment
                assert uses_kernels(tensor()) == CUDA
            assert not uses_kernels(tensor())
        assert uses_kernels(tensor())
    assert uses_kernels(tensor()) == before


def test_the_override_is_taken_back_after_an_error() -> None:
    before = uses_kernels(tensor())
    with pytest.raises(RuntimeError, match="inside"), implementation("torch" if before else "triton"):
        raise RuntimeError("inside")
    assert uses_kernels(tensor()) == before


def test_nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONKEYJUMP_OPS", raising=False)
    assert read_again() == "auto"


def test_an_unknown_value_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONKEYJUMP_OPS", "cuda")
    with pytest.raises(ConfigError, match=r"MONKEYJUMP_OPS='cuda'.*auto, torch, triton"):
        read_again()


def test_an_unknown_override_changes_nothing() -> None:
    before = uses_kernels(tensor())
    with pytest.raises(ConfigError, match=r"implementation='Triton'.*auto, torch, triton"), implementation("Triton"):
        pass
    assert uses_kernels(tensor()) == before


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name, it is no silent fallback: the error says what was asked, on what, and the way out."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with (
        implementation("triton"),
        pytest.raises(ConfigError, match=r"(?s)triton.*cpu.*needs a GPU.*MONKEYJUMP_OPS=auto"),
    ):
        uses_kernels(tensor(device="cpu"))
    assert not uses_kernels(tensor(device="cpu"))  # nobody asked


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert not uses_kernels(tensor())
    with implementation("torch"):
        assert not uses_kernels(tensor())
    with implementation("triton"), pytest.raises(ConfigError, match=r"not installed.*MONKEYJUMP_OPS=auto"):
        uses_kernels(tensor())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("choice", ["auto", "triton"])
def test_other_dtypes_take_torch(dtype: torch.dtype, choice: str) -> None:
    with implementation(choice):
        assert not uses_kernels(tensor(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_of_the_kernels(dtype: torch.dtype) -> None:
    with implementation("triton"):
        assert uses_kernels(tensor(dtype))


@pytest.mark.parametrize("choice", ["auto", "triton"])
def test_what_autocast_would_cast_takes_torch(choice: str) -> None:
    """Its casts are made at the calls of torch functions, which a kernel is not."""
    available = CUDA or choice == "triton"
    with implementation(choice):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert not uses_kernels(tensor())
            assert not uses_kernels(tensor().half())
            assert uses_kernels(tensor().bfloat16()) == available
            with torch.autocast(DEVICE, enabled=False):
                assert uses_kernels(tensor()) == available
        assert uses_kernels(tensor()) == available
