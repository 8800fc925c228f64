"""Peak memory of a training step of the whole causal LM, with the loss from logits and without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from monkeyjump.bench.jobs import Job, Row
from monkeyjump.bench.report import Table, ratio, size
from monkeyjump.bench.step import StepSettings, fused_loss_problems

SAME = ("mode", "loss")


def memory_jobs(settings: StepSettings, names: list[str]) -> tuple[list[Job], list[str]]:
    """Every variant with each loss there is, and why one is missing."""
    missing = fused_loss_problems("liger", settings.workload.device)
    jobs = []
    for loss in ("off", "torch") if missing else ("off", "torch", "liger"):
        chosen = replace(settings, scope="model", fused_loss=loss)
        labels = {"loss": "logits" if loss == "off" else loss}
        jobs += [Job("monkeyjump.bench.step", name, asdict(chosen), chosen.modes, labels) for name in names]
    return jobs, missing


def memory_tables(rows: Sequence[Row], title: str) -> list[Table]:
    """One table per mode and loss; `above model` is the peak less the model, its adapters and the batch."""
    columns = ["variant", "peak", "/floor", "/peft", "above model", "/floor", "/peft", "trainable"]
    groups = dict.fromkeys((row["mode"], row["loss"]) for row in rows)
    return [
        Table(
            f"{title}, {mode}, loss {'from logits' if loss == 'logits' else f'without logits ({loss})'}",
            columns,
            [_cells(row) for row in rows if (row["mode"], row["loss"]) == (mode, loss)],
        )
        for mode, loss in groups
    ]


def _cells(row: Row) -> list[str]:
    if row["status"] != "ok":
        return [row["variant"], "failed", *[""] * 6]
    return [
        row["variant"],
        size(row["peak_bytes"]),
        ratio(row.get("memory_vs_floor")),
        ratio(row.get("memory_vs_peft")),
        size(row["extra_bytes"]),
        ratio(row.get("extra_memory_vs_floor")),
        ratio(row.get("extra_memory_vs_peft")),
        f"{row['trainable']:,}",
    ]
