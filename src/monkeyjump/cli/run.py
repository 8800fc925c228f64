"""`monkeyjump run -- PROGRAM ...`: a program that does not import monkeyjump, with its adapters known to PEFT.

PEFT has no plug-in discovery. The program is started with a `sitecustomize` on its path that imports monkeyjump, so its
Python children (an `accelerate launch`, say) know the method too.
"""

from __future__ import annotations

import argparse
import os
import shutil
from importlib import resources

from monkeyjump.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="the command to start")


def run(options: argparse.Namespace) -> int:
    command = [word for i, word in enumerate(options.program) if not (i == 0 and word == "--")]
    if not command:
        raise ConfigError("run needs a program: monkeyjump run -- python script.py", title="nothing to run")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"no program {command[0]!r} on the path: check the name.", title="nothing to run")
    hook = str(resources.files("monkeyjump") / "cli" / "site")
    paths = [hook, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.execvpe(command[0], command, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
