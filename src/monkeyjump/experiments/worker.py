"""What a process of a comparison does: one run after another, until nobody sends it any.

The heavy imports come with the first run, when what is printed goes to its log already.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path

from monkeyjump.first_imports import without_advice_to_others

LOG = "output.log"
NO_MEMORY, IN_USE = "no memory", "in use"
GRACE = 600.0  # seconds for the checkpoint of a run whose parent is gone


def work(connection: Connection, jobs: int, gpu: str | None) -> None:
    """Answer every run with its error in words, or None, and the reason, where it is one that others know to handle."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C goes to the parent alone, which tells its workers
    stop_with_parent()
    without_advice_to_others()
    with suppress(EOFError, OSError, KeyboardInterrupt):
        recipe, test = connection.recv()
        _print_to(recipe.folder / LOG)

        import torch

        from monkeyjump.errors import InUseError, NoMemoryError
        from monkeyjump.experiments.compare import in_a_line, make_cell
        from monkeyjump.training.shared import Shared

        torch.set_num_threads(max(1, torch.get_num_threads() // jobs))  # beside a GPU too: idle ones spin
        shared = Shared()
        while True:
            problem: Exception | None = None
            try:
                make_cell(recipe, test, shared)
            except Exception as error:  # whatever it is, the next run may do without it
                traceback.print_exc()
                shared, problem = Shared(), error
            said = None if problem is None else in_a_line(problem)
            if problem is None and not gc.get_freeze_count():
                gc.freeze()  # modules, base model and compiled code stay, and every run ends with two collections
            no_memory = isinstance(problem, torch.OutOfMemoryError | NoMemoryError)
            connection.send((said, NO_MEMORY if no_memory else IN_USE if isinstance(problem, InUseError) else ""))
            recipe, test = connection.recv()
            _print_to(recipe.folder / LOG)
    gc.unfreeze()


def stop_with_parent() -> None:
    """Where the parent is killed, stop as by Ctrl-C, with a checkpoint and a record, instead of going on unseen."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the parent with & ignores it
    if (parent := parent_process()) is not None:

        def watch() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(GRACE)
            os._exit(1)  # a pool's process waits for more work, for ever

        threading.Thread(target=watch, daemon=True).start()


def _print_to(path: Path) -> None:
    """Both streams of this process, for its libraries too, go to the end of a file."""
    with path.open("a", encoding="utf-8") as file:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(file.fileno(), number)
