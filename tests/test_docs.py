"""The pages: their Python runs, their commands parse, what is generated is what the code says, and the site builds.

A comment `<!-- run by FILE -->` above a block names the test that runs it, with what it needs. `<!-- needs a GPU -->`
and `<!-- needs the hub -->` mark blocks that nothing here can run; they must still be Python.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model

from monkeyjump.cli.main import VERBS, main, parse
from tests.helpers import adapted, lm_batch, tiny_llama
from tests.tiny_folder import save_tiny_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.exists()]
FENCE = re.compile(
    r"(?:^<!-- ((?:run by|needs) [^\n]*?) -->\n\n?)?^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    page: Path
    line: int
    marker: str
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start(4)].count("\n") + 1, found[1] or "", found[3], found[4])
        for found in FENCE.finditer(text)
    ]


PYTHON = {page: [block for block in blocks(page) if block.language == "python"] for page in PAGES}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("docs") / "tiny")


@pytest.fixture
def given(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that examples begin with: models, batches and texts that a reader is told to bring."""
    import monkeyjump as mj
    from monkeyjump import models

    load = models.load_model
    monkeypatch.setattr(models, "load_model", lambda name: load(str(tiny)))
    monkeypatch.chdir(tmp_path)
    base, tokenizer = load(str(tiny))
    batches = [lm_batch(seed=seed) for seed in range(4)]
    lora = LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"], task_type="CAUSAL_LM")
    lora_model = get_peft_model(load(str(tiny))[0], lora)
    lora_model.save_pretrained("out/science")
    deep = tiny_llama(4, vocab_size=base.config.vocab_size, max_position_embeddings=1024)
    rows = [{name: tensor[0] for name, tensor in lm_batch(1, 8).items()}] * 16
    names: dict[str, Any] = {"mj": mj, "base_model": base, "fresh_base_model": load(str(tiny))[0], "rows": rows}
    names |= {"tokenizer": tokenizer, "model": adapted(deep), "dataloader": batches, "batches": batches}
    names |= {"peft_model": get_peft_model(load(str(tiny))[0], lora), "lora_model": lora_model, "batch": batches[0]}
    return names


def texts() -> Any:
    return pytest.importorskip("datasets").Dataset.from_list([{"text": "one two three four five six"}] * 16)


def run_without_gpu(test: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON[page]], ids=lambda page: page.name)
def test_every_example_runs(page: Path, request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available():  # to Trainers, not to the examples, whose models and batches lie on the CPU
        return run_without_gpu(request.node.nodeid)
    given = request.getfixturevalue("given")
    if page.name == "trainers.md":
        pytest.importorskip("trl")
        given["texts"] = texts()
    for block in PYTHON[page]:
        code = compile("\n" * block.line + block.code, str(page), "exec")
        if block.marker.startswith("run by"):
            test = ROOT / block.marker.split()[2]
            assert page.name in test.read_text(encoding="utf-8"), f"{test} does not know {page.name}"
        elif not block.marker:
            exec(code, given)


def commands(block: Block) -> list[list[str]]:
    """The commands of this package in a block of shell, as lists of arguments."""
    lines = re.sub(r"\\\n", " ", block.code).splitlines()
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        for stop in (">", "|", "&&", ";"):
            words = words[: words.index(stop)] if stop in words else words
        if words[:1] == ["monkeyjump"]:
            found.append(words[1:])
        elif "monkeyjump" in words and words[words.index("monkeyjump") - 1] == "-m":
            found.append(words[words.index("monkeyjump") + 1 :])
    return found


SHELL = [block for page in PAGES for block in blocks(page) if block.language in ("", "bash", "sh") and commands(block)]


@pytest.mark.parametrize("block", SHELL, ids=lambda block: f"{block.page.name}:{block.line}")
def test_every_command_parses(block: Block) -> None:
    for words in commands(block):
        try:
            parse([word for word in words if word not in ("$again", "...")])
        except SystemExit as error:
            if error.code:
                pytest.fail(f"{block.page.name}:{block.line}: monkeyjump {shlex.join(words)}")


def test_the_csv_of_own_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = {block.language: block.code for block in blocks(ROOT / "docs" / "own-data.md")}
    for name in ("reviews.csv", "reviews-test.csv"):
        Path(name).write_text(code["csv"], encoding="utf-8")
    Path("reviews.yaml").write_text(code["yaml"], encoding="utf-8")
    assert main(["tasks", "reviews.yaml", "--show", "2"]) == 0
    assert "Two hours I want back." in capsys.readouterr().out


def test_every_verb_has_an_example() -> None:
    shown = {words[0] for block in SHELL for words in commands(block) if words}
    assert set(VERBS) - shown <= {"run", "models", "methods"}


def test_the_method_cards_are_what_the_code_says() -> None:
    docs = ROOT / "docs"
    module = runpy.run_path(str(docs / "make_methods.py"))
    assert module["page"]() == (docs / module["PAGE"]).read_text(encoding="utf-8"), "run: python docs/make_methods.py"
    import monkeyjump as mj

    assert set(module["CARDS"]) == set(mj.methods.names())


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(package)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        str(ROOT / "docs"),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "getting-started.html").is_file()
