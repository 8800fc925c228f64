"""The training step: what it runs, what it counts, and that its record agrees with itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import PeftModel

import monkeyjump as mj
from monkeyjump.bench import runs
from monkeyjump.bench.settings import Settings
from monkeyjump.bench.step import StepRun
from monkeyjump.bench.variants import FLOOR, PEFT_LORA, PEFT_LORA_LOW, plain_model, variant_names
from monkeyjump.cli.main import main
from monkeyjump.errors import ConfigError
from tests.helpers import COMPILING

pytestmark = COMPILING
MODES = ("eager", "compile")
EAGER = Settings(
    shape="tiny",
    layers=4,
    batch=2,
    tokens=8,
    dtype="float32",
    device="cpu",
    dropout=0.0,
    modes=("eager",),
    steps=2,
    warmup=1,
)
SMALL = ["--shape", "tiny", "--device", "cpu", "--batch", "2", "--tokens", "8", "--steps", "3", "--warmup", "1"]


def rows_of(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    content = json.loads((folder / "record.json").read_text())
    assert content["status"] == "finished"
    return {(row["variant"], row["mode"]): row for row in content["metrics"]["rows"]}


@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_from_the_command_line(scope: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # compiled in both forms, with a variant that cannot work: its allocation needs four blocks
    part = {"blocks": "model", "model": "blocks"}[scope]
    options = [*SMALL, "--layers", "1", "--methods", "mjlora,mola", "--dropout", "0", "--scope", scope]
    options += ["--modes", "eager,compile", "--compile", part, "--backend", "aot_eager", "--jobs", "0"]
    assert main(["bench", "step", *options, "--output", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if not line.startswith("saved")) <= 80
    assert "mola (eager, compile): ConfigError" in text
    rows = rows_of(tmp_path)
    assert list(rows) == [(name, mode) for name in ("floor", "peft-lora", "mjlora", "mola") for mode in MODES]
    for (name, mode), row in rows.items():
        if name == "mola":
            assert "names 4 parts of the depth" in row["error"]
            continue
        assert row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["tokens_per_second"] == pytest.approx(16e3 / row["median_ms"])
        for reference, short in ((FLOOR, "floor"), (PEFT_LORA, "peft")):
            other = rows[reference, mode]
            assert row[f"time_vs_{short}"] == pytest.approx(row["median_ms"] / other["median_ms"])
            if mode == "eager":
                assert row[f"memory_vs_{short}"] == pytest.approx(row["peak_bytes"] / other["peak_bytes"])
                assert row["extra_bytes"] == row["peak_bytes"] - row["resident_bytes"] > 0
        if mode == "compile":
            assert row["compile_seconds"] > 0
            assert row["compiled_graphs"] > 0
            assert row["recompiled_while_timed"] == 0


def test_in_processes(tmp_path: Path) -> None:
    # one that works: `test_turns.py` has several at once and those that fail, without the seconds torch needs to start
    options = [*SMALL, "--layers", "1", "--methods", "mjlora", "--alone", "--jobs", "2", "--output", str(tmp_path)]
    assert main(["bench", "step", *options]) == 0
    rows = rows_of(tmp_path)
    assert list(rows) == [("mjlora", "eager")]
    assert rows["mjlora", "eager"]["status"] == "ok"
    assert "time_vs_floor" not in rows["mjlora", "eager"]


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        *(("blocks", name) for name in (PEFT_LORA, PEFT_LORA_LOW, *mj.methods.COMPARED)),
        # the ways losses come to a step: none, of routers, of adapters, of tasks
        *(("model", name) for name in (PEFT_LORA, "mjlora", "moelora", "mjadalora", "more")),
    ],
)
def test_every_variant_gives_every_gradient(scope: str, name: str) -> None:
    run = StepRun(name, replace(EAGER, scope=scope))
    run.warm_up()  # raises where a gradient is missing or not finite
    row = run.row("eager")
    assert row["trainable"] == mj.count_parameters(run.built.model).trainable > 0


def test_parameters_of_lora_by_hand() -> None:
    """Rank 2 on q (64 -> 64), k and v (64 -> 32), o (64 -> 64) in four blocks."""
    expected = 4 * 2 * (2 * (64 + 64) + 2 * (64 + 32))
    for name in (PEFT_LORA, "lora", "mjlora"):
        assert sum(p.numel() for p in StepRun(name, EAGER).parameters) == expected
    wide = StepRun(PEFT_LORA, replace(EAGER, rank=6))
    assert sum(p.numel() for p in wide.parameters) == 3 * expected


@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_the_floor_is_the_frozen_model(scope: str) -> None:
    run = StepRun(FLOOR, replace(EAGER, scope=scope))
    assert not run.parameters
    assert not isinstance(run.built.model, PeftModel)
    assert not any(isinstance(module, mj.tuner.layer.MonkeyJumpLayer) for module in run.built.model.modules())
    run.step()
    # by hand, with the mask that Transformers makes by itself
    model = plain_model(EAGER)
    embeds = run.embeds.detach().clone().requires_grad_()
    if scope == "model":
        model(inputs_embeds=embeds, labels=run.labels).loss.backward()
    else:
        (model.model(inputs_embeds=embeds).last_hidden_state * run.upstream).sum().backward()
    assert run.embeds.grad is not None
    assert embeds.grad is not None
    torch.testing.assert_close(run.embeds.grad, embeds.grad, rtol=1e-5, atol=1e-7)


def test_routing_losses_belong_to_a_step_of_the_blocks() -> None:
    def found(**overrides: Any) -> list[torch.Tensor]:
        run = StepRun("moelora", replace(EAGER, overrides=overrides))
        history = []
        for _ in range(2):
            run.step()
            history.append([leaf.grad.clone() for leaf in run.leaves if leaf.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*history, strict=True))  # nothing piles up from step to step
        return history[0]

    strong, none = found(aux_loss_weight=10.0), found(aux_loss_weight=0.0)
    assert any((a - b).abs().max() > 0.01 * b.abs().max() for a, b in zip(strong, none, strict=True))


def test_an_optimizer_step_moves_the_parameters() -> None:
    run = StepRun("mjlora", replace(EAGER, optimizer=True))
    before = [parameter.detach().clone() for parameter in run.parameters]
    run.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, run.parameters, strict=True))


def test_a_step_that_skips_work_is_refused() -> None:
    run = StepRun("mjlora", EAGER)
    with pytest.raises(RuntimeError, match="eager: of 33 tensors that need gradients, 33 have none and 0 have"):
        run._require_gradients("eager")
    run.step()
    run._require_gradients("eager")
    run.parameters[3].grad[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"0 have none and 1 have one that is not finite, e.g. .*q_proj|k_proj"):
        run._require_gradients("eager")


def test_a_mode_that_cannot_be_compiled_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = StepRun("mjlora", replace(EAGER, modes=MODES, backend="no such backend"))
    run.warm_up()
    assert run.row("eager")["status"] == "ok"
    assert "no such backend" in run.row("compile")["error"]


def test_more_times_of_the_same_step() -> None:
    run = StepRun("mjlora", EAGER)
    run.warm_up()
    assert len(run.row("eager")["times_ms"]) == EAGER.steps
    again = run.row("eager")
    assert set(again) == {"status", "times_ms"}
    assert len(again["times_ms"]) == EAGER.steps


def test_peak_memory_on_a_cpu() -> None:
    def three() -> None:
        a = torch.zeros(100_000)
        b = a + 1
        del a
        b = b * 2  # both are alive while the second is made

    assert 0 <= runs.cpu_peak_bytes(three) - 2 * 400_000 < 100
    steps = [StepRun(name, EAGER) for name in (FLOOR, "lora_fa", "lora")]
    peaks = [runs.cpu_peak_bytes(run.step) for run in steps]
    assert peaks[0] < peaks[1] < peaks[2]  # a frozen A keeps no input
    parameters = {p.data_ptr(): p.nbytes for p in steps[0].built.model.parameters()}  # the head is the embedding
    assert steps[0].resident >= sum(parameters.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--modes", "graph"], "needs a GPU"),
        (["--modes", "egaer"], "must be one of eager, compile, graph"),
        (["--fused-loss", "liger", "--scope", "model"], "pip install liger-kernel"),
        (["--fused-loss", "torch"], "needs scope='model'"),
        (["--fused-loss", "lger", "--scope", "model"], "must be one of off, torch, liger"),
        (["--methods", "mjlra"], "Did you mean 'mjlora'?"),
        (["--jobs", "-1"], "jobs=-1 must be at least 0"),
        (["--rounds", "2"], "rounds=2 needs processes"),
        (["--dtype", "int8"], "dtype='int8' must be one of float32"),
        (["--steps", "1"], "steps=1"),
    ],
)
def test_bad_options(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "liger" in message and torch.cuda.is_available():
        pytest.skip("the message is for machines without it")
    assert main(["bench", "step", *SMALL, "--jobs", "0", "--output", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_machine_without_gpu_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", "step", "--device", "cuda", "--output", str(tmp_path)]) == 2
    assert "use --device cpu" in capsys.readouterr().err


def test_names() -> None:
    assert variant_names(["all"])[:3] == [FLOOR, PEFT_LORA, "lora"]
    assert variant_names(["mjlora", "floor"], alone=True) == ["mjlora", FLOOR]
    with pytest.raises(ConfigError, match="Known: all, floor"):
        variant_names(["nothing"])
