"""A bridge to lm-evaluation-harness: its tasks, our models and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monkeyjump.errors import ConfigError, require


def run_harness(model: Any, tokenizer: Any, tasks: Sequence[str], limit: int | None = None) -> dict[str, Any]:
    """Run the harness's own tasks ("arc_easy", "hellaswag", ...) and return what it says: its `results` are by task.

    The harness neither says where a prompt ends nor which task a row is of, so adapters that route by sequence or by
    task are refused: `monkeyjump.evaluation.run.evaluate` scores those.
    """
    for name, config in dict(getattr(model, "peft_config", None) or {}).items():
        granularity = getattr(config, "granularity", None)
        if granularity in ("sequence", "task"):
            raise ConfigError(
                f"adapter {name!r} has granularity={granularity!r}, and the harness does not tell a model where "
                "prompts end or which task they are of. Use monkeyjump's own evaluation, or granularity='token'.",
                title="adapter cannot be evaluated by the harness",
            )
    lm_eval, models = (
        require(module, "lm-evaluation-harness is not installed", "harness")
        for module in ("lm_eval", "lm_eval.models.huggingface")
    )
    language_model = models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8)
    tasks = [name.strip() for name in tasks]
    found = lm_eval.simple_evaluate(model=language_model, tasks=tasks, limit=limit, log_samples=False)
    return found or {"results": {}}  # nothing is returned on all processes but the first
