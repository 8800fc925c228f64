"""A bridge to lm-evaluation-harness: its tasks, our models and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monkeyjump.errors import ConfigError, require


def run_harness(model: Any, tokenizer: Any, tasks: Sequence[str], limit: int | None = None) -> dict[str, Any]:
    """Run the harness's own tasks ("arc_easy", "hellaswag", ...) and return what it says: its `results` are by task.

    A name that ends in .yaml is a task of yours, in the harness's format.

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
    wanted = [_own_task(name) if name.endswith(".yaml") else name for name in map(str.strip, tasks)]
    found = lm_eval.simple_evaluate(model=language_model, tasks=wanted, limit=limit, log_samples=False)
    return found or {"results": {}}  # nothing is returned on all processes but the first


def _own_task(path: str) -> dict[str, Any]:
    import yaml

    try:
        return yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--tasks {path!r} cannot be read as a task of the harness: {error}.") from error
