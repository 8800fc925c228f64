"""Generation, initialisation, ops, memory and scaling from the command line, small and on a CPU."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

import monkeyjump as mj
from monkeyjump.bench import ops, scaling
from monkeyjump.bench.inference import InferenceRun
from monkeyjump.bench.init import InitRun
from monkeyjump.bench.settings import VERBS, Settings
from monkeyjump.bench.variants import build, method_config
from monkeyjump.cli import bench as bench_verb
from monkeyjump.cli.main import main
from monkeyjump.ops import dispatch
from monkeyjump.tuner.centers import calibrate
from tests.helpers import COMPILING
from tests.tiny_folder import save_tiny_model

pytestmark = COMPILING
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SMALL = ["--device", "cpu", "--shape", "tiny", "--batch", "2", "--tokens", "8", "--jobs", "0"]
TINY = Settings(shape="tiny", batch=2, tokens=8, dtype="float32", device="cpu")


def bench(kind: str, folder: Path, *options: str) -> dict[str, Any]:
    small = ["--device", "cpu"] if kind == "ops" else SMALL
    assert main(["bench", kind, *small, "--output", str(folder), *options]) == 0
    content = json.loads((folder / "record.json").read_text())
    assert content["status"] == "finished"
    assert content["kind"] == "bench"
    return content


def narrow(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if not line.startswith("saved")) <= 80
    return text


def test_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--methods",
        "floor,mjlora",
        "--alone",
        "--layers",
        "1",
        "--new",
        "5",
        "--repeats",
        "2",
        "--backend",
        "aot_eager",
    ]
    content = bench("inference", tmp_path, *options, "--modes", "prefill,decode,decode-compile")
    assert "equal tokens" in narrow(capsys)
    rows = {(row["variant"], row["mode"]): row for row in content["metrics"]["rows"]}
    assert len(rows) == 6
    for (_, mode), row in rows.items():
        floor = rows["floor", mode]
        assert row["time_vs_floor"] == pytest.approx(row["median_ms"] / floor["median_ms"])
        count = 16 if mode == "prefill" else 2  # the whole prompt at once, then one token of each row
        assert row["tokens_per_second"] == pytest.approx(1e3 * count / row["median_ms"])
        if mode != "prefill":
            assert row["equal_tokens"] == 1
            assert row["logit_deviation"] < 1e-5
        if mode == "decode-compile":
            assert (row["compiled_graphs"], row["recompiled_while_timed"]) == (1, 0)
    assert content["config"]["compile"] == "blocks"


@pytest.mark.parametrize(
    ("variant", "part"),
    [*((name, "blocks") for name in ("floor", "mjlora", "mjlora_prompt", "more")), ("mjlora", "model")],
)
def test_blocks_of_a_generation_share_their_graph(variant: str, part: str) -> None:
    """Each block writes into its own layer of the cache, through the graph that was made for the first.

    Routes by the prompt find their decision by the name of their block, which makes a graph for each.
    """
    modes = ("decode", "decode-compile")
    changes: dict[str, Any] = {"layers": 2, "new": 5, "repeats": 1, "compile": part, "backend": "aot_eager"}
    run = InferenceRun(variant, replace(TINY, verb="inference", modes=modes, **changes))
    run.warm_up()
    plain, compiled = (run.row(mode) for mode in modes)
    assert plain["status"] == compiled["status"] == "ok", compiled
    graphs = 2 if variant == "mjlora_prompt" else 1
    assert (compiled["compiled_graphs"], compiled["recompiled_while_timed"]) == (graphs, 0)
    assert plain["equal_tokens"] == compiled["equal_tokens"] == 1
    assert plain["logit_deviation"] == 0
    assert compiled["logit_deviation"] < 1e-5
    run.use(compiled=True)
    calls = [block._compiled_call_impl for block in run.built.decoder.layers]
    assert all((call is not None) == (part == "blocks") for call in calls)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(mj.ConfigError) as told:
        replace(TINY, verb="inference", modes=("decode-graph", "eager"), compile="layers", new=1, axes=("depth",))
    assert told.value.problems == [
        "compile='layers' must be one of blocks, model.",
        "modes='eager' must be one of prefill, decode, decode-compile, decode-graph.",
        "axes='depth' must be one of tokens, rank, experts, blocks.",
        "new=1 must be at least 2.",
        "modes='graph' needs a GPU: CUDA graphs exist on no other device; leave this mode out.",
    ]


@pytest.mark.parametrize("method", ["mjlora", "moelora"])
def test_generation_is_that_of_transformers(method: str) -> None:
    run = InferenceRun(method, replace(TINY, verb="inference", modes=("decode",), new=6, repeats=1))
    run.warm_up()
    model: Any = run.model
    expected = model.generate(
        run.prompt, attention_mask=torch.ones_like(run.prompt), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert torch.equal(run.reference[0], expected[:, 8:])


def test_initialisation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = bench("init", tmp_path, "--keep", "40", "--repeats", "2")["metrics"]["rows"]
    assert "total/forwards" in narrow(capsys)
    assert (row["tokens_read"], row["tokens_kept"], row["blocks"]) == (48, 40, 2)
    for run in row["runs"]:
        assert 0 < run["reading"] + run["kmeans"] < run["total"]
    assert row["total_over_forwards"] == pytest.approx(row["total_seconds"] / row["forwards_seconds"])


def test_timing_an_initialisation_changes_nothing() -> None:
    functions = calibrate.collect, calibrate.spherical_kmeans
    run = InitRun("mjlora", replace(TINY, keep=40, repeats=1))
    run.row("init")
    assert (calibrate.collect, calibrate.spherical_kmeans) == functions
    other = build("mjlora", replace(TINY, overrides={"center_init": "kmeans"})).model
    mj.initialize_centers(other, run.batches, 40, seed=0, progress=False)
    theirs = dict(other.named_buffers())
    centers = {name: buffer for name, buffer in run.model.named_buffers() if "monkeyjump_center" in name}
    assert len(centers) == 6
    for name, center in centers.items():
        assert torch.equal(center, theirs[name])


def test_training_from_start_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that trains as the command does, with PEFT's layers in the same recipe."""
    options = ["--tokenizer", str(save_tiny_model(tmp_path / "tiny")), "--steps", "4", "--modes", "warm"]
    options += ["--methods", "peft-lora", "--alone", "--tokens", "128"]
    record = bench("train", tmp_path / "bench", *options)
    [row] = record["metrics"]["rows"]
    [turn] = row["each"]
    marks = list(turn["marks"].values())
    assert marks == sorted(marks)
    assert [*turn["marks"]][-3:] == ["first step", "middle", "last step"]
    assert row["median_ms"] == pytest.approx(500 * (turn["marks"]["last step"] - turn["marks"]["middle"]))
    adapter = json.loads((tmp_path / "bench/peft-lora/run/adapter/adapter_config.json").read_text())
    assert (adapter["peft_type"], adapter["r"]) == ("LORA", 2)
    assert "first step" in narrow(capsys)


def test_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench("ops", tmp_path, "--repeats", "3")["metrics"]["rows"]
    narrow(capsys)
    assert {row["variant"] for row in rows} == set(ops.OPS)
    assert len(rows) == (1 + dispatch.interpreted()) * len(ops.OPS)  # torch and Triton's interpreter
    for row in rows:
        assert row["status"] == "ok", row
        assert row["read_ms"] == pytest.approx(1e3 * row["input_bytes"] / row["copy_bytes_per_second"])
        assert row["over_read"] == pytest.approx(row["median_ms"] / row["read_ms"])
    [first] = [row for row in rows if (row["variant"], row["mode"], row["E"]) == ("routing", "torch", 3)]
    assert first["input_bytes"] == 4 * (16 * 16 + 3 * 16)
    assert main(["bench", "ops", "--device", "cpu", "--ops", "rooting", "--output", str(tmp_path)]) == 2
    assert "Did you mean 'routing'?" in capsys.readouterr().err


def test_sizes_of_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without routing, the number of experts changes nothing."""
    monkeypatch.setattr(ops, "copy_bandwidth", lambda *_: 1e12)
    found = ops.measurements(Settings("ops", device="cuda", ops=("routing", "lora")))
    sizes = {name: [one.settings.size for one in found if one.variant == name] for name in ("routing", "lora")}
    assert len(sizes["routing"]) == 8
    assert sizes["lora"] == [(n, d, 3) for n in (4096, 16_384) for d in (896, 4096)]


@pytest.mark.parametrize("by", ["torch", "triton"])
def test_ops_compute_what_the_library_does(by: str) -> None:
    """The bytes that one pass reads are those of the inputs, the adapter and, backwards, the gradient."""
    if by == "triton" and not dispatch.interpreted():
        pytest.skip("kernels run on a CPU in Triton's interpreter alone")
    dense = 4 * 16 * 16
    adapter = {"lora": 4 * 2 * 2 * 16, "lora_fa": 4 * 2 * 2 * 16, "propulsion": 4 * 16}
    for name, tensors in (("lora", 2), ("lora+backward", 3), ("lora_fa+backward", 3), ("propulsion", 1)):
        run = ops.OpRun(name, Settings("ops", device="cpu", dtype="float32", size=(16, 16, 3), repeats=1))
        assert run.read_bytes == tensors * dense + 4 * 16 + adapter[name.removesuffix("+backward")]
        with dispatch.implementation(by):
            found = run.calls[0]()
        shapes = [tuple(tensor.shape) for tensor in found] if "backward" in name else [tuple(found.shape)]
        weights = {"lora+backward": [(2, 16), (16, 2)], "lora_fa+backward": [(16, 2)]}.get(name, [])
        assert shapes == [(16, 16), *weights]


def test_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bench("memory", tmp_path, "--methods", "mjlora,mjlorafa", "--steps", "2", "--warmup", "1")
    narrow(capsys)
    every = content["metrics"]["rows"]
    assert {row["loss"] for row in every} >= {"logits", "torch"}
    peaks = {(row["variant"], row["loss"]): row["peak_bytes"] for row in every}
    assert all(peaks[name, "torch"] < peaks[name, "logits"] for name in ("floor", "peft-lora", "mjlora", "mjlorafa"))
    rows = {row["variant"]: row for row in every if row["loss"] == "logits"}
    for row in rows.values():
        assert row["memory_vs_peft"] == pytest.approx(row["peak_bytes"] / rows["peft-lora"]["peak_bytes"])
        ratio = row["extra_bytes"] / rows["floor"]["extra_bytes"]
        assert row["extra_memory_vs_floor"] == pytest.approx(ratio)
    assert rows["floor"]["extra_bytes"] < rows["mjlorafa"]["extra_bytes"] < rows["mjlora"]["extra_bytes"]


def test_a_record_names_no_folder_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it is typed, wherever the program and its output lie."""
    given = ["bench", "ops", "--device", "cpu", "--ops", "routing", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "monkeyjump"), *given, "--output", str(tmp_path / "out")])
    assert main() == 0
    text = (tmp_path / "out" / "record.json").read_text()
    assert json.loads(text)["command"] == ["monkeyjump", *given, "--output", "out"]
    assert str(tmp_path) not in text


def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--methods", "mjlora", "--layers", "1", "--steps", "2", "--warmup", "1", "--batch", "4"]
    content = bench("scaling", tmp_path, *options, "--axes", "tokens,experts")
    narrow(capsys)
    assert all(row["status"] == "ok" for row in content["metrics"]["rows"])
    found = {(row["variant"], row["axis"]): row for row in content["metrics"]["exponents"]}
    assert set(found) == {*((name, "tokens") for name in ("floor", "peft-lora", "mjlora")), ("mjlora", "experts")}
    for (name, axis), row in found.items():
        assert row["points"] == {"tokens": 3, "experts": 4}[axis]
        # memory is counted, not timed: what the adapters add grows with the work, and no faster
        assert row["memory"] < 1.02
        if name != "floor":
            assert 0.8 < row["memory_above_floor"] < 1.02
    assert main(["bench", "scaling", *SMALL, "--axes", "depth", "--points", "1", "--output", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "axes='depth'" in told
    assert "points=1" in told


def test_scaling_with_few_points_and_compiled_blocks(tmp_path: Path) -> None:
    options = ["--methods", "mjlora", "--alone", "--layers", "2", "--modes", "compile", "--compile", "blocks"]
    few = ["--points", "2", "--axes", "rank", "--steps", "2", "--warmup", "1", "--backend", "aot_eager"]
    content = bench("scaling", tmp_path, *options, *few)
    rows = content["metrics"]["rows"]
    assert [row["value"] for row in rows if (row["variant"], row["axis"]) == ("mjlora", "rank")] == [2, 32]
    for row in rows:
        assert row["status"] == "ok", row
    found = content["metrics"]["exponents"]
    assert [item["variant"] for item in found] == ["mjlora"]  # the floor has no rank
    assert all(item["points"] == 2 and item["time"] is not None for item in found)


def test_few_of_many_points() -> None:
    found = scaling.points("mjlora", TINY, "rank")
    chosen = {most: [value for value, _ in scaling.spread(found, most)] for most in (None, 2, 3, 4, 9)}
    every = [2, 4, 8, 16, 32]
    assert chosen == {None: every, 2: [2, 32], 3: [2, 8, 32], 4: [2, 4, 16, 32], 9: every}


@pytest.mark.parametrize(
    ("name", "axis", "values"),
    [
        ("floor", "rank", []),
        ("peft-lora", "experts", []),
        ("lora", "experts", []),  # routes nothing
        ("moelora", "experts", [2, 4, 8, 16]),
        ("mjlora", "experts", [2, 3, 5, 7]),
        ("mjlora", "rank", [2, 4, 8, 16, 32]),
        ("mjlora", "blocks", [1, 2, 4, 8]),
        ("mjlora", "tokens", [8, 16]),
    ],
)
def test_points(name: str, axis: str, values: list[int]) -> None:
    found = scaling.points(name, replace(TINY, layers=8), axis)
    assert [value for value, _ in found] == values
    for value, workload in found:
        config = method_config(name, workload)
        routed = [target for target in config.target_modules if target not in (config.shared_modules or [])]
        assert (
            value
            == {
                "rank": config.r,
                "blocks": workload.layers,
                "tokens": workload.batch * workload.tokens,
                "experts": config.experts if config.placement == "projection" else len(routed),
            }[axis]
        )


def test_exponents() -> None:
    assert scaling.exponent([1, 2, 7], [3 * x**1.5 for x in (1, 2, 7)]) == pytest.approx(1.5)
    for work, costs in (([2], [5.0]), ([1, 2], [1.0, -1.0]), ([1, 2], [1.0, None]), ([3, 3], [1.0, 2.0])):
        assert scaling.exponent(work, costs) is None

    def row(variant: str, axis: str, value: int, ms: float) -> dict[str, Any]:
        labels = {"axis": axis, "value": value, "work": "value", "mode": "eager", "status": "ok"}
        return {"variant": variant, **labels, "median_ms": ms, "extra_bytes": None}

    rows = [row("floor", scaling.BASE, 0, 10.0)]
    rows += [row("floor", "tokens", n, float(n)) for n in (1, 2, 4)]
    rows += [row("mjlora", "tokens", n, n + n**2) for n in (1, 2, 4)]
    rows += [row("mjlora", "rank", n, 10 + math.sqrt(n)) for n in (1, 2, 4)]
    found = {(item["variant"], item["axis"]): item for item in scaling.exponents(rows)}
    assert found["floor", "tokens"]["time"] == pytest.approx(1)
    assert found["mjlora", "tokens"]["time_above_floor"] == pytest.approx(2)
    assert found["mjlora", "rank"]["time_above_floor"] == pytest.approx(0.5)
    assert found["mjlora", "rank"]["memory"] is None


@pytest.mark.parametrize("kind", ["", *VERBS])
def test_help(kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main(["bench", *([kind] if kind else []), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "usage: monkeyjump bench" in text


def test_without_rich(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured at length on a bare machine: shown all the same."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    bench("step", tmp_path, "--methods", "floor", "--alone", "--layers", "1", "--steps", "2", "--modes", "eager")
    text = narrow(capsys)
    [line] = [line for line in text.splitlines() if line.startswith("floor ") and "1.000" in line]
    assert line.split()[0] == "floor"


def test_a_stopped_run_says_where_its_rows_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_verb, "_tell", stop)
    options = ["--methods", "floor", "--alone", "--layers", "1", "--steps", "2", "--output", str(tmp_path)]
    assert main(["bench", "step", *SMALL, *options]) == 130
    assert str(tmp_path) in capsys.readouterr().out
    content = json.loads((tmp_path / "record.json").read_text())
    assert content["status"] == "cancelled"
    assert [row["variant"] for row in content["metrics"]["rows"]] == ["floor"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("bench-*.json")), ids=lambda path: path.stem)
def test_the_commands_of_the_published_records_are_accepted(path: Path) -> None:
    command = json.loads(path.read_text())["command"]
    parser = argparse.ArgumentParser()
    bench_verb.add_arguments(parser)
    options = parser.parse_args(command[2:])
    assert command[:3] == ["monkeyjump", "bench", options.kind]
