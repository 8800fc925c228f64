"""Fetch the tests of PEFT's published source, build tiny models for them and run them on our methods.

`python -m tests.peft_suite.run --methods mjlora,lora --files decoder,custom -- -x` runs a part; what follows `--` is
for pytest. Everything that is fetched or built lies in .peft-suite/, which Git ignores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "0.21.2"
SHA256 = "b803ccfb3f3f316004d850284306687833a2235ea278fb56abc856203456142e"
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peft-suite"
TESTS = FOLDER / "peft_tests"
# Pure Python packages that the tests import and this project does not use.
IMPORTED = ("parameterized", "attrs")
FILES = (
    *("decoder_models", "encoder_decoder_models", "feature_extraction_models", "custom_models", "seq_classifier"),
    *("token_classification_qa", "low_level_api", "tuners_utils", "other", "helpers", "initialization"),
    *("config", "auto", "hub_features", "integrations", "quantization", "mapping"),
)


def fetch() -> None:
    """Put the test files of PEFT's source distribution into a package of their own."""
    if (TESTS / "__init__.py").exists():
        return
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    download = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(FOLDER)]
    subprocess.run([*pip, *download, f"peft=={VERSION}"], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(FOLDER / "site"), *IMPORTED], check=True)
    archive = FOLDER / f"peft-{VERSION}.tar.gz"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{archive} has the hash {digest}, not {SHA256}: delete it and try again.")
    TESTS.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            content = source.extractfile(member)
            if Path(member.name).parent.name == "tests" and content is not None:
                (TESTS / Path(member.name).name).write_bytes(content.read())
    (TESTS / "__init__.py").touch()


def chosen_files(asked: str) -> list[str]:
    """Paths of the test files whose names begin with what was asked for."""
    names = [name for name in asked.split(",") if name] or list(FILES)
    unknown = [name for name in names if not any(known.startswith(name) for known in FILES)]
    if unknown:
        raise SystemExit(f"no test file begins with {unknown}: choose from {', '.join(FILES)}")
    return [str(TESTS / f"test_{known}.py") for known in FILES if any(known.startswith(name) for name in names)]


def main() -> int:
    parser = argparse.ArgumentParser(description="PEFT's own tests on our methods")
    parser.add_argument("--methods", default="", help="methods, separated by commas; all by default")
    parser.add_argument("--files", default="", help="beginnings of file names after test_, separated by commas")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    hub = FOLDER / "hub"
    os.environ.update({"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    files = chosen_files(options.files)
    FOLDER.mkdir(exist_ok=True)
    fetch()
    sys.path[:0] = [str(FOLDER), str(ROOT)]
    sys.path.append(str(FOLDER / "site"))

    import pytest

    from tests.peft_suite.tiny_models import build_models

    build_models(hub)
    ini = Path(__file__).with_name("pytest.ini")
    arguments = ["-c", str(ini), "--rootdir", str(FOLDER), "-p", "tests.peft_suite.plugin", "-p", "no:cacheprovider"]
    arguments += [f"--methods={options.methods}", *([] if options.files else ["--all-files"])]
    return int(pytest.main([*arguments, *options.pytest, *files]))


if __name__ == "__main__":
    sys.exit(main())
