"""A bridge to lm-evaluation-harness: its tasks, our models and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monkeyjump.errors import ConfigError

_NEEDS_A_PROMPT = ("sequence", "task")


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    chat_template: bool = False,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Run the harness's own tasks ("arc_easy", "hellaswag", ...) and return its results, task by task.

    The harness neither says where a prompt ends nor which task a row is of, so adapters that route by sequence or by
    task are refused: `monkeyjump.evaluation.run.evaluate` scores those.
    """
    wanted = [name.strip() for name in tasks.split(",")] if isinstance(tasks, str) else list(tasks)
    _check_routing(model)
    lm_eval, wrapper = _import()
    language_model = wrapper(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    output = lm_eval.simple_evaluate(
        model=language_model,
        tasks=wanted,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chat_template,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        log_samples=False,
    )
    if output is None:  # what the harness returns on all processes but the first
        return {}
    return {name: dict(found) for name, found in output["results"].items()}


def _import() -> tuple[Any, Any]:
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ConfigError(
            f"lm-evaluation-harness is not installed ({error}): pip install 'monkeyjump[harness]'.",
            title="missing package",
        ) from error
    return lm_eval, HFLM


def _check_routing(model: Any) -> None:
    configs = dict(getattr(model, "peft_config", None) or {})
    for name, config in configs.items():
        granularity = getattr(config, "granularity", None)
        if granularity in _NEEDS_A_PROMPT:
            raise ConfigError(
                f"adapter {name!r} has granularity={granularity!r}, and the harness does not tell a model where "
                "prompts end or which task they are of. Use monkeyjump's own evaluation, or granularity='token'.",
                title="adapter cannot be evaluated by the harness",
            )
