"""A warning of ours fails a test, wherever it seems to come from; a warning of another package does not."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

import monkeyjump
from monkeyjump.errors import MonkeyJumpWarning


def warn_as(module: str, category: type[Warning]) -> None:
    """Warn as a line of `module` does, or as one that names `module` as the place with `stacklevel`."""
    warnings.warn_explicit("something is old", category, f"{module}.py", lineno=1, module=module, registry={})


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, UserWarning])
@pytest.mark.parametrize("module", ["monkeyjump", "monkeyjump.tuner.model"])
def test_what_our_modules_cause_is_an_error(module: str, category: type[Warning]) -> None:
    with pytest.raises(category, match="something is old"):
        warn_as(module, category)


@pytest.mark.parametrize("module", ["tests.test_warnings", "torch.nn.modules.module", "__main__"])
def test_our_own_warnings_are_errors_whoever_called(module: str) -> None:
    with pytest.raises(MonkeyJumpWarning):
        warn_as(module, MonkeyJumpWarning)


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, UserWarning])
@pytest.mark.parametrize("module", ["torch.jit._script", "tests.test_warnings", "monkeyjumper"])
def test_the_warnings_of_others_are_none(module: str, category: type[Warning]) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warn_as(module, category)
    assert [warning.category for warning in seen] == [category]


def test_every_warning_of_ours_has_the_class_of_ours() -> None:
    for path in Path(monkeyjump.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "warnings.warn" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                given = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "category")]
                assert [ast.unparse(category) for category in given] == ["MonkeyJumpWarning"], f"{path}:{node.lineno}"
