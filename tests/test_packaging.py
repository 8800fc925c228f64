"""What is uploaded is what is here: the files of wheel and sdist, their version, and that a wheel alone works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import monkeyjump

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
USE = """
import sys
import monkeyjump
from monkeyjump.training.recipe import load_recipe
assert monkeyjump.__file__.startswith(sys.argv[1]), monkeyjump.__file__
assert load_recipe("quickstart", []).method == "mjlora"
from monkeyjump.cli.main import main
sys.exit(main(["validate", "--schema", "task"]))
"""


def run(code: str, folder: Path, argument: Path, **environment: str) -> str:
    command = [sys.executable, "-c", code, str(argument)]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist, built from a copy: a build leaves files beside the sources."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("the licence in pyproject.toml needs setuptools 77")
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for kind in ("wheel", "sdist"):
        run(BUILD.format(kind), folder, folder / "dist")
    return folder / "dist"


def sources() -> set[str]:
    files = (path for path in (ROOT / "src" / "monkeyjump").rglob("*") if path.is_file())
    return {path.relative_to(ROOT / "src").as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_wheel_has_every_file(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == sources()


def test_the_sdist_has_every_file(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in sources()} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_the_wheel_works_alone(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(path) != ROOT / "src"]
    shown = run(USE, tmp_path, tmp_path / "site", PYTHONPATH=os.pathsep.join([str(tmp_path / "site"), *others]))
    assert '"properties"' in shown


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest is not None
    assert monkeyjump.__version__ == project["version"] == latest[1]
