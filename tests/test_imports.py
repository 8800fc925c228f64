"""Imports flow one way, and `import monkeyjump` stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import monkeyjump

ROOT = Path(monkeyjump.__file__).parent

DOCUMENT = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
# Each layer may import from itself and from those before it.
LAYERS = [
    set(parts.replace("`", "").split()) for parts in re.findall(r"^\| \d+ \| ([\w` ]+) \|$", DOCUMENT, re.MULTILINE)
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Independent parts of one layer: neither may know the other.
APART = [("adapters", "routing"), ("models", "tasks")]
# (module, imported part): why it is allowed.
ALLOWED: dict[tuple[str, str], str] = {
    ("tasks/cache.py", "models"): "where the cache folder is, is said in one place",
    ("tasks/hub.py", "models"): "whether the hub can be reached is asked in one place",
}


def imported_parts(path: Path) -> set[str]:
    """Parts of the package that a file imports, anywhere in it; imports for type checkers alone do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
    found = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write monkeyjump.…"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("monkeyjump.")}
    return found


def test_imports_flow_one_way() -> None:
    problems = []
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        part = relative.parts[0].removesuffix(".py")
        if str(relative) == "__init__.py":  # the public names, from everywhere
            continue
        if part not in LEVEL:
            problems.append(f"{relative}: {part!r} is in no layer; add it to docs/architecture.md")
            continue
        for other in imported_parts(path):
            if other not in LEVEL or (str(relative), other) in ALLOWED:
                continue
            apart = any({part, other} == set(pair) for pair in APART)
            if LEVEL[other] > LEVEL[part] or apart:
                problems.append(f"{relative} imports monkeyjump.{other}")
    assert not problems, "\n".join(problems)


def test_every_file_on_a_batchs_way_is_there() -> None:
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", DOCUMENT)
    assert len(LAYERS) == 9
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file() and name != "tests/test_imports.py"] == []


def test_allowances_are_still_needed() -> None:
    for module, part in ALLOWED:
        assert part in imported_parts(ROOT / module), f"{module} no longer imports {part}"


def test_only_ops_imports_triton() -> None:
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "triton" for name in names):
                assert path.relative_to(ROOT).parts[0] == "ops", path


@pytest.mark.slow
def test_importing_the_package_imports_nothing_heavy_of_its_own() -> None:
    """What torch, transformers and peft import is theirs; on top of that we add none of these."""
    code = """
import sys
import torch, transformers, accelerate, peft
from transformers import PreTrainedModel, TrainerCallback
import peft.tuners.tuners_utils, peft.peft_model, peft.mapping
heavy = ("datasets", "matplotlib", "sklearn", "triton", "pyarrow", "pandas", "trl", "yaml", "rich")
before = {name for name in heavy if name in sys.modules}
import monkeyjump
monkeyjump.MonkeyJumpConfig, monkeyjump.initialize_centers, monkeyjump.MonkeyJumpCallback
print(sorted({name for name in heavy if name in sys.modules} - before))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_what_is_called_slow_is_there() -> None:
    """A file that was moved would be fast without a word."""
    from tests.conftest import SLOW, TESTS

    assert [name for name in SLOW if not (TESTS / name).exists()] == []
